"""GGUF files, versions 2 and 3, read in place: every tensor of a header placed in the mapped file.

Owns the stored types and the check that every tensor lies in the file and over no other. Never reads a tensor's payload.
Format: the GGUF specification of the ggml project (docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvseal.core.errors import ModelCorrupt
from kvseal.exec.weights.checkpoint import Checkpoint
from kvseal.exec.weights.gguf_header import GGUFHeader, NumberArray, Scalar, StringArray, read_header
from kvseal.exec.weights.quants import BLOCK_SHAPES
from kvseal.exec.weights.types import TensorSource

_TENSOR_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

Value = Scalar | StringArray | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened file. `metadata` values are Python scalars, `StringArray`s, or NumPy arrays (copies)."""

    version: int
    metadata: Mapping[str, Value]
    checkpoint: Checkpoint


def read_gguf(path: Path) -> GGUFFile:
    """Maps and checks the file. Raises ModelNotFound, ModelCorrupt or ModelUnsupported."""
    header = read_header(path)
    metadata = {
        key: np.array(value.values, dtype=value.type_code) if isinstance(value, NumberArray) else value
        for key, value in header.metadata.items()
    }
    return GGUFFile(header.version, metadata, _placed(header))


def _placed(header: GGUFHeader) -> Checkpoint:
    def corrupt(what: str) -> ModelCorrupt:
        return ModelCorrupt(f"{header.path}: in the tensor table: {what}")

    whole = np.frombuffer(header.source.buffer, dtype=np.uint8)
    tensors: dict[str, TensorSource] = {}
    unsupported: dict[str, str] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.tensors.items():
        shape, offset = entry.shape, entry.offset
        type_name = _TENSOR_TYPES.get(entry.type_number, f"type {entry.type_number}")
        if type_name not in BLOCK_SHAPES:
            unsupported[name] = type_name
            continue
        elements, block_bytes = BLOCK_SHAPES[type_name]
        count = int(np.prod([float(n) for n in shape]))
        if min(shape) < 1 or count > 2**48 or shape[-1] % elements:
            raise corrupt(f"tensor {name} of type {type_name} has the impossible shape {list(shape)}")
        start, size = header.data_start + offset, count // elements * block_bytes
        if offset % header.alignment or start + size > len(whole):
            raise corrupt(f"tensor {name} lies at bytes {start} to {start + size} of a file of {len(whole)} bytes; it is cut short")
        spans.append((start, start + size, name))
        tensors[name] = TensorSource(whole[start : start + size], type_name, shape)
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise corrupt(f"tensors {name} and {other} overlap")
    return Checkpoint(header.path, tensors, unsupported, (header.source,))
