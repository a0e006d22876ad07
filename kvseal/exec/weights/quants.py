"""The stored number formats, and how each becomes float32.

Owns the block layouts of GGUF's tensor types that KVSeal reads. Plain and whole-array; kernels have their own packings.
Layouts: the block structures of ggml (``ggml-common.h``): a block holds a fixed number of elements, its scales first or last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK_SHAPES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Type name -> (elements per block, bytes per block)."""


def dequantize(raw: Bytes, type_name: str) -> Float32:
    """[bytes] of whole blocks -> [elements] float32, a new array. Raises ValueError for an unknown type or a broken block."""
    if type_name not in BLOCK_SHAPES:
        raise ValueError(f"unknown tensor type {type_name}")
    _, size = BLOCK_SHAPES[type_name]
    if raw.size % size:
        raise ValueError(f"{raw.size} bytes are not whole {type_name} blocks of {size} bytes")
    if type_name == "F32":
        return raw.view("<f4").astype(np.float32)
    if type_name == "F16":
        return raw.view("<f2").astype(np.float32)
    if type_name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    blocks = np.ascontiguousarray(raw).reshape(-1, size)
    if type_name in ("Q4_K", "Q5_K"):
        return _k_quant(blocks, five_bits=type_name == "Q5_K").reshape(-1)
    if type_name == "Q6_K":
        return _q6_k(blocks).reshape(-1)
    return _legacy(blocks, type_name).reshape(-1)


def _half(blocks: Bytes, start: int) -> Float32:
    """[blocks, 1]: the fp16 at byte `start` of each block."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, n] bytes -> [blocks, 2 n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _legacy(blocks: Bytes, type_name: str) -> Float32:
    """Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 elements, one scale, perhaps a minimum."""
    scale = _half(blocks, 0)
    if type_name == "Q8_0":
        return scale * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
    has_minimum = type_name.endswith("_1")
    five_bits = type_name.startswith("Q5")
    start = 4 if has_minimum else 2
    if five_bits:
        high_bits = np.ascontiguousarray(blocks[:, start : start + 4]).view("<u4")
        high = ((high_bits >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8)
        start += 4
    values = _nibbles(blocks[:, start : start + 16])
    if five_bits:
        values |= (high << 4).astype(np.uint8)
    if has_minimum:
        return scale * values.astype(np.float32) + _half(blocks, 2)
    return scale * (values.astype(np.int8) - np.int8(16 if five_bits else 8)).astype(np.float32)


def _k_quant(blocks: Bytes, *, five_bits: bool) -> Float32:
    """Q4_K, Q5_K: 256 elements in 8 groups of 32, 6-bit scales and minimums under two fp16 factors."""
    count = blocks.shape[0]
    factor, minimum_factor = _half(blocks, 0), _half(blocks, 2)
    packed = blocks[:, 4:16].reshape(count, 3, 4)
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 2) & 48)], axis=1)
    minimums = np.concatenate([second & 63, (rest >> 4) | ((second >> 2) & 48)], axis=1)
    quants_start = 48 if five_bits else 16
    quants = blocks[:, quants_start : quants_start + 128].reshape(count, 4, 1, 32)
    values = ((quants >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)) & 15).reshape(count, 8, 32)
    if five_bits:
        high = (blocks[:, 16:48].reshape(count, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
        values = values | (high << 4)
    group_scale = (factor * scales.astype(np.float32)).reshape(count, 8, 1)
    group_minimum = (minimum_factor * minimums.astype(np.float32)).reshape(count, 8, 1)
    return group_scale * values.astype(np.float32) - group_minimum


def _q6_k(blocks: Bytes) -> Float32:
    """Q6_K: 256 elements in 16 groups of 16, 8-bit scales under one fp16 factor."""
    count = blocks.shape[0]
    packed_low = blocks[:, :128].reshape(count, 2, 1, 64)
    low = ((packed_low >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)) & 15).reshape(count, 8, 32)
    packed_high = blocks[:, 128:192].reshape(count, 2, 1, 32)
    high = ((packed_high >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)) & 3).reshape(count, 8, 32)
    values = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32) * _half(blocks, 208)
    return scales.reshape(count, 16, 1) * values.reshape(count, 16, 16).astype(np.float32)
