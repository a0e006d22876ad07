"""D6 (sglang#24226, sglang#30899): pages are freed at their source while they are still being copied."""

from __future__ import annotations

from kvseal.lab.pair import Pair

from .handing import OURS, OUTPUT_TOKENS, PAGES, well
from .rigging import prompt


def test_the_source_keeps_what_is_on_its_way() -> None:
    """The prefill node's request has ended long ago and its pool is wanted by others; what was offered stays until the receipt."""
    pair = Pair(prefill={"pages": 16})
    transport = pair.transport(pair.decode)
    transport.frozen = True
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    for _ in range(4):
        pair.turn()
    usage = pair.prefill.kv.usage()
    assert usage.evictable == 0 and (usage.sealed, usage.draining) == (PAGES - 1, 1), "the last page, not full, is nobody's and not free"
    before = pair.prefill.kv.pool.ledger.nonce.copy()
    others = [pair.submit(f"request-{number}", prompt(50 + number, 40), 1) for number in range(2, 5)]
    for _ in range(30):
        pair.turn(pair.prefill)
    ledger = pair.prefill.kv.pool.ledger
    offered = (ledger.pins > 0) | (ledger.tickets > 0)
    assert offered.sum() >= PAGES and (ledger.nonce[offered] == before[offered]).sum() >= PAGES
    transport.frozen = False
    pair.run()
    assert all(other.ended for other in others)
    well(pair, heard)
    assert pair.decode.stats().handoff["received"] >= 1


def test_the_source_gives_them_back_when_the_other_side_is_silent() -> None:
    pair = Pair(prefill={"pages": 16})
    pair.frozen.add(pair.decode)
    pair.submit("request-1", OURS, OUTPUT_TOKENS)
    for _ in range(300):
        pair.turn()
    usage = pair.prefill.kv.usage()
    assert usage.evictable == usage.sealed and not usage.draining
    pair.prefill.check()
