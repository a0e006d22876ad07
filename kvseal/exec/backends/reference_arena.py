"""The reference backend's arena: NumPy views of seals and payload, the checks, and the storage of the four KV dtypes.

Owns the memory and everything that is laid out in it, as `kv.geometry` and `kv.seal` say. Never computes attention.
Laws L3-L7, L10: `check_write` and `check_read` are the twins of native/seal.h; `write` moves `filled` last (L5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvseal.core.errors import LawBroken
from kvseal.core.laws import Law
from kvseal.exec.backend import Float32, Int32, SealCheck
from kvseal.exec.backends.reference_digest import page_fold, section_digests
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE, SEAL_MAGIC

Float64 = npt.NDArray[np.float64]

_ELEMENT_DTYPES = {KVDtype.FP32: np.float32, KVDtype.FP16: np.float16, KVDtype.INT8: np.int8, KVDtype.INT4: np.uint8}


LINE_BYTES = 64
"""Every seal begins a cache line, here as in a native arena: the hand-off's checks are native and want it so."""


def _zeros(pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """[pages, page_bytes], from a line's beginning on."""
    found = np.zeros(pages * page_bytes + LINE_BYTES, dtype=np.uint8)
    start = -found.ctypes.data % LINE_BYTES
    return found[start : start + pages * page_bytes].reshape(pages, page_bytes)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the seal of a page must say to this row."""

    nonce: int
    scope: tuple[int, int]
    format: int
    ordinal: int
    layer: int


class ReferenceArena:
    """See `kvseal.exec.backend.Arena`."""

    def __init__(self, geometry: KVGeometry, pages: int) -> None:
        self._geometry = geometry
        self.pages = pages
        self.memory = _zeros(pages, geometry.page_bytes)
        self._seals = self._view(SEAL_DTYPE, 0, ())
        heads, slots, dtype = geometry.kv_heads, geometry.page_tokens, np.dtype(_ELEMENT_DTYPES[geometry.kv_dtype])
        stored = geometry.head_dim // 2 if geometry.kv_dtype is KVDtype.INT4 else geometry.head_dim
        runs = [SEAL_BYTES, SEAL_BYTES + geometry.run_bytes]
        self._elements = [self._view(dtype, start, (heads, slots, stored)) for start in runs]
        self._scales = (
            [self._view(np.dtype(np.float32), start + geometry.element_run_bytes, (heads, slots)) for start in runs]
            if geometry.kv_dtype.scale_bytes
            else []
        )

    def close(self) -> None:
        """Nothing to do: the memory goes with its last view."""

    def check_write(self, page: int, want: Expected, slot: int, ledger_nonce: int) -> SealCheck:
        """May `slot` be written next? Slot 0 begins a hand-out: the ledger must know it and the seal must not."""
        seal = self._seals[page, want.layer]
        if slot == 0:
            if ledger_nonce != want.nonce or want.nonce == 0:
                return SealCheck.LEDGER
            return SealCheck.REUSED if int(seal["nonce"]) == want.nonce else SealCheck.CLEAN
        identity = self._identity(page, want)
        if identity is not SealCheck.CLEAN:
            return identity
        if int(seal["filled"]) != slot:
            return SealCheck.FILLED
        return SealCheck.REUSED if seal["digest"].any() else SealCheck.CLEAN

    def check_read(self, page: int, want: Expected, needed_slots: int) -> SealCheck:
        identity = self._identity(page, want)
        if identity is not SealCheck.CLEAN:
            return identity
        return SealCheck.CLEAN if int(self._seals[page, want.layer]["filled"]) >= needed_slots else SealCheck.FILLED

    def _identity(self, page: int, want: Expected) -> SealCheck:
        seal = self._seals[page, want.layer]
        for check, found, wanted in (
            (SealCheck.MAGIC, int(seal["magic"]), SEAL_MAGIC),
            (SealCheck.NONCE, int(seal["nonce"]), want.nonce),
            (SealCheck.SCOPE, tuple(int(x) for x in seal["scope"]), want.scope),
            (SealCheck.FORMAT, int(seal["format"]), want.format),
            (SealCheck.LAYER, int(seal["layer"]), want.layer),
            (SealCheck.ORDINAL, int(seal["ordinal"]), want.ordinal),
        ):
            if found != wanted:
                return check
        return SealCheck.CLEAN

    def write(self, page: int, want: Expected, slot: int, k: Float32, v: Float32) -> None:
        """Stores [kv_heads, head_dim] K and V, then writes the seal (slot 0), then moves `filled`."""
        for side, vectors in enumerate((k, v)):
            elements, scales = _encode(vectors, self._geometry.kv_dtype)
            self._elements[side][page, want.layer, :, slot] = elements
            if scales is not None:
                self._scales[side][page, want.layer, :, slot] = scales
        seal = self._seals[page : page + 1, want.layer]
        if slot == 0:
            seal["magic"], seal["nonce"], seal["scope"] = SEAL_MAGIC, want.nonce, want.scope
            seal["format"], seal["ordinal"], seal["layer"] = want.format, want.ordinal, want.layer
            seal["digest"] = 0
        seal["filled"] = slot + 1

    def read(self, pages: npt.NDArray[np.int64], layer: int) -> tuple[Float64, Float64]:
        """K and V of these pages in order: [kv_heads, pages * page_tokens, head_dim] each."""
        sides = []
        for side in range(2):
            scales = self._scales[side][pages, layer] if self._scales else None
            vectors = _decode(self._elements[side][pages, layer], scales, self._geometry.kv_dtype)
            sides.append(vectors.swapaxes(0, 1).reshape(self._geometry.kv_heads, -1, self._geometry.head_dim))
        return sides[0], sides[1]

    def seal_digests(self, pages: Int32) -> npt.NDArray[np.uint8]:
        """[n, 16]. Raises LawBroken (L7) for a page that is not full in every layer."""
        geometry = self._geometry
        for page in pages:
            if (self._seals[page]["filled"] != geometry.page_tokens).any():
                raise LawBroken(Law.L7, f"page {int(page)} is not full and cannot be sealed")
        sections = self.memory[pages].reshape(-1, geometry.section_bytes)[:, SEAL_BYTES:]
        digests = section_digests(np.ascontiguousarray(sections).view("<u8"), geometry.format).reshape(-1, geometry.layers, 2)
        for page, of_layers in zip(pages, digests, strict=True):
            self._seals[page]["digest"] = of_layers
        return page_fold(digests).astype("<u8").view(np.uint8)

    def wipe(self, pages: Int32) -> None:
        self.memory[pages] = 0

    def _view(self, dtype: np.dtype[Any], start: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """[pages, layers, *shape] of `dtype`, `start` bytes into every section."""
        inner = [dtype.itemsize]
        for length in reversed(shape[1:]):
            inner.insert(0, inner[0] * length)
        geometry = self._geometry
        return np.ndarray(
            (self.pages, geometry.layers, *shape),
            dtype=dtype,
            buffer=self.memory.reshape(-1).data,
            offset=start,
            strides=(geometry.page_bytes, geometry.section_bytes, *inner[: len(shape)]),
        )


def _encode(vectors: Float32, dtype: KVDtype) -> tuple[npt.NDArray[np.generic], Float32 | None]:
    """[heads, head_dim] -> stored elements and, for integers, [heads] scales: the largest magnitude is 127, or -8 of what is rotated."""
    if dtype is KVDtype.FP32:
        return vectors, None
    if dtype is KVDtype.FP16:
        return vectors.astype(np.float16), None
    if dtype is KVDtype.INT8:
        largest = np.abs(vectors).max(axis=-1)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        return np.rint(vectors * inverse[:, None]).astype(np.int8), largest / np.float32(127)
    turned = rotated(vectors)
    peak = np.take_along_axis(turned, np.abs(turned).argmax(axis=-1)[:, None], axis=-1)
    inverse = np.divide(np.float32(-8), peak, out=np.zeros_like(peak), where=peak != 0)
    nibbles = (np.rint(np.minimum(turned * inverse, np.float32(7))) + 8).astype(np.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), peak[:, 0] * np.float32(-0.125)


def rotated(vectors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A Hadamard transform of the last axis, in blocks of the largest power of two that divides it; twice gives block times as much.
    Spreads the few large dimensions that keys have, so that four bits suffice for all."""
    count = vectors.shape[-1]
    block, half, turned = count & -count, 1, vectors.copy()
    while half < block:
        pairs = turned.reshape(*vectors.shape[:-1], -1, 2, half)
        turned = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2).reshape(vectors.shape)
        half *= 2
    return turned


def _decode(elements: npt.NDArray[np.generic], scales: npt.NDArray[np.generic] | None, dtype: KVDtype) -> Float64:
    """[..., stored] -> [..., head_dim]; scales [...]."""
    if scales is None:
        return elements.astype(np.float64)
    if dtype is KVDtype.INT8:
        return elements.astype(np.float64) * scales.astype(np.float64)[..., None]
    packed = elements.astype(np.uint8)
    integers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1).astype(np.float64) - 8
    turned: Float64 = rotated(integers * scales.astype(np.float64)[..., None])
    count: int = turned.shape[-1]
    return turned / (count & -count)
