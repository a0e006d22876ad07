"""C5 (vllm-ascend#10561): a get that failed is not reported, and its page is taken for there."""

from __future__ import annotations

import pytest

from kvseal.handoff.proof import Landing, Move
from kvseal.handoff.transport import Landed, Report, Source
from kvseal.lab.pair import LoopTransport, Pair

from .handing import PAGES, ask, recomputed, well


@pytest.mark.parametrize("ordinal", range(PAGES))
def test_a_page_that_nobody_reports_is_never_part_of_a_receipt(ordinal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = LoopTransport._fetch

    def silent(self: LoopTransport, transfer: str, source: Source, move: Move, landing: Landing) -> Report:
        if move.ordinal == ordinal:
            return Landed("another transfer", move.ordinal, 1, landing.page_bytes)
        return fetch(self, transfer, source, move, landing)

    monkeypatch.setattr(LoopTransport, "_fetch", silent)
    pair = Pair()
    well(pair, ask(pair))
    recomputed(pair, "silence" if ordinal == PAGES - 1 else "transport")
