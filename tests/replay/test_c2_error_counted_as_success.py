"""C2 (dynamo#15079): an error result moves the same counter as a success, so the transfer looks complete."""

from __future__ import annotations

import pytest

from kvseal.handoff.messages import PagesReady
from kvseal.handoff.proof import Landing, Move
from kvseal.handoff.transport import Landed, Lost, Report, Source
from kvseal.lab.pair import LoopTransport, Pair
from kvseal.node import peer_messages as p

from .handing import ask, recomputed, said, well


def test_a_page_that_failed_its_check_is_counted_as_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = LoopTransport._fetch

    def counts_anything(self: LoopTransport, transfer: str, source: Source, move: Move, landing: Landing) -> Report:
        report = fetch(self, transfer, source, move, landing)
        return Landed(transfer, move.ordinal, 1, landing.page_bytes) if isinstance(report, Lost) else report

    pair = Pair()
    memory = pair.transport(pair.prefill).memory
    monkeypatch.setattr(LoopTransport, "_fetch", counts_anything)

    def flip(_node: object, relay: p.Relay) -> list[p.Relay]:
        if isinstance(said(relay), PagesReady):
            memory[:, 64:72] ^= 1  # Every page of the sender changes between its seal and the copy.
        return [relay]

    pair.filter = flip  # type: ignore[assignment]
    well(pair, ask(pair))
    recomputed(pair, "seal")
