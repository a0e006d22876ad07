"""What the forward-level suites share: backends by name, a pool of stamps without a pool, sequences computed in any chunks."""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvseal.exec.backend import Backend, RowBreak, StepArrays, StepOutput
from kvseal.exec.backends.reference import ReferenceBackend
from kvseal.exec.weights.types import ModelWeights
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.kv.seal import SEAL_DTYPE

HAVE_CPU = importlib.util.find_spec("kvseal._native") is not None and importlib.util.find_spec("kvseal.exec.backends.cpu") is not None
BACKENDS = ["reference", "cpu"] if HAVE_CPU else ["reference"]

SCOPE = bytes(range(16))
OTHER_SCOPE = bytes(range(16, 32))
_BENCHES = count(1)


def geometry_of(weights: ModelWeights, kv_dtype: str = "fp32", page_tokens: int = 8) -> KVGeometry:
    spec = weights.spec
    return KVGeometry(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=KVDtype(kv_dtype),
        page_tokens=page_tokens,
        weights_digest=weights.digest,
    )


def make_backend(
    name: str,
    weights: ModelWeights,
    *,
    kv_dtype: str = "fp32",
    page_tokens: int = 8,
    pages: int = 16,
    weight_format: str = "fp32",
    threads: int = 2,
) -> Backend:
    geometry = geometry_of(weights, kv_dtype, page_tokens)
    if name == "reference":
        return ReferenceBackend(weights, geometry, pages=pages)
    from kvseal.exec.backends.cpu import CPUBackend

    return CPUBackend(weights, geometry, pages=pages, weight_format=weight_format, threads=threads)


@dataclass
class Sequence_:
    """A sequence with its block table, as a scheduler would keep it."""

    tokens: list[int]
    stamps: array[int]
    scope: bytes = SCOPE
    done: int = 0


@dataclass
class Bench:
    """A backend with a ledger of nonces: hands out pages and runs steps."""

    backend: Backend
    ledger: np.ndarray = field(init=False)
    next_page: int = 0
    next_nonce: int = field(default_factory=lambda: 1000 + 10**6 * next(_BENCHES))
    """No two benches hand out the same nonce: they may use one backend after the other."""

    def __post_init__(self) -> None:
        self.ledger = np.zeros(len(self.backend.arena.memory), dtype=np.uint64)

    def hand_out(self, page: int) -> int:
        self.next_nonce += 7
        self.ledger[page] = self.next_nonce
        return self.next_nonce

    def sequence(
        self, tokens: Sequence[int], *, scope: bytes = SCOPE, extra_pages: int = 0, pages: Sequence[int] | None = None
    ) -> Sequence_:
        """Fresh pages for all tokens (or these pages), handed out now."""
        if pages is None:
            pages = range(self.next_page, self.next_page + self.backend.geometry.pages_for(len(tokens)) + extra_pages)
            self.next_page = pages.stop
        stamps = array("Q")
        for page in pages:
            stamps.extend((page, self.hand_out(page)))
        return Sequence_(list(tokens), stamps, scope)

    def step(self, *work: tuple[Sequence_, int], hidden: int | Sequence[int] | None = None) -> StepOutput:
        """Computes the next n tokens of each sequence. `hidden`: how many last states, of every row or of each (None: all new tokens)."""
        new = [sequence.tokens[sequence.done : sequence.done + wanted] for sequence, wanted in work]
        states = list(map(len, new)) if hidden is None else [hidden] * len(new) if isinstance(hidden, int) else hidden
        output = self.backend.forward(
            StepArrays(
                tokens=np.array([token for tokens in new for token in tokens], dtype=np.int32),
                row_offsets=np.cumsum([0, *map(len, new)], dtype=np.int32),
                start_positions=np.array([sequence.done for sequence, _ in work], dtype=np.int32),
                tables=[sequence.stamps for sequence, _ in work],
                scopes=np.frombuffer(b"".join(sequence.scope for sequence, _ in work), dtype="<u8").reshape(-1, 2).copy(),
                hidden_counts=np.array([min(most, len(tokens)) for most, tokens in zip(states, new, strict=True)], dtype=np.int32),
                ledger_nonces=self.ledger,
            )
        )
        broken = {found.row for found in output.breaks}
        for index, (sequence, wanted) in enumerate(work):
            if index not in broken:
                sequence.done += wanted
        return output

    def hidden(self, sequence: Sequence_, chunks: Sequence[int]) -> np.ndarray:
        """All states of a sequence computed alone in these chunks (the last one takes the rest)."""
        parts = []
        for wanted in (*chunks, len(sequence.tokens)):
            if left := min(wanted, len(sequence.tokens) - sequence.done):
                output = self.step((sequence, left))
                assert not output.breaks, output.breaks
                parts.append(output.hidden)
        return np.concatenate(parts)

    def seals(self) -> np.ndarray:
        """[pages, layers] of SEAL_DTYPE: a live view into the arena."""
        geometry, memory = self.backend.geometry, self.backend.arena.memory
        return np.ndarray(
            (len(memory), geometry.layers),
            SEAL_DTYPE,
            buffer=memory.reshape(-1).data,
            strides=(geometry.page_bytes, geometry.section_bytes),
        )


def only(breaks: Sequence[RowBreak]) -> RowBreak:
    assert len(breaks) == 1, breaks
    return breaks[0]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
