"""A5 (vllm#41269): the decode side rejects a request before its admission, and the producer keeps the blocks until a timeout (480 s)."""

from __future__ import annotations

from kvseal.core.errors import ContextLengthExceeded
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Refused
from kvseal.core.request import Request
from kvseal.lab.pair import Pair
from kvseal.lab.rig import GREEDY, SCOPE
from kvseal.node import peer_messages as p

from .handing import OURS, OUTPUT_TOKENS
from .rigging import prompt


def test_a_pool_that_can_never_hold_it_says_so_at_once_and_both_let_go() -> None:
    pair = Pair(decode={"pages": 6}, prefill={"pages": 64, "chunk_tokens": 8})
    heard = pair.submit("request-1", prompt(3, 60), OUTPUT_TOKENS)
    pair.turn()
    assert isinstance(heard.outcome, Refused) and isinstance(heard.outcome.error, ContextLengthExceeded)
    assert heard.tokens == []
    pair.turn()
    pair.settled()


def test_an_intent_that_nobody_waits_for_is_turned_away() -> None:
    """The decode side has never heard of the request (it has restarted, or the router has gone): the producer is told within seconds."""
    pair = Pair()
    request = Request(
        request_id=RequestId("orphan"), prompt_tokens=tuple(OURS), max_output_tokens=OUTPUT_TOKENS, scope=SCOPE, sampling=GREEDY
    )
    pair.prefill.take(p.Prefill(request, "handoff-orphan", pair.decode.incarnation, 480.0))
    began_s = pair.clock.now_s()
    for _ in range(3):
        pair.turn()
    assert pair.prefill.kv.usage().evictable < pair.prefill.kv.usage().sealed
    while pair.prefill.poll_ms is not None:
        pair.turn()
    assert pair.clock.now_s() - began_s < 5.5
    assert pair.prefill.stats().handoff["failed_cancelled"] == 1
    pair.settled()
