"""What the replays share: the oracle engine without its kernel checks, strangers who leave data behind, rows made by hand.

Each replay has two sides. The engine as it is must stop the injected fault, at the check that the test names, with the outcome that the
client sees. Its twin, whose kernels compare nothing, must get a *wrong answer that depends on a stranger's data*: that is what the check
is worth, and it proves that the fault really was injected.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvseal.core.batch import Batch, BatchResult, Row
from kvseal.core.errors import BrokenSeal
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Failed, Outcome
from kvseal.exec.backend import RowBreak, UInt64
from kvseal.kv.block_table import BlockTable
from kvseal.kv.manager import Grant
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import GREEDY, OTHER_SCOPE, Rig

SECRETS = (11, 12)
"""Two strangers. An answer that differs between them was made from their data."""


class Unchecked(OracleBackend):
    """Reads and writes whatever the block table says, like an engine without seals."""

    def _append_check(
        self, row: int, layer: int, ordinal: int, slot: int, table: array[int], scope: UInt64, ledger_nonces: UInt64
    ) -> RowBreak | None:
        return None

    def _attend_check(self, row: int, layer: int, end: int, table: array[int], scope: UInt64) -> RowBreak | None:
        return None


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + at * 104_729) % 4000 for at in range(tokens)]


def stranger(rig: Rig, secret: int) -> None:
    """Fills every page with another tenant's data and leaves: all pages are free and dirty."""
    pages = rig.kv.pool.pages
    answer = rig.answer("stranger", prompt(secret, pages * rig.kv.geometry.page_tokens - 2), 2, scope=OTHER_SCOPE)
    assert len(answer.tokens) == 2
    rig.kv.purge(OTHER_SCOPE)
    assert rig.kv.usage().free == pages


def row(name: str, grant: Grant, tokens: Sequence[int], start: int, *, table: BlockTable | None = None) -> Row:
    """All of `tokens` from `start` on, with the token after them wanted."""
    return Row(RequestId(name), tokens[start:], start, table or grant.table, GREEDY, True, tokens, len(tokens))


def compute(rig: Rig, *rows: Row) -> BatchResult:
    return rig.runner.run(Batch(1, rows), rig.kv.ledger_nonces)


def stale_copy(grant: Grant) -> BlockTable:
    """The table as somebody remembers it after its pages have moved on."""
    table = BlockTable(grant.scope, grant.table.page_tokens)
    table.extend(grant.table.stamps)
    table.valid_tokens = grant.table.valid_tokens
    return table


def broken_seal(outcome: Outcome | None) -> BrokenSeal:
    """The client's end, which must be a broken seal."""
    assert isinstance(outcome, Failed) and isinstance(outcome.error, BrokenSeal), outcome
    return outcome.error


def read_from_strangers(answer: Callable[[int], object]) -> bool:
    """Whether the answer depends on which stranger was there before."""
    return answer(SECRETS[0]) != answer(SECRETS[1])
