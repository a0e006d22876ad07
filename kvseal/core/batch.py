"""One step of work, and what came of it, as frozen data.

Owns the types that pass between `sched` (who makes batches and applies results) and `exec` (who computes them). Neither imports the
other. L6: every row of a batch and of its result carries its request's id. L12: a broken seal is a property of one row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvseal.core.errors import BrokenSeal, Unavailable
from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import SamplingParams


class TableView(Protocol):
    """A block table as the kernels read it; made by `kv.block_table`."""

    @property
    def scope(self) -> Scope: ...

    @property
    def valid_tokens(self) -> int:
        """Tokens whose K and V are committed in all layers (L5)."""
        ...

    @property
    def stamps(self) -> array[int]:
        """Typecode 'Q': page, nonce, page, nonce, ... in order of ordinal (L6). Read-only for everybody but `kv`."""
        ...


class Row(NamedTuple):
    """One request's share of a step: compute `tokens` at positions `start`, `start` + 1, ...

    A named tuple, like `core.events.TokensEvent`: one is made per request and step, and a frozen dataclass takes six times as long.
    """

    request_id: RequestId
    tokens: Sequence[int]
    start: int
    table: TableView
    sampling: SamplingParams
    samples: bool
    """Whether the token after the last one is wanted (a chunk in the middle of a prompt wants none)."""
    history: Sequence[int]
    """Prompt and output tokens so far, for penalties. A live view: read in the step, never kept."""
    prompt_tokens: int
    """How many of `history` are the prompt; output index of the sampled token is start + len(tokens) - prompt_tokens."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of different requests, at most one each."""

    step: int
    rows: tuple[Row, ...]

    @property
    def total_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities under the model's own distribution (before temperature and filters)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Most likely first."""


class RowResult(NamedTuple):
    """What became of a row. With `broken`, nothing else in it may be used. A named tuple, like `Row`."""

    request_id: RequestId
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """For the positions start + 1 .. end of this row that lie in the prompt (the first token of a prompt has none)."""
    page_digests: tuple[bytes, ...] = ()
    """16 bytes for each page that this row filled, in order: the evidence that `commit` needs to seal it (L7)."""
    broken: BrokenSeal | None = None
    failed: Unavailable | None = None
    """The row's seals are whole, yet no token could be chosen: the request ends `Failed`. Nothing else in the result may be used."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    step: int
    rows: tuple[RowResult, ...]
    """Same requests in the same order as the batch."""
