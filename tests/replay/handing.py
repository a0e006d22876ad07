"""What the replays of hand-off incidents share: two nodes on the oracle model, faults between them, and what must be true afterwards.

Each replay injects the published mechanism. The engine as it is must end in the one-node answer or an honest error, with every page of both
nodes accounted for. `gullible` is the twin that believes what it is told, over kernels that compare nothing: what the checks are worth.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvseal.core.outcome import Completed
from kvseal.exec.backend import RowBreak, UInt64
from kvseal.handoff.messages import AnyMessage, decode, encode
from kvseal.handoff.proof import Landing, Move
from kvseal.lab.oracle_node import SealingOracle
from kvseal.lab.pair import Heard, Pair
from kvseal.lab.rig import truth
from kvseal.node import peer_messages as p

from .rigging import prompt

OURS = prompt(2, 45)
"""Five full pages of eight tokens are handed over, and a sixth with five."""
PAGES = 6
OUTPUT_TOKENS = 6


def right_answer(tokens: Sequence[int] = OURS) -> list[int]:
    return truth(tokens, OUTPUT_TOKENS)


def ask(pair: Pair, name: str = "request-1", tokens: Sequence[int] = OURS) -> Heard:
    heard = pair.submit(name, tokens, OUTPUT_TOKENS)
    pair.run()
    return heard


def well(pair: Pair, heard: Heard, tokens: Sequence[int] = OURS) -> None:
    """Completed with the one-node answer, and nothing left behind."""
    assert isinstance(heard.outcome, Completed) and heard.tokens == right_answer(tokens), heard
    pair.settled()


def recomputed(pair: Pair, reason: str) -> None:
    """Exactly one hand-off has failed at the receiver, for this reason, and its prompt was computed there."""
    counts = pair.decode.stats().handoff
    assert counts["received"] == 0 and counts["recomputed"] == 1 and counts[f"failed_{reason}"] == 1, counts


def said(message: p.Relay) -> AnyMessage:
    return decode(message.body)


def changed(message: p.Relay, what: AnyMessage) -> p.Relay:
    return p.Relay(message.handoff, message.peer, encode(what))


class Unchecking(SealingOracle):
    """Kernels that read and write whatever the block table says."""

    def _append_check(
        self, row: int, layer: int, ordinal: int, slot: int, table: array[int], scope: UInt64, ledger_nonces: UInt64
    ) -> RowBreak | None:
        return None

    def _attend_check(self, row: int, layer: int, end: int, table: array[int], scope: UInt64) -> RowBreak | None:
        return None


def gullible(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair whose receiver takes the sender's word for what stands in its own memory."""

    def believe(self: Landing, moves: Sequence[Move]) -> None:
        return None

    def leave(self: Landing, moves: Sequence[Move], nonces: Sequence[int]) -> None:
        return None

    monkeypatch.setattr(Landing, "check", believe)
    monkeypatch.setattr(Landing, "restamp", leave)
    return Pair(prefill={"backend_class": Unchecking}, decode={"backend_class": Unchecking})
