"""A batch becomes a batch of results: arrays in, one forward, logits, tokens, digests.

Owns the translation between `core.batch` and a backend's arrays. Never decides what runs and never frees. Laws: L6 (each result carries
its own row's request id), L7 (pages that a row filled are digested in the same step), L12 (a row with a broken seal yields nothing
else), L13 (a row's token depends on its own hidden state alone).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvseal.core.batch import Batch, BatchResult, Row, RowResult, TokenLogprobs
from kvseal.core.errors import BrokenSeal, SamplingFailed
from kvseal.exec.backend import Backend, Float32, RowBreak, StepArrays, UInt64
from kvseal.exec.sampler import sample, token_logprobs

LOGITS_ROWS = 64
"""Rows of logits held at once: bounds memory when a long prompt's logprobs are asked for."""


class Runner:
    """Runs steps on one backend. Not thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._page_tokens = backend.geometry.page_tokens

    def run(self, batch: Batch, ledger_nonces: UInt64) -> BatchResult:
        """One step. `ledger_nonces` is the pool's own column, [pages]. Raises whatever the backend raises: nothing was applied then."""
        rows = batch.rows
        if not rows:
            return BatchResult(batch.step, ())
        wanted = [_hidden_count(row) for row in rows]
        output = self._backend.forward(_step_arrays(rows, wanted, ledger_nonces))
        broken: dict[int, RowBreak] = {found.row: found for found in output.breaks}
        digests = self._digests(rows, broken)
        results: list[RowResult] = []
        logits = _LazyLogits(self._backend, output.hidden)
        place = 0
        for index, row in enumerate(rows):
            found = broken.get(index)
            if found is not None:
                results.append(RowResult(row.request_id, broken=_broken_seal(found)))
            else:
                results.append(_result(row, logits, place, wanted[index], digests.get(index, ())))
            place += wanted[index]
        return BatchResult(batch.step, tuple(results))

    def _digests(self, rows: Sequence[Row], broken: dict[int, RowBreak]) -> dict[int, tuple[bytes, ...]]:
        """By row index, the digests of the pages that became full in this step."""
        size = self._page_tokens
        filled = [
            (index, row.table.stamps[2 * ordinal])
            for index, row in enumerate(rows)
            if index not in broken
            for ordinal in range(row.start // size, row.end // size)
        ]
        if not filled:
            return {}
        found = self._backend.seal_digests(np.array([page for _, page in filled], dtype=np.int32))
        by_row: dict[int, tuple[bytes, ...]] = {}
        for (index, _), digest in zip(filled, found, strict=True):
            by_row[index] = (*by_row.get(index, ()), digest.tobytes())
        return by_row


class _LazyLogits:
    """Logits of the hidden states that somebody asks for, `LOGITS_ROWS` at a time, in order."""

    def __init__(self, backend: Backend, hidden: Float32) -> None:
        self._backend = backend
        self._hidden = hidden
        self._first = 0
        self._block: Float32 | None = None

    def __getitem__(self, place: int) -> Float32:
        """[vocab_size] of hidden state `place`."""
        if self._block is None or not self._first <= place < self._first + len(self._block):
            self._first = place
            self._block = self._backend.logits(self._hidden[place : place + LOGITS_ROWS])
        row: Float32 = self._block[place - self._first]
        return row


def _hidden_count(row: Row) -> int:
    if row.sampling.prompt_logprobs is not None and row.start + 1 < row.prompt_tokens:
        return len(row.tokens)
    return 1 if row.samples else 0


def _step_arrays(rows: Sequence[Row], wanted: Sequence[int], ledger_nonces: UInt64) -> StepArrays:
    tokens: list[int] = []
    for row in rows:
        tokens.extend(row.tokens)
    return StepArrays(
        tokens=np.array(tokens, dtype=np.int32),
        row_offsets=np.array(list(accumulate((len(row.tokens) for row in rows), initial=0)), dtype=np.int32),
        start_positions=np.array([row.start for row in rows], dtype=np.int32),
        tables=[row.table.stamps for row in rows],
        scopes=np.frombuffer(b"".join(row.table.scope for row in rows), dtype="<u8").reshape(-1, 2),
        hidden_counts=np.array(wanted, dtype=np.int32),
        ledger_nonces=ledger_nonces,
    )


def _result(row: Row, logits: _LazyLogits, place: int, wanted: int, digests: tuple[bytes, ...]) -> RowResult:
    """What a row with clean seals yields. `place` is where its hidden states begin."""
    try:
        prompt = _prompt_logprobs(row, logits, place, wanted)
        if not row.samples:
            return RowResult(row.request_id, prompt_logprobs=prompt, page_digests=digests)
        chosen = sample(
            logits[place + wanted - 1],
            row.sampling,
            history=row.history,
            prompt_tokens=row.prompt_tokens,
            output_index=row.end - row.prompt_tokens,
        )
    except SamplingFailed as failed:
        return RowResult(row.request_id, failed=failed)
    return RowResult(row.request_id, token=chosen.token, logprobs=chosen.logprobs, prompt_logprobs=prompt, page_digests=digests)


def _prompt_logprobs(row: Row, logits: _LazyLogits, place: int, wanted: int) -> tuple[TokenLogprobs, ...]:
    """Of the prompt's tokens at start + 1 .. end: the state at a position predicts the next one."""
    top = row.sampling.prompt_logprobs
    if top is None or row.start + 1 >= row.prompt_tokens:
        return ()
    positions = range(row.start + 1, min(row.end, row.prompt_tokens - 1) + 1)
    return tuple(token_logprobs(logits[place + offset], row.history[position], top) for offset, position in enumerate(positions))


def _broken_seal(found: RowBreak) -> BrokenSeal:
    return BrokenSeal(found.check.law, page=found.page, ordinal=found.ordinal, layer=found.layer, check=found.check.name.lower())
