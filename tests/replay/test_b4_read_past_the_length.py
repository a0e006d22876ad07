"""B4 (vllm#42494): the kernel may read the block table's tail past the sequence's length. Injected: it reads one page too many."""

from __future__ import annotations

from array import array

import numpy as np

from kvseal.core.ids import RequestId
from kvseal.exec.backend import RowBreak, UInt64
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import SCOPE, Rig

from .rigging import Unchecked, compute, prompt, read_from_strangers, row, stranger

PROMPT = prompt(1, 7)


class LongReach(OracleBackend):
    def _attend_check(self, row: int, layer: int, end: int, table: array[int], scope: UInt64) -> RowBreak | None:
        return super()._attend_check(row, layer, end + self.geometry.page_tokens, table, scope)

    def _read(self, layer: int, end: int, table: array[int]) -> UInt64:
        sums = super()._read(layer, end + self.geometry.page_tokens, table)
        tail: UInt64 = sums[:end] ^ sums[-1:] if len(sums) > end else sums
        return np.ascontiguousarray(tail[:end])


class LongReachUnchecked(LongReach, Unchecked):
    def _attend_check(self, row: int, layer: int, end: int, table: array[int], scope: UInt64) -> RowBreak | None:
        return None


def answer(backend: type[OracleBackend], secret: int) -> object:
    """Seven tokens in a table with a third page reserved and not written."""
    rig = Rig(pages=16, backend_class=OracleBackend)
    stranger(rig, secret)
    reader = backend(rig.backend.spec, rig.backend.geometry, 16)
    reader.arena.memory[:] = rig.backend.arena.memory
    rig.runner._backend = reader
    grant = rig.kv.admit(RequestId("a"), SCOPE, PROMPT, first_tokens=12)
    assert grant is not None and grant.table.pages == 3
    return compute(rig, row("a", grant, PROMPT, 0)).rows[0]


def test_the_tail_is_refused() -> None:
    result = answer(LongReach, 11)
    assert result.broken is not None and result.broken.check in ("nonce", "filled", "table")  # type: ignore[attr-defined]


def test_without_the_seals_the_stranger_would_have_answered() -> None:
    assert read_from_strangers(lambda secret: answer(LongReachUnchecked, secret))


def test_the_right_reach_does_not_see_the_stranger() -> None:
    assert not read_from_strangers(lambda secret: answer(OracleBackend, secret))
