"""Steps in which everybody decodes, done in one native call; all others by the `Runner`.

Owns `SteadyRunner`, the runner of the native backend. It gives what `exec.runner.Runner` gives on the same backend, to the bit (the
conformance suite compares them), under the same laws: L6, L7, L12, L13. Why it is there: between two steps the kernels have driven the
interpreter out of the caches, and everything that Python does for a token then costs several times what a benchmark of it says.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvseal import _native
from kvseal.core.batch import Batch, BatchResult, Row, RowResult
from kvseal.core.errors import LawBroken, SamplingFailed
from kvseal.core.laws import Law
from kvseal.exec.backend import UInt64
from kvseal.exec.backends.cpu import row_breaks
from kvseal.exec.backends.cpu_sampling import Drawn, answer_of
from kvseal.exec.runner import Runner, broken_seal
from kvseal.exec.sampler import Sampled

_new_tuple = tuple.__new__


class SteadyRunner:
    """`native` and `others` work on the same backend."""

    def __init__(self, native: _native.Stepper, others: Runner) -> None:
        self._native = native
        self._others = others

    @property
    def kernel_seconds(self) -> float:
        """Spent in layers and logits, by all steps in which everybody decoded."""
        return self._native.kernel_seconds

    def run(self, batch: Batch, ledger_nonces: UInt64) -> BatchResult:
        """As `Runner.run`."""
        rows = batch.rows
        found = self._native.decode(rows, ledger_nonces)
        if found is None:
            return self._others.run(batch, ledger_nonces)
        answers, breaks, digests = found
        if digests is None:
            raise LawBroken(Law.L7, "a page was to be sealed before all its slots were written in every layer")
        results = [_result(row, answer) for row, answer in zip(rows, answers, strict=True)]
        for index, digest in digests:
            results[index] = results[index]._replace(page_digests=(digest,))
        if breaks:
            _break(results, rows, breaks)
        return BatchResult(batch.step, tuple(results))


def _result(row: Row, answer: Drawn) -> RowResult:
    if type(answer) is int and answer >= 0:
        return _new_tuple(RowResult, (row.request_id, answer, None, (), (), None, None))
    chosen = answer_of(answer)
    if isinstance(chosen, SamplingFailed):
        return RowResult(row.request_id, failed=chosen)
    if isinstance(chosen, Sampled):
        return RowResult(row.request_id, chosen.token, chosen.logprobs)
    return RowResult(row.request_id, chosen)


def _break(results: list[RowResult], rows: Sequence[Row], breaks: Sequence[tuple[int, int, int, int, int]]) -> None:
    """L12: of a row that broke a seal nothing else is left."""
    for found in row_breaks(breaks):
        results[found.row] = RowResult(rows[found.row].request_id, broken=broken_seal(found))
