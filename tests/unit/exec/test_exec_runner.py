"""The runner: which row gets which token, which pages are digested, and what a broken row takes with it (L6, L7, L12)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvseal.core.batch import Batch, BatchResult, Row
from kvseal.core.errors import SamplingFailed
from kvseal.core.ids import RequestId, Scope
from kvseal.core.laws import Law
from kvseal.core.request import SamplingParams
from kvseal.exec.backend import Float32, Int32, RowBreak, SealCheck, StepArrays, StepOutput
from kvseal.exec.runner import LOGITS_ROWS, Runner
from kvseal.kv.geometry import KVGeometry

VOCAB = 50
PAGE_TOKENS = 8


@dataclass
class Table:
    scope: Scope
    valid_tokens: int
    stamps: array[int]


@dataclass
class Oracle:
    """A backend whose state after a token is the token, and whose logits prefer the token after it."""

    geometry: KVGeometry = field(default_factory=lambda: KVGeometry(layers=1, kv_heads=1, head_dim=8, page_tokens=PAGE_TOKENS))
    spec: None = None
    arena: None = None
    breaks: list[RowBreak] = field(default_factory=list)
    poisoned: int = -1
    steps: list[StepArrays] = field(default_factory=list)
    digested: list[int] = field(default_factory=list)
    largest_logits: int = 0

    def forward(self, step: StepArrays) -> StepOutput:
        self.steps.append(step)
        states = []
        for row, wanted in enumerate(step.hidden_counts):
            own = step.tokens[step.row_offsets[row] : step.row_offsets[row + 1]]
            states.extend(own[len(own) - wanted :])
        return StepOutput(np.array(states, dtype=np.float32).reshape(-1, 1), self.breaks)

    def logits(self, hidden: Float32) -> Float32:
        self.largest_logits = max(self.largest_logits, len(hidden))
        out = np.zeros((len(hidden), VOCAB), dtype=np.float32)
        for index, state in enumerate(hidden[:, 0]):
            out[index, (int(state) + 1) % VOCAB] = 10
            if int(state) == self.poisoned:
                out[index, 3] = np.nan
        return out

    def seal_digests(self, pages: Int32) -> np.ndarray:
        self.digested.extend(int(page) for page in pages)
        return np.stack([np.full(16, page, dtype=np.uint8) for page in pages])

    def wipe(self, pages: Int32) -> None: ...

    def close(self) -> None: ...


GREEDY = SamplingParams(temperature=0)


def row(name: str, tokens: list[int], start: int = 0, *, samples: bool = True, sampling: SamplingParams = GREEDY, prompt: int = 999) -> Row:
    history = [0] * start + tokens
    pages = -(-len(history) // PAGE_TOKENS)
    first = 10 * (ord(name[0]) - ord("a"))
    stamps = array("Q", [x for page in range(pages) for x in (first + page, 77)])
    table = Table(Scope(bytes(range(16))), start, stamps)
    return Row(RequestId(name), tokens, start, table, sampling, samples, history, min(prompt, len(history)))


def run(backend: Oracle, *rows: Row) -> BatchResult:
    return Runner(backend).run(Batch(4, rows), np.zeros(64, dtype=np.uint64))  # type: ignore[arg-type]


def test_each_row_gets_its_own_token() -> None:
    backend = Oracle()
    result = run(backend, row("a", [1, 2, 3]), row("b", [9], 5), row("c", [20, 21], samples=False), row("d", [30]))
    assert result.step == 4
    assert [(r.request_id, r.token) for r in result.rows] == [("a", 4), ("b", 10), ("c", None), ("d", 31)]
    step = backend.steps[0]
    assert step.tokens.tolist() == [1, 2, 3, 9, 20, 21, 30]
    assert step.row_offsets.tolist() == [0, 3, 4, 6, 7]
    assert step.start_positions.tolist() == [0, 5, 0, 0]
    assert step.hidden_counts.tolist() == [1, 1, 0, 1]
    assert step.scopes.tolist() == [[0x0706050403020100, 0x0F0E0D0C0B0A0908]] * 4
    assert all(x.dtype == np.int32 for x in (step.tokens, step.row_offsets, step.start_positions, step.hidden_counts))


def test_an_empty_batch_runs_nothing() -> None:
    backend = Oracle()
    assert run(backend).rows == ()
    assert not backend.steps


def test_pages_that_became_full_are_digested() -> None:
    backend = Oracle()
    result = run(backend, row("a", [1] * 17), row("b", [1], 7), row("c", [1], 6), row("d", [1], 8), row("e", [1] * 8, 4, samples=False))
    assert backend.digested == [0, 1, 10, 40]
    assert [r.page_digests for r in result.rows] == [(bytes([0] * 16), bytes([1] * 16)), (bytes([10] * 16),), (), (), (bytes([40] * 16),)]


def test_a_broken_row_yields_nothing_else() -> None:
    backend = Oracle(breaks=[RowBreak(1, SealCheck.SCOPE, 10, 0, 2)])
    result = run(backend, row("a", [1] * 8), row("b", [1] * 8), row("c", [5]))
    broken = result.rows[1]
    assert broken.broken is not None
    assert (broken.broken.law, broken.broken.page, broken.broken.ordinal, broken.broken.layer) == (Law.L4, 10, 0, 2)
    assert broken.broken.check == "scope"
    assert (broken.token, broken.page_digests, broken.prompt_logprobs, broken.request_id) == (None, (), (), "b")
    assert backend.digested == [0]
    assert [r.token for r in result.rows] == [2, None, 6]


def test_logits_that_are_not_finite_end_their_row_alone() -> None:
    result = run(Oracle(poisoned=7), row("a", [1]), row("b", [7] * 8), row("c", [5]))
    assert isinstance(result.rows[1].failed, SamplingFailed)
    assert (result.rows[1].token, result.rows[1].page_digests) == (None, ())
    assert [r.token for r in result.rows] == [2, None, 6]


def test_prompt_logprobs_of_chunks() -> None:
    """Chunks of a prompt of 10: each gives the logprobs of the tokens that its states predict, the prompt's own only."""
    sampling = SamplingParams(temperature=0, prompt_logprobs=1, logprobs=0)
    tokens = [3, 4, 5, 9, 10, 11, 2, 3, 4, 5]
    backend = Oracle()
    entries = []
    for start, end in ((0, 4), (4, 5), (5, 10)):
        history = [*tokens]
        part = row("a", tokens[start:end], start, samples=end == 10, sampling=sampling)
        part = Row(part.request_id, part.tokens, start, part.table, sampling, end == 10, history, 10)
        result = run(backend, row("b", [1]), part, row("c", [2])).rows
        assert (result[0].token, result[2].token) == (2, 3)
        entries.extend(result[1].prompt_logprobs)
    assert [entry.token for entry in entries if entry] == tokens[1:]
    likely = [entry.logprob > -0.1 for entry in entries if entry]
    assert likely == [after == (before + 1) % VOCAB for before, after in pairwise(tokens)]
    assert all(len(entry.top) == 1 for entry in entries if entry)
    assert result[1].token == 6
    assert result[1].logprobs is not None


def test_no_prompt_logprobs_after_the_prompt() -> None:
    sampling = SamplingParams(temperature=0, prompt_logprobs=2)
    backend = Oracle()
    assert run(backend, row("a", [5], 12, sampling=sampling, prompt=12)).rows[0].prompt_logprobs == ()
    assert backend.steps[0].hidden_counts.tolist() == [1]


def test_logits_stay_bounded() -> None:
    sampling = SamplingParams(temperature=0, prompt_logprobs=0)
    backend = Oracle()
    tokens = [i % VOCAB for i in range(300)]
    result = run(backend, row("a", tokens, sampling=sampling), *(row("b", [i]) for i in range(3)))
    assert backend.largest_logits <= LOGITS_ROWS
    assert len(result.rows[0].prompt_logprobs) == 299
    assert [r.token for r in result.rows[1:]] == [1, 2, 3]
