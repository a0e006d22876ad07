"""D7 (sglang#36738): a reload is not ordered after the old round's writes, and gets a mixture of both."""

from __future__ import annotations

from kvseal.lab.pair import Pair
from kvseal.node import peer_messages as p

from .handing import OURS, OUTPUT_TOKENS, well


def test_a_second_round_never_sees_the_first_ones_pages() -> None:
    """The first hand-off of a prompt is given up in the middle, the second begins at once; messages of the first come late."""
    pair, late = Pair(), []

    def hold_back(_node: object, relay: p.Relay) -> list[p.Relay]:
        if relay.handoff == "handoff-round-one":
            late.append(relay)
        return [relay]

    pair.filter = hold_back  # type: ignore[assignment]
    pair.submit("round-one", OURS, OUTPUT_TOKENS)
    transport = pair.transport(pair.decode)
    while transport.landed < 2:
        pair.turn()
    pair.cancel("round-one")
    heard = pair.submit("round-two", OURS, OUTPUT_TOKENS)
    for relay in late:
        for node in (pair.prefill, pair.decode):
            if node.incarnation == relay.peer:
                node.take(relay)
    pair.run()
    well(pair, heard)
    assert pair.decode.stats().handoff["received"] == 1
    assert pair.decode.stats().handoff["ignored_messages"] + pair.prefill.stats().handoff["ignored_messages"] > 0
