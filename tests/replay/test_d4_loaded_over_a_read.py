"""D4 (vllm#47324, vllm#47728, vllm-ascend#13501): a load overwrites a block that attention still reads."""

from __future__ import annotations

import pytest

from kvseal.handoff.proof import Landing, Move
from kvseal.handoff.transport import Report, Source
from kvseal.kv.ledger import PageState
from kvseal.lab.pair import LoopTransport, Pair

from .handing import OUTPUT_TOKENS, right_answer
from .rigging import prompt


def test_what_arrives_lands_in_pages_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool so small that pages change hands all the time, with answers running beside every hand-off."""
    fetch, seen = LoopTransport._fetch, []
    pair = Pair(decode={"pages": 24}, prefill={"pages": 24, "chunk_tokens": 16})
    ledger = pair.decode.kv.pool.ledger

    def watched(self: LoopTransport, transfer: str, source: Source, move: Move, landing: Landing) -> Report:
        reading = {page for one in pair.decode._scheduler._running for page in one.grant.table.stamps[::2]}
        assert move.page not in reading
        assert (
            ledger.state[move.page] in (PageState.LEASED, PageState.DRAINING) and ledger.tickets[move.page] and not ledger.pins[move.page]
        )
        seen.append(move.page)
        return fetch(self, transfer, source, move, landing)

    monkeypatch.setattr(LoopTransport, "_fetch", watched)
    prompts = [prompt(30 + number, 30 + number) for number in range(8)]
    answers = []
    for number, tokens in enumerate(prompts):
        answers.append(pair.submit(f"request-{number}", tokens, OUTPUT_TOKENS))
        for _ in range(3):
            pair.turn()
    pair.run()
    assert [answer.tokens for answer in answers] == [right_answer(tokens) for tokens in prompts]
    assert len(seen) > len(set(seen))
    pair.settled()
