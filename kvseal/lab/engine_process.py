"""`node.engine_process` with an engine of the laboratory in it: ``EngineClient.start(config, module="kvseal.lab.engine_process")``.

Owns the choice by the model's name: ``echo`` (no cache at all), ``echo-slow`` (a token every 50 ms).
"""

from __future__ import annotations

import sys

from kvseal.core.config import EngineConfig
from kvseal.core.errors import ModelNotFound
from kvseal.lab.echo import EchoEngine
from kvseal.node.engine_process import EngineDoor, run


def build_engine(config: EngineConfig) -> EngineDoor:
    match config.model.name:
        case "echo":
            return EchoEngine(config)
        case "echo-slow":
            return EchoEngine(config, pace_s=0.05)
    raise ModelNotFound(f"the laboratory has no model {config.model.name!r}; it has echo and echo-slow")


def main() -> None:
    sys.exit(run(sys.argv, build_engine))


if __name__ == "__main__":
    main()
