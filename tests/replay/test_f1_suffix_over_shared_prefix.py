"""F1 (tt-xla#4190, bugs 2 and 2b): the suffix of a request that hit a shared prefix is written from block 0 of its
table: over the prefix."""

from __future__ import annotations

from array import array

from kvseal.core.laws import Law
from kvseal.core.outcome import Completed
from kvseal.exec.backend import RowBreak, UInt64
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import Rig, truth

from .rigging import Unchecked, broken_seal, prompt

PREFIX = prompt(1, 16)
MINE, YOURS = PREFIX + prompt(2, 5), PREFIX + prompt(3, 5)


class FromBlockZero(OracleBackend):
    forgets_start = False

    def _append(
        self, row: int, layer: int, keys: UInt64, values: UInt64, start: int, table: array[int], scope: UInt64, ledger_nonces: UInt64
    ) -> RowBreak | None:
        start = 0 if self.forgets_start else start
        return super()._append(row, layer, keys, values, start, table, scope, ledger_nonces)


class FromBlockZeroUnchecked(FromBlockZero, Unchecked):
    pass


def over_the_prefix(backend: type[FromBlockZero]) -> Rig:
    """A warm prefix, a writer that forgets where it starts, then a reader of the same prefix."""
    rig = Rig(pages=32, backend_class=backend)
    rig.answer("warm", PREFIX, 2)
    assert isinstance(rig.backend, FromBlockZero)
    rig.submit("writer", MINE, 1)
    rig.backend.forgets_start = True
    rig.step()
    rig.backend.forgets_start = False
    rig.submit("reader", YOURS, 4)
    rig.run(checked=False)
    return rig


def test_a_sealed_page_is_not_written() -> None:
    rig = over_the_prefix(FromBlockZero)
    broken = broken_seal(rig.answers["writer"].outcome)
    assert (broken.law, broken.check) == (Law.L7, "reused")
    assert rig.answers["writer"].tokens == []
    assert isinstance(rig.answers["reader"].outcome, Completed)
    assert rig.answers["reader"].tokens == truth(YOURS, 4)
    rig.engine.check()


def test_without_the_seals_the_reader_would_have_read_the_writers_suffix() -> None:
    reader = over_the_prefix(FromBlockZeroUnchecked).answers["reader"]
    assert isinstance(reader.outcome, Completed) and reader.cached_tokens == 16
    assert reader.tokens != truth(YOURS, 4)
