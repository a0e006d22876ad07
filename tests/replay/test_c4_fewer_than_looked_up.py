"""C4 (LMCache#1835): fewer tokens are retrieved than the lookup had promised, and the difference is used all the same."""

from __future__ import annotations

import msgspec

from kvseal.core.ids import RequestId
from kvseal.core.request import Request
from kvseal.handoff.messages import Manifest, PagesReady
from kvseal.lab.pair import Pair
from kvseal.lab.rig import GREEDY, SCOPE
from kvseal.node import peer_messages as p

from .handing import OURS, ask, changed, recomputed, right_answer, said, well


def test_what_was_evicted_meanwhile_is_not_half_given() -> None:
    """A node is asked for a prefix that it no longer has whole: it says so, and the other computes it."""
    pair = Pair()
    request = Request(request_id=RequestId("later"), prompt_tokens=tuple(OURS), max_output_tokens=6, scope=SCOPE, sampling=GREEDY)
    handoff = "handoff-evicted"
    pair.decode.take(p.Receive(request, handoff, pair.prefill.incarnation, 60.0))
    pair.prefill.take(p.Give(handoff, SCOPE, tuple(OURS), pair.decode.incarnation, 60.0))
    tokens: list[int] = []
    pair.on_event = lambda node, event: tokens.extend(event.tokens if isinstance(event, tuple) else ())
    pair.run()
    assert tokens == right_answer()
    recomputed(pair, "cancelled")
    pair.settled()


def test_an_announcement_with_fewer_pages_than_intended_never_completes() -> None:
    def shorten(_node: object, relay: p.Relay) -> list[p.Relay]:
        message = said(relay)
        if isinstance(message, PagesReady | Manifest):
            return [changed(relay, msgspec.structs.replace(message, stamps=message.stamps[:-16], folds=message.folds[:-16]))]
        return [relay]

    pair = Pair()
    pair.filter = shorten  # type: ignore[assignment]
    heard = ask(pair)
    well(pair, heard)
    assert pair.decode.stats().handoff["received"] == 0
