"""A batch becomes a batch of results: arrays in, one forward, logits, tokens, digests.

Owns the translation between `core.batch` and a backend's arrays. Never decides what runs and never frees. Laws: L6 (each result carries
its own row's request id), L7 (pages that a row filled are digested in the same step), L12 (a row with a broken seal yields nothing
else), L13 (a row's token depends on its own hidden state alone).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvseal.core.batch import Batch, BatchResult, Row, RowResult, TokenLogprobs
from kvseal.core.errors import BrokenSeal, SamplingFailed
from kvseal.exec.backend import Backend, Float32, Int32, RowBreak, StepArrays, UInt64
from kvseal.exec.sampler import Sampled
from kvseal.exec.sampling import NumpySampler, RowSampler

LOGITS_ROWS = 64
"""Rows of logits held at once: bounds memory when a long prompt's logprobs are asked for."""

_Chosen = int | Sampled | SamplingFailed
_new_tuple = tuple.__new__


class Runner:
    """Runs steps on one backend. Not thread-safe."""

    def __init__(self, backend: Backend, sampler: RowSampler | None = None) -> None:
        self._backend = backend
        self._sampler = sampler or NumpySampler()
        self._page_tokens = backend.geometry.page_tokens
        self._steady = _Steady(0)

    def run(self, batch: Batch, ledger_nonces: UInt64) -> BatchResult:
        """One step. `ledger_nonces` is the pool's own column, [pages]. Raises whatever the backend raises: nothing was applied then."""
        rows = batch.rows
        if not rows:
            return BatchResult(batch.step, ())
        wanted = [_hidden_count(row) for row in rows]
        output = self._backend.forward(self._step_arrays(rows, wanted, ledger_nonces))
        broken: dict[int, RowBreak] = {found.row: found for found in output.breaks}
        digests = self._digests(rows, broken)
        chosen = self._choose(rows, wanted, broken, output.hidden)
        results: list[RowResult] = []
        place = 0
        for index, row in enumerate(rows):
            found = broken.get(index)
            if found is not None:
                results.append(RowResult(row.request_id, broken=broken_seal(found)))
            else:
                prompt = self._prompt_logprobs(row, output.hidden, place) if wanted[index] > 1 or not row.samples else ()
                results.append(_result(row, chosen.get(index), prompt, digests.get(index, ())))
            place += wanted[index]
        return BatchResult(batch.step, tuple(results))

    def _step_arrays(self, rows: Sequence[Row], wanted: Sequence[int], ledger_nonces: UInt64) -> StepArrays:
        counts = [len(row.tokens) for row in rows]
        tokens = array("I")
        for row in rows:
            tokens.extend(row.tokens)
        if len(tokens) == len(rows) == sum(wanted):  # everybody decodes
            if len(rows) != len(self._steady.ones):
                self._steady = _Steady(len(rows))
            row_offsets, hidden_counts = self._steady.offsets, self._steady.ones
        else:
            row_offsets = np.array(list(accumulate(counts, initial=0)), dtype=np.int32)
            hidden_counts = np.array(wanted, dtype=np.int32)
        return StepArrays(
            tokens=np.frombuffer(tokens, dtype=np.int32),
            row_offsets=row_offsets,
            start_positions=np.array([row.start for row in rows], dtype=np.int32),
            tables=[row.table.stamps for row in rows],
            scopes=np.frombuffer(b"".join([row.table.scope for row in rows]), dtype="<u8").reshape(-1, 2),
            hidden_counts=hidden_counts,
            ledger_nonces=ledger_nonces,
        )

    def _digests(self, rows: Sequence[Row], broken: dict[int, RowBreak]) -> dict[int, tuple[bytes, ...]]:
        """By row index, the digests of the pages that became full in this step."""
        size = self._page_tokens
        filled: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            first, last = row.start // size, (row.start + len(row.tokens)) // size
            if first != last and index not in broken:
                filled += [(index, row.table.stamps[2 * ordinal]) for ordinal in range(first, last)]
        if not filled:
            return {}
        folds = self._backend.seal_digests(np.array([page for _, page in filled], dtype=np.int32))
        by_row: dict[int, tuple[bytes, ...]] = {}
        for (index, _), fold in zip(filled, folds, strict=True):
            by_row[index] = (*by_row.get(index, ()), fold.tobytes())
        return by_row

    def _choose(self, rows: Sequence[Row], wanted: Sequence[int], broken: dict[int, RowBreak], hidden: Float32) -> dict[int, _Chosen]:
        """By row index, what follows each row that wants a token: that of its last hidden state."""
        if len(hidden) == len(rows) <= LOGITS_ROWS and not broken and all(row.samples for row in rows):
            return dict(enumerate(self._sampler.choose(self._backend.logits(hidden), rows)))
        ends = list(accumulate(wanted))
        drawn = [index for index, row in enumerate(rows) if row.samples and index not in broken]
        chosen: dict[int, _Chosen] = {}
        for first in range(0, len(drawn), LOGITS_ROWS):
            some = drawn[first : first + LOGITS_ROWS]
            logits = self._backend.logits(hidden[[ends[index] - 1 for index in some]])
            chosen.update(zip(some, self._sampler.choose(logits, [rows[index] for index in some]), strict=True))
        return chosen

    def _prompt_logprobs(self, row: Row, hidden: Float32, place: int) -> tuple[TokenLogprobs, ...] | SamplingFailed:
        """Of the prompt's tokens at start + 1 .. end: the state at a position predicts the next one. `place`: of its first state."""
        top = row.sampling.prompt_logprobs
        if top is None or row.start + 1 >= row.prompt_tokens:
            return ()
        known: list[TokenLogprobs] = []
        end = min(row.end, row.prompt_tokens - 1)
        for first in range(row.start, end, LOGITS_ROWS):
            last = min(first + LOGITS_ROWS, end)
            logits = self._backend.logits(hidden[place + first - row.start : place + last - row.start])
            for each in self._sampler.logprobs(logits, row.history[first + 1 : last + 1], top):
                if isinstance(each, SamplingFailed):
                    return each
                known.append(each)
        return tuple(known)


class _Steady:
    """Arrays of a step in which `rows` rows have one token and want its state: the same from step to step."""

    def __init__(self, rows: int) -> None:
        self.offsets: Int32 = np.arange(rows + 1, dtype=np.int32)
        self.ones: Int32 = np.ones(rows, dtype=np.int32)


def _hidden_count(row: Row) -> int:
    if row.sampling.prompt_logprobs is not None and row.start + 1 < row.prompt_tokens:
        return len(row.tokens)
    return 1 if row.samples else 0


def _result(row: Row, chosen: _Chosen | None, prompt: tuple[TokenLogprobs, ...] | SamplingFailed, digests: tuple[bytes, ...]) -> RowResult:
    """What a row with clean seals yields."""
    if isinstance(prompt, SamplingFailed):
        return RowResult(row.request_id, failed=prompt)
    if isinstance(chosen, SamplingFailed):
        return RowResult(row.request_id, failed=chosen)
    token, logprobs = (chosen.token, chosen.logprobs) if isinstance(chosen, Sampled) else (chosen, None)
    return _new_tuple(RowResult, (row.request_id, token, logprobs, prompt, digests, None, None))


def broken_seal(found: RowBreak) -> BrokenSeal:
    """The error that a row ends with."""
    return BrokenSeal(found.check.law, page=found.page, ordinal=found.ordinal, layer=found.layer, check=found.check.name.lower())
