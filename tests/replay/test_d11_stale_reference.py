"""D11 (vllm#52234): a stale reference is replayed after its producer has reused the blocks: the previous prompt's answer, with a 200.

F4 (TensorRT-LLM#8813): pages change under a copy.
"""

from __future__ import annotations

import msgspec
import pytest

from kvseal.handoff.messages import PagesReady
from kvseal.lab.pair import Pair
from kvseal.node import peer_messages as p

from .handing import OURS, OUTPUT_TOKENS, ask, changed, recomputed, said, well
from .rigging import prompt


def test_an_old_announcement_in_a_new_hand_off() -> None:
    """The stamps of an earlier prompt's pages, whose hand-out is over, in place of the new ones."""
    pair, old = Pair(prefill={"pages": 12}), []

    def replay(_node: object, relay: p.Relay) -> list[p.Relay]:
        message = said(relay)
        if isinstance(message, PagesReady) and relay.handoff == "handoff-old":
            old.append(message)
        elif isinstance(message, PagesReady):
            return [changed(relay, msgspec.structs.replace(message, stamps=old[0].stamps, folds=old[0].folds))]
        return [relay]

    pair.filter = replay  # type: ignore[assignment]
    ask(pair, "old", prompt(77, 45))
    ask(pair, "between", prompt(78, 80))
    heard = ask(pair, "new")
    well(pair, heard)
    assert pair.decode.stats().handoff["received"] == 2 - 1  # "between" has more pages than "old" announced.
    assert pair.decode.stats().handoff["recomputed"] == 2


@pytest.mark.parametrize("message", range(6))
def test_a_message_of_an_earlier_hand_off_changes_nothing(message: int) -> None:
    pair, old = Pair(), []
    pair.filter = lambda _node, relay: old.append(relay) or [relay]  # type: ignore[func-returns-value]
    ask(pair, "old", prompt(77, 45))
    replayed = [relay for relay in old if len(old) > message]
    pair.filter = None
    heard = pair.submit("new", OURS, OUTPUT_TOKENS)
    pair.turn()
    for node in (pair.prefill, pair.decode):
        if node.incarnation == replayed[message].peer:
            node.take(replayed[message])
    pair.run()
    well(pair, heard)
    assert pair.decode.stats().handoff["received"] == 2


def test_a_page_that_changes_between_announcement_and_copy() -> None:
    pair = Pair()
    memory = pair.transport(pair.prefill).memory

    def reuse(_node: object, relay: p.Relay) -> list[p.Relay]:
        if isinstance(said(relay), PagesReady):
            memory[:, 64:72] ^= 1
        return [relay]

    pair.filter = reuse  # type: ignore[assignment]
    well(pair, ask(pair))
    recomputed(pair, "seal")
