"""A file or folder of tensors, whatever its format: names to sources, and a taker that leaves nothing unexplained.

Owns `Checkpoint` and `TensorTaker`. Never interprets a tensor; a wrong shape, a missing or an unexpected tensor is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvseal.core.errors import ModelCorrupt, ModelUnsupported
from kvseal.exec.weights.quants import BLOCK_SHAPES, Float32
from kvseal.exec.weights.source_file import SourceFile
from kvseal.exec.weights.types import TensorSource


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    tensors: Mapping[str, TensorSource]
    unsupported: Mapping[str, str]
    """Tensor name -> its type, for tensors stored in a type that KVSeal does not read."""
    files: tuple[SourceFile, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(source.raw.size for source in self.tensors.values())


class TensorTaker:
    """Hands out the tensors of a checkpoint one by one, each with its expected shape."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._left = set(checkpoint.tensors) | set(checkpoint.unsupported)

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> TensorSource:
        """The source named so. Raises ModelCorrupt when missing or misshapen, ModelUnsupported for a type that is not read."""
        if name in self._checkpoint.unsupported:
            raise ModelUnsupported(
                f"{self._checkpoint.path}: tensor {name} is stored as {self._checkpoint.unsupported[name]}; KVSeal reads "
                f"{', '.join(BLOCK_SHAPES)}"
            )
        if name not in self._left:
            raise ModelCorrupt(f"{self._checkpoint.path}: tensor {name} of shape {list(shape)} is missing")
        source = self._checkpoint.tensors[name]
        if source.shape != shape:
            raise ModelCorrupt(
                f"{self._checkpoint.path}: tensor {name} has shape {list(source.shape)}; the configuration asks for {list(shape)}"
            )
        self._left.discard(name)
        return source

    def vector(self, name: str, length: int) -> Float32:
        """[length] float32. Raises as `take`, and ModelCorrupt when a value is not finite."""
        values = self.take(name, (length,)).to_float32()
        if not np.isfinite(values).all():
            raise ModelCorrupt(f"{self._checkpoint.path}: tensor {name} holds values that are not finite")
        return values

    def drop(self, names: Iterable[str]) -> None:
        """Marks tensors as known and not needed."""
        self._left.difference_update(names)

    def finish(self) -> None:
        """Raises ModelUnsupported when tensors are left that nobody asked for."""
        if self._left:
            some = ", ".join(sorted(self._left)[:4])
            more = f" and {len(self._left) - 4} more" if len(self._left) > 4 else ""
            raise ModelUnsupported(
                f"{self._checkpoint.path}: tensors {some}{more} are not part of this architecture as KVSeal computes it; "
                "serving without them would give wrong answers"
            )
