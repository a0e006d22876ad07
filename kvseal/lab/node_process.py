"""`node.node_process` with the oracle in it: ``NodeClient.start_node(config, module="kvseal.lab.node_process")``.

Owns the choice by the model's name: ``oracle``; ``oracle-slow``, whose steps take 30 ms each, so that a test can meet a hand-off in the
middle; and ``oracle-HOW-WHEN-WHAT``, which dies once: HOW is ``kill`` or ``stop`` (the signals), WHEN is ``before`` or ``after`` the node
sends its first hand-off message of the kind WHAT (``intent``, ``grant``, ``pages``, ``taken``, ``manifest``, ``receipt``). It has died when
the file of the model's path with ``.died`` behind it exists. Pages go through shared memory, as on one machine.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from kvseal.core.clock import MonotonicClock
from kvseal.core.config import EngineConfig
from kvseal.core.errors import ModelNotFound
from kvseal.exec.backend import StepArrays, StepOutput
from kvseal.handoff.messages import Grant, Intent, Manifest, Message, PagesReady, Receipt, Taken, decode
from kvseal.lab.oracle_node import SealingOracle, oracle_node
from kvseal.node import messages as m
from kvseal.node.engine_process import EngineDoor, EngineLoop, run
from kvseal.node.node_engine import NodeEngine
from kvseal.node.node_process import NodeLoop
from kvseal.node.peer_messages import Relay

SLOW_STEP_S = 0.03
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
KINDS: dict[str, type[Message]] = {
    "intent": Intent,
    "grant": Grant,
    "pages": PagesReady,
    "taken": Taken,
    "manifest": Manifest,
    "receipt": Receipt,
}


class SlowOracle(SealingOracle):
    def forward(self, step: StepArrays) -> StepOutput:
        time.sleep(SLOW_STEP_S)
        return super().forward(step)


class Fate:
    """When a process is to die, read from its model's path."""

    def __init__(self, model: Path) -> None:
        how, when, what = model.name.split("-")[1:]
        self.signal, self.when, self.kind = SIGNALS[how], when, KINDS[what]
        self.mark = model.with_name(model.name + ".died")

    def met_by(self, message: m.FromEngine, when: str) -> None:
        if when == self.when and isinstance(message, Relay) and isinstance(decode(message.body), self.kind) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.signal)


class MortalLoop(NodeLoop):
    def __init__(self, sock: socket.socket, engine: EngineDoor, wakeup: socket.socket, fate: Fate) -> None:
        super().__init__(sock, engine, wakeup)
        self._fate = fate

    def _send(self, message: m.FromEngine) -> None:
        self._fate.met_by(message, "before")
        super()._send(message)
        self._fate.met_by(message, "after")


class Laboratory:
    """The engine that the model's name asks for, and its loop."""

    def __init__(self) -> None:
        self._model = Path("oracle")

    def engine(self, config: EngineConfig) -> NodeEngine:
        self._model = config.model
        if config.node is None or config.model.name.partition("-")[0] != "oracle":
            raise ModelNotFound(f"the laboratory has no node with the model {config.model.name!r}")
        return oracle_node(
            config.node,
            None,
            clock=MonotonicClock(),
            secret=os.urandom(32),
            pages=(config.pool_tokens or 4_096) // config.page_tokens,
            page_tokens=config.page_tokens,
            chunk_tokens=config.chunk_tokens,
            max_running=config.max_running,
            max_queued=config.max_queued,
            backend_class=SlowOracle if config.model.name == "oracle-slow" else SealingOracle,
        )

    def loop(self, sock: socket.socket, engine: EngineDoor, wakeup: socket.socket) -> EngineLoop:
        if self._model.name.count("-") == 3:
            return MortalLoop(sock, engine, wakeup, Fate(self._model))
        return NodeLoop(sock, engine, wakeup)


def main() -> None:
    laboratory = Laboratory()
    sys.exit(run(sys.argv, laboratory.engine, laboratory.loop))


if __name__ == "__main__":
    main()
