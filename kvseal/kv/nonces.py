"""Nonces: one per hand-out of a page, never repeated in a process, and not to be guessed.

Owns the sequence of nonces. A nonce is a counter put through a block cipher: a keyed permutation of the 64-bit words, so two hand-outs
can never share one (L3), and without the key the next one cannot be predicted from those seen. Never reads a clock or the system's
entropy: the key is handed in, so a simulation can own it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 27
_U32 = np.uint32


class NonceSource:
    """Speck64/128 in counter mode (Beaulieu et al., "The SIMON and SPECK families of lightweight block ciphers",
    IACR ePrint 2013/404): additions, rotations and xors of 32-bit words, so that a whole batch is a few dozen array operations.

    `secret` must belong to this process alone: two processes with the same secret hand out the same nonces.
    """

    def __init__(self, secret: bytes, *, batch: int = 1024) -> None:
        key = hashlib.blake2b(secret, digest_size=16, person=b"kvseal-nonce").digest()
        self._round_keys = round_keys(key)
        self._counter = 0
        self._batch = batch
        self._ready: list[int] = []

    def next(self) -> int:
        """Unsigned 64-bit, never 0."""
        if not self._ready:
            self._refill()
        return self._ready.pop()

    def take(self, count: int) -> list[int]:
        """What so many calls of `next` would give."""
        while len(self._ready) < count:
            self._refill()
        taken = self._ready[: -count - 1 : -1]
        del self._ready[-count:]
        return taken

    def _refill(self) -> None:
        counters = np.arange(self._counter, self._counter + self._batch, dtype=np.uint64)
        self._counter += self._batch
        words = encrypt(counters, self._round_keys)
        # 0 means "not handed out" in the ledger; exactly one counter value maps to it.
        self._ready = words[words != 0][::-1].tolist() + self._ready


def round_keys(key: bytes) -> tuple[int, ...]:
    """The key schedule: 16 bytes (k0 first, little endian) -> 27 words."""
    k, *rest = (int(word) for word in np.frombuffer(key, dtype="<u4"))
    keys = [k]
    for i in range(_ROUNDS - 1):
        low = rest[i]
        rotated = ((low >> 8) | (low << 24)) & 0xFFFFFFFF
        mixed = ((k + rotated) & 0xFFFFFFFF) ^ i
        k = (((k << 3) | (k >> 29)) & 0xFFFFFFFF) ^ mixed
        rest.append(mixed)
        keys.append(k)
    return tuple(keys)


def encrypt(words: npt.NDArray[np.uint64], keys: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """[n] -> [n]; high half of each word is the cipher's x, low half its y."""
    x = (words >> np.uint64(32)).astype(np.uint32)
    y = words.astype(np.uint32)
    for key in keys:
        x = (((x >> _U32(8)) | (x << _U32(24))) + y) ^ _U32(key)
        y = ((y << _U32(3)) | (y >> _U32(29))) ^ x
    return (x.astype(np.uint64) << np.uint64(32)) | y.astype(np.uint64)
