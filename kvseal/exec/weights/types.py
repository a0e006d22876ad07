"""Weights as a backend receives them: named places in memory-mapped files, not arrays of floats.

Owns `TensorSource`, `LayerWeights` and `ModelWeights`. A source never copies and never dequantises unless asked to; backends pack the
bytes themselves. Law L10: `ModelWeights.digest` names the content, so that K and V of other weights are never taken for these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.quants import BLOCK_SHAPES, dequantize
from kvseal.exec.weights.source_file import SourceFile

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor, row-major, as it is stored. Matrices are (output rows, input columns): ``y = W x``."""

    raw: Bytes
    """[stored bytes], contiguous, a view of the mapped file: row after row, in stored order."""
    type: str
    """A key of `quants.BLOCK_SHAPES`: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K."""
    shape: tuple[int, ...]
    """(rows, columns) or (n,)."""
    row_order: npt.NDArray[np.int32] | None = None
    """[rows]: row i of the tensor is stored row row_order[i]. None: as stored. GGUF keeps llama's q and k for interleaved rotation."""

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row; for a vector, of the whole."""
        elements, size = BLOCK_SHAPES[self.type]
        return self.columns // elements * size

    def to_float32(self) -> Float32:
        """[shape], a new array, rows in the tensor's own order."""
        flat = dequantize(self.raw, self.type).reshape(self.shape)
        return flat if self.row_order is None else np.ascontiguousarray(flat[self.row_order])

    def row_slice(self, start: int, stop: int) -> TensorSource:
        """Rows start..stop of a tensor stored in order, without a copy: the parts of a fused projection."""
        if self.row_order is not None or not 0 <= start < stop <= self.rows:
            raise ValueError("only rows of a tensor stored in its own order can be sliced")
        part = self.raw[start * self.row_bytes : stop * self.row_bytes]
        return replace(self, raw=part, shape=(stop - start, *self.shape[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Absent biases and norms are None."""

    q: TensorSource
    k: TensorSource
    v: TensorSource
    o: TensorSource
    gate: TensorSource
    up: TensorSource
    down: TensorSource
    attn_norm: Float32
    mlp_norm: Float32
    q_bias: Float32 | None = None
    k_bias: Float32 | None = None
    v_bias: Float32 | None = None
    o_bias: Float32 | None = None
    gate_bias: Float32 | None = None
    up_bias: Float32 | None = None
    down_bias: Float32 | None = None
    q_norm: Float32 | None = None
    """[head_dim], when `ModelSpec.qk_norm`."""
    k_norm: Float32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    spec: ModelSpec
    embedding: TensorSource
    """(vocab_size, hidden_size)."""
    lm_head: TensorSource | None
    """None: the embedding serves as the output projection."""
    final_norm: Float32
    layers: tuple[LayerWeights, ...]
    digest: bytes
    """32 bytes that name these weights and everything else that changes K and V (L10)."""
    bytes: int
    """Size of the tensors as stored."""
    files: tuple[SourceFile, ...] = ()
    """What the tensors are mapped from."""

    def release_pages(self) -> None:
        """Lets go of source pages that are resident: what was packed is not read again."""
        for file in self.files:
            file.release_pages()
