"""The 128-bit digest of a layer's runs, and the fold of a page: twins of native/digest.h and of the native `seal_digests`.

For accidents (a flipped bit, a lost write), not against somebody who can write memory. Vectorised over sections; plain otherwise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_K0, _K1 = np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB)
_K2, _K3 = np.uint64(0x8EBC6AF09C88C6E3), np.uint64(0x589965CC75374CC3)
_FOLD_LOW, _FOLD_HIGH = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_HALF, _LOW_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)


def section_digests(words: UInt64, seed: int) -> UInt64:
    """[n, words], a multiple of 8 words each -> [n, 2]: low and high half."""
    start = np.uint64(seed)
    a, b, c, d = (np.full(len(words), start ^ key, dtype=np.uint64) for key in (_K0, _K1, _K2, _K3))
    for at in range(0, words.shape[1], 8):
        w = words[:, at : at + 8].T
        a, b, c, d = (
            _fold(w[0] ^ _K1, w[1] ^ a) + b,
            _fold(w[4] ^ _K3, w[5] ^ b) + c,
            _fold(w[2] ^ _K2, w[3] ^ c) + d,
            _fold(w[6] ^ _K0, w[7] ^ d) + a,
        )
    length = np.uint64(8 * words.shape[1])
    low = _fold(a ^ _K0 ^ length, c ^ _K1) ^ _fold(b ^ _K2, d ^ _K3)
    high = _fold(a ^ _K3, b ^ _K2 ^ length) ^ _fold(c ^ _K1, d ^ _K0)
    low[(low | high) == 0] = 1  # zero means "not sealed"
    return np.stack([low, high], axis=1)


def page_fold(digests: UInt64) -> UInt64:
    """[pages, layers, 2] -> [pages, 2]."""
    low = np.full(len(digests), _FOLD_LOW, dtype=np.uint64)
    high = np.full(len(digests), _FOLD_HIGH, dtype=np.uint64)
    for layer in range(digests.shape[1]):
        digest_low, digest_high, number = digests[:, layer, 0], digests[:, layer, 1], np.uint64(layer)
        low = _fold(low ^ digest_low, np.full_like(low, _K0 ^ number)) + digest_high
        high = _fold(high ^ digest_high, np.full_like(high, _K1 ^ number)) + digest_low
    return np.stack([low, high], axis=1)


def _fold(a: UInt64, b: UInt64) -> UInt64:
    """Both halves of the 128-bit product, xored; by 32-bit limbs, wrapping as unsigned numbers do."""
    a_low, a_high, b_low, b_high = a & _LOW_MASK, a >> _HALF, b & _LOW_MASK, b >> _HALF
    low_low, low_high, high_low = a_low * b_low, a_low * b_high, a_high * b_low
    middle = (low_low >> _HALF) + (low_high & _LOW_MASK) + (high_low & _LOW_MASK)
    upper = a_high * b_high + (low_high >> _HALF) + (high_low >> _HALF) + (middle >> _HALF)
    folded: UInt64 = (a * b) ^ upper
    return folded
