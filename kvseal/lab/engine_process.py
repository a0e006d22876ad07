"""`node.engine_process` with an engine of the laboratory in it: ``EngineClient.start(config, module="kvseal.lab.engine_process")``.

Owns the choice by the model's name: ``echo`` (no cache at all), ``echo-slow`` (a token every 50 ms), ``oracle`` (the real engine on the
oracle model), and engines that fail in their third step: ``echo-law`` (a broken law), ``echo-bug`` (an exception whose text holds tokens
of a prompt), ``echo-hang`` (the step does not return), ``echo-memory`` (the pool's memory is not granted at the start).
"""

from __future__ import annotations

import sys
import time

from kvseal.core.config import EngineConfig
from kvseal.core.errors import LawBroken, ModelNotFound
from kvseal.core.events import Event
from kvseal.core.laws import Law
from kvseal.core.request import Request
from kvseal.lab.echo import EchoEngine
from kvseal.node.engine_process import EngineDoor, run

FAILS_AT_STEP = 3


class FailingEcho(EchoEngine):
    """Steps twice, then fails by the model's name."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._how = config.model.name
        self._seen: tuple[int, ...] = ()

    def submit(self, request: Request) -> None:
        self._seen = request.prompt_tokens
        super().submit(request)

    def step(self) -> list[Event]:
        if self.steps + 1 == FAILS_AT_STEP:
            if self._how == "echo-law":
                raise LawBroken(Law.L2, "a lease was released twice")
            if self._how == "echo-bug":
                raise ValueError(f"unexpected tokens {self._seen}")
            time.sleep(3_600)
        return super().step()


def build_engine(config: EngineConfig) -> EngineDoor:
    match config.model.name:
        case "echo":
            return EchoEngine(config)
        case "echo-slow":
            return EchoEngine(config, pace_s=0.05)
        case "echo-law" | "echo-bug" | "echo-hang":
            return FailingEcho(config)
        case "echo-memory":
            raise MemoryError
        case "oracle":
            from kvseal.lab.rig import Rig  # NumPy and the whole engine: the others start faster without.

            pages = (config.pool_tokens or 4_096) // config.page_tokens
            return Rig(pages=pages, page_tokens=config.page_tokens, chunk_tokens=config.chunk_tokens, max_running=config.max_running).engine
    raise ModelNotFound(f"the laboratory has no model {config.model.name!r}; see its engine_process for those it has")


def main() -> None:
    sys.exit(run(sys.argv, build_engine))


if __name__ == "__main__":
    main()
