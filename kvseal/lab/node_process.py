"""`node.node_process` with the oracle in it: ``NodeClient.start_node(config, module="kvseal.lab.node_process")``.

Owns the choice by the model's name: ``oracle``, or ``oracle-slow`` whose steps take 30 ms each, so that a test can meet a hand-off in the
middle. Pages go through shared memory, as on one machine.
"""

from __future__ import annotations

import os
import sys
import time

from kvseal.core.clock import MonotonicClock
from kvseal.core.config import EngineConfig
from kvseal.core.errors import ModelNotFound
from kvseal.exec.backend import StepArrays, StepOutput
from kvseal.lab.oracle_node import SealingOracle, oracle_node
from kvseal.node.engine_process import run
from kvseal.node.node_engine import NodeEngine
from kvseal.node.node_process import NodeLoop

SLOW_STEP_S = 0.03


class SlowOracle(SealingOracle):
    def forward(self, step: StepArrays) -> StepOutput:
        time.sleep(SLOW_STEP_S)
        return super().forward(step)


def build_engine(config: EngineConfig) -> NodeEngine:
    if config.node is None or config.model.name not in ("oracle", "oracle-slow"):
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


def main() -> None:
    sys.exit(run(sys.argv, build_engine, NodeLoop))


if __name__ == "__main__":
    main()
