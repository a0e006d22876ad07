"""G1 (tt-xla#4190, bug 1): the hidden row of one user is taken from another user's slot, so each gets the other's answer."""

from __future__ import annotations

import pytest

from kvseal.core.batch import Batch, BatchResult
from kvseal.core.errors import LawBroken
from kvseal.exec.backend import StepArrays, StepOutput, UInt64
from kvseal.exec.runner import Runner
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import Rig, truth
from kvseal.sched.scheduler import Scheduler

from .rigging import prompt

ONE, OTHER = prompt(1, 9), prompt(2, 6)


class SwapsRows(Runner):
    """Hands each request the result that was computed for its neighbour."""

    def run(self, batch: Batch, ledger_nonces: UInt64) -> BatchResult:
        result = super().run(batch, ledger_nonces)
        return BatchResult(result.step, result.rows[::-1])


class ByPosition(Scheduler):
    """Applies results by their place, as if they bore no ids."""

    def apply(self, result: BatchResult) -> list[object]:  # type: ignore[override]
        rows = self._batch.rows if self._batch else ()
        relabelled = []
        for row, out in zip(rows, result.rows, strict=True):
            pages = row.end // 4 - row.start // 4
            relabelled.append(out._replace(request_id=row.request_id, page_digests=(bytes(16),) * pages))
        return list(super().apply(BatchResult(result.step, tuple(relabelled))))


def both(**parts: type) -> Rig:
    rig = Rig(pages=16, **parts)  # type: ignore[arg-type]
    rig.submit("one", ONE, 1)
    rig.submit("other", OTHER, 1)
    return rig


def test_a_row_of_another_request_is_never_applied() -> None:
    rig = both(runner_class=SwapsRows)
    with pytest.raises(LawBroken, match="L6"):
        rig.step()
    assert rig.answers["one"].tokens == rig.answers["other"].tokens == []


def test_without_the_ids_each_would_have_got_the_others_answer() -> None:
    rig = both(runner_class=SwapsRows, scheduler_class=ByPosition)
    rig.step()
    assert rig.answers["one"].tokens == truth(OTHER, 1) != truth(ONE, 1)
    assert rig.answers["other"].tokens == truth(ONE, 1)


class CumulativeIndex(OracleBackend):
    """The bug one floor lower, where no id can show it: hidden states in the wrong places of the array."""

    def forward(self, step: StepArrays) -> StepOutput:
        output = super().forward(step)
        return StepOutput(output.hidden[::-1].copy(), output.breaks)


def test_the_oracle_sees_it_where_no_id_can() -> None:
    """No running engine can notice this one; exactness (L13) is the instrument that does: batch must equal alone."""
    rig = both(backend_class=CumulativeIndex)
    rig.run()
    assert rig.answers["one"].tokens == truth(OTHER, 1)
    healthy = both()
    healthy.run()
    assert healthy.answers["one"].tokens == truth(ONE, 1)
