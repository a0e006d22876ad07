"""D9 (LMCache#207): a reader of the same key meets an entry that is still being stored."""

from __future__ import annotations

from kvseal.core.ids import RequestId
from kvseal.core.request import Request
from kvseal.lab.pair import Pair
from kvseal.lab.rig import GREEDY, SCOPE

from .handing import OURS, OUTPUT_TOKENS, right_answer, well


def test_nothing_is_found_before_all_of_it_is_proven() -> None:
    pair = Pair()
    transport = pair.transport(pair.decode)
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    direct: list[int] = []
    pair.on_event = lambda _node, event: direct.extend(event.tokens if isinstance(event, tuple) else ())
    found = set()
    while pair.decode.stats().handoff["received"] == 0:
        found.add(pair.decode.kv.probe(SCOPE, OURS))
        pair.turn()
        if transport.landed == 2 and not direct:
            request = Request(
                request_id=RequestId("direct"), prompt_tokens=tuple(OURS), max_output_tokens=OUTPUT_TOKENS, scope=SCOPE, sampling=GREEDY
            )
            if not pair.decode._scheduler._open:
                assert pair.decode.submit(request) is None
    pair.run()
    assert direct == right_answer()
    well(pair, heard)
    assert found <= {0, 40}
