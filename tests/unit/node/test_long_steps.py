"""A large model takes long over a step and longer over a prompt: neither is a hand-off that has failed."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from kvseal.core.clock import ManualClock
from kvseal.core.config import NodeConfig
from kvseal.core.events import Event
from kvseal.core.outcome import Completed
from kvseal.handoff.session import Patience
from kvseal.lab.oracle_node import oracle_node
from kvseal.lab.pair import Pair
from kvseal.lab.rig import truth
from kvseal.node import messages as m
from kvseal.node import peer_messages as p
from kvseal.node.client import STALL_AFTER_S
from kvseal.node.engine_process import Gone
from kvseal.node.node_engine import NodeEngine
from kvseal.node.node_process import NodeLoop

from .fleets import prompt


@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_a_step_of_many_seconds_is_not_silence(slow: str) -> None:
    step_s = STALL_AFTER_S - 1
    assert step_s < Patience().silence_s
    pair = Pair(prefill={"chunk_tokens": 16})
    node = pair.prefill if slow == "prefill" else pair.decode
    heard = pair.submit("request-1", prompt(3, 120), 4)
    waiting: list[p.Relay] = []

    def buffered(sender: NodeEngine, relay: p.Relay) -> list[p.Relay]:
        """What is said to a node inside its step waits in its socket."""
        if node not in pair.frozen or sender is node:
            return [relay]
        waiting.append(p.Relay(relay.handoff, sender.incarnation, relay.body))
        return []

    pair.filter = buffered
    for _ in range(12):
        while waiting:
            node.take(waiting.pop(0))
        pair.turn()
        pair.frozen.add(node)
        for _ in range(int(step_s)):
            pair.clock.advance(1.0)
            pair.turn()
        pair.frozen.clear()
    while waiting:
        node.take(waiting.pop(0))
    pair.run()
    assert isinstance(heard.outcome, Completed) and heard.tokens == truth(prompt(3, 120), 4)
    assert pair.decode.stats().handoff["recomputed"] == 0 and pair.decode.stats().handoff["received"] == 1
    pair.settled()


def test_what_came_during_a_step_is_taken_before_anybody_is_called_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    node = oracle_node(NodeConfig(role="decode", name="decode-0", secret=bytes(32)), None, clock=ManualClock(), secret=bytes(32))
    ours, theirs = socket.socketpair()
    order: list[str] = []

    def noted(name: str, what: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            order.append(name)
            return what(*arguments)

        return call

    def step() -> list[Event]:
        order.append("step")
        if order.count("step") > 2:
            raise Gone
        ours.sendall(m.frame(p.PeerGone("somebody")))
        return []

    monkeypatch.setattr(type(node), "has_work", property(lambda _: True))
    for name, what in (("step", step), ("turn", noted("turn", node.turn)), ("take", noted("take", node.take))):
        monkeypatch.setattr(node, name, what)
    wake, _other = socket.socketpair()
    try:
        with pytest.raises(Gone):
            NodeLoop(theirs, node, wake).run()
        assert order == ["turn", "step", "take", "turn", "step", "take", "turn", "step"]
    finally:
        node.close()
        for sock in (ours, theirs, wake, _other):
            sock.close()
