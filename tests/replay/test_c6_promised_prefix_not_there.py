"""C6 (sglang#30322): the decode side promises a prefix that it then fails to load, and it is not sent either."""

from __future__ import annotations

import msgspec

from kvseal.handoff.messages import Grant
from kvseal.lab.pair import Pair
from kvseal.lab.rig import SCOPE
from kvseal.node import peer_messages as p

from .handing import OURS, OUTPUT_TOKENS, ask, changed, said, well


def test_a_promise_that_the_receiver_did_not_make() -> None:
    """A grant that claims two pages more than the receiver holds: the sender leaves them out, and nothing of it is committed."""

    def boast(_node: object, relay: p.Relay) -> list[p.Relay]:
        message = said(relay)
        if isinstance(message, Grant):
            return [changed(relay, msgspec.structs.replace(message, present_pages=2, stamps=message.stamps[32:]))]
        return [relay]

    pair = Pair()
    pair.filter = boast  # type: ignore[assignment]
    well(pair, ask(pair))
    assert pair.decode.stats().handoff["received"] == 0


def test_what_was_promised_stays_until_the_end() -> None:
    """A prefix that the receiver holds is not sent again, and cannot be evicted while the rest is on its way."""
    pair = Pair(decode={"pages": 16})
    ask(pair, "request-0", OURS[:25])
    moved = pair.decode.stats().handoff["pages"]
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    transport = pair.transport(pair.decode)
    transport.frozen = True
    for _ in range(6):
        pair.turn()
    kv = pair.decode.kv
    assert kv.probe(SCOPE, OURS) == 24
    kv.cache.evict(16)
    assert kv.probe(SCOPE, OURS) == 24
    transport.frozen = False
    pair.run()
    well(pair, heard)
    assert pair.decode.stats().handoff["pages"] - moved == 3
