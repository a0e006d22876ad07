"""The one door between the engine and whatever computes.

Owns the `Backend` protocol and the arrays that go through it. A backend owns the arena and the weights in its own form; it never
decides which rows run, never samples, never frees. Laws: L3-L6 and L10 are enforced *inside* `forward`, in the kernels that touch the
payload; L12: a row that breaks a seal is flagged, reads nothing and writes nothing more, and no other row changes by a bit; L13.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvseal.exec.spec import ModelSpec
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.seal import SealCheck as SealCheck

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """T new tokens of R rows, row after row. All arrays are C-contiguous."""

    tokens: Int32
    """[T]"""
    row_offsets: Int32
    """[R + 1]; row r owns tokens[row_offsets[r] : row_offsets[r + 1]], at least one."""
    start_positions: Int32
    """[R]; position in its sequence of a row's first new token = tokens already in the cache."""
    tables: Sequence[array[int]]
    """[R] arrays of typecode 'Q': page, nonce, page, nonce, ..."""
    scopes: UInt64
    """[R, 2]; the 16 scope bytes as two little-endian words."""
    hidden_counts: Int32
    """[R]; for how many of its last new tokens the final hidden state is wanted (0 for a middle chunk)."""
    ledger_nonces: UInt64
    """[pages]; the pool's own column of current nonces (0 = not handed out)."""


@dataclass(frozen=True, slots=True)
class RowBreak:
    row: int
    check: SealCheck
    page: int
    ordinal: int
    layer: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    hidden: Float32
    """[sum(hidden_counts), hidden_size], after the final norm. Rows with a break are present and meaningless."""
    breaks: Sequence[RowBreak]
    """At most one per row: the first. Empty when all is well."""


class Arena(Protocol):
    """One contiguous allocation of pages; what a transport would register."""

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """[pages, page_bytes], a view for tests, digests and transports. Nobody else writes it."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Weights and arena in, hidden states and logits out. Not thread-safe; one call at a time."""

    spec: ModelSpec
    geometry: KVGeometry

    @property
    def arena(self) -> Arena: ...

    def forward(self, step: StepArrays) -> StepOutput:
        """Appends K and V of every new token to its pages, sealing slot by slot, and computes the hidden states."""
        ...

    def logits(self, hidden: Float32) -> Float32:
        """[n, hidden_size] -> [n, vocab_size]. Row i depends on hidden[i] alone, to the bit."""
        ...

    def seal_digests(self, pages: Int32) -> npt.NDArray[np.uint8]:
        """Digests full pages [n] and writes each layer's digest into its seal; returns [n, 16], one fold per page (L7)."""
        ...

    def wipe(self, pages: Int32) -> None:
        """Zeroes payload and seals of pages that are going back to free (`--wipe-pages`)."""
        ...

    def close(self) -> None: ...
