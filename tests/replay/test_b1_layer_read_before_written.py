"""B1 (sglang#22811): one layer is read before its asynchronous write has ended; rare garbage. Injected: the write of a layer is skipped."""

from __future__ import annotations

from array import array

import pytest

from kvseal.core.laws import Law
from kvseal.exec.backend import RowBreak, UInt64
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import Rig, truth

from .rigging import Unchecked, broken_seal, prompt, read_from_strangers, stranger

LATE_LAYER = 1


class LateMixin(OracleBackend):
    late_from = 10_000
    """Positions whose write in `LATE_LAYER` has not happened when the layer is read."""

    def _append(
        self, row: int, layer: int, keys: UInt64, values: UInt64, start: int, table: array[int], scope: UInt64, ledger_nonces: UInt64
    ) -> RowBreak | None:
        if layer == LATE_LAYER:
            keys, values = keys[: max(0, self.late_from - start)], values[: max(0, self.late_from - start)]
        return super()._append(row, layer, keys, values, start, table, scope, ledger_nonces)


class Late(LateMixin):
    pass


class LateUnchecked(LateMixin, Unchecked):
    pass


def late_answer(backend: type[LateMixin], late_from: int, secret: int) -> Rig:
    rig = Rig(pages=16, backend_class=backend)
    stranger(rig, secret)
    assert isinstance(rig.backend, LateMixin)
    rig.backend.late_from = late_from
    rig.submit("victim", prompt(1, 10), 4)
    rig.submit("other", prompt(2, 3), 1)
    rig.run(checked=False)
    return rig


@pytest.mark.parametrize("late_from, law", [(0, Law.L3), (8, Law.L3), (9, Law.L5), (5, Law.L5)])
def test_the_layer_is_not_read(late_from: int, law: Law) -> None:
    rig = late_answer(Late, late_from, 11)
    assert broken_seal(rig.answers["victim"].outcome).law is law
    assert rig.answers["victim"].tokens == []
    if late_from > 3:  # nothing of this one was late, and it does not notice
        assert rig.answers["other"].tokens == truth(prompt(2, 3), 1)


@pytest.mark.parametrize("late_from", [0, 8, 9, 5])
def test_without_the_seals_the_stranger_would_have_answered(late_from: int) -> None:
    assert read_from_strangers(lambda secret: late_answer(LateUnchecked, late_from, secret).answers["victim"].tokens)
