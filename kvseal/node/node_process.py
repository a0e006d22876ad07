"""A node's engine as a process of its own: ``python -m kvseal.node.node_process FD``.

Owns the loop of `engine_process` with hand-offs in it: between two steps the sessions go on, and what they say goes to the router. While
a hand-off is open and there is nothing to compute, it looks at the transport every millisecond instead of sleeping.
"""

from __future__ import annotations

import socket
import sys

from kvseal.node import messages as m
from kvseal.node import peer_messages as p
from kvseal.node.engine_process import MAX_OUTBOX_BYTES, EngineDoor, EngineLoop, run
from kvseal.node.node_engine import NodeEngine


class NodeLoop(EngineLoop):
    """`EngineLoop`, and a turn of the hand-offs before every wait."""

    def __init__(self, sock: socket.socket, engine: EngineDoor, wakeup: socket.socket) -> None:
        super().__init__(sock, engine, wakeup)
        if not isinstance(engine, NodeEngine):
            raise m.ProtocolBroken("this process was told to be a node, and its engine is none")
        self._node = engine
        engine.before_step = self._send_said

    def run(self) -> None:
        try:
            self._turns()
        finally:
            self._node.before_step = None  # or loop and engine hold each other, and nobody frees the arena

    def _turns(self) -> None:
        while True:
            self._node.turn()
            self._send_said()
            work = self._engine.has_work
            if self._draining and not work and self._node.poll_ms is None and not self._outbox:
                return
            blocked = len(self._outbox) > MAX_OUTBOX_BYTES
            self._poll(0 if work and not blocked else self._node.poll_ms)
            if self._engine.has_work and len(self._outbox) <= MAX_OUTBOX_BYTES:
                self._step()
                self._poll(0)  # what came meanwhile: before anybody is called silent

    def _send_said(self) -> None:
        for message in self._node.outbox():
            self._send(message)

    def _handle(self, message: m.ToEngine) -> None:
        if isinstance(message, p.ToNode):
            if self._draining and isinstance(message, p.Prefill | p.Receive):
                self._refuse_draining(message.request.request_id)
            else:
                self._node.take(message)
        else:
            super()._handle(message)


def main() -> None:
    from kvseal.node.build import build_engine

    sys.exit(run(sys.argv, build_engine, NodeLoop))


if __name__ == "__main__":
    main()
