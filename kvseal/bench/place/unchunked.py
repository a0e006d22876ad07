"""A server whose steps are as large as they get: ``python -m kvseal.bench.place.unchunked MODEL --port N``.

Owns the other side of one comparison: what it is like when nothing keeps a long prompt from holding everybody up. ``kvseal serve`` cannot
be told to do that, since its steps are sized to end in time. With a file descriptor as its only argument it is that server's engine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvseal.core.config import EngineConfig, ServeConfig
from kvseal.node.build import build_engine
from kvseal.node.engine import Engine
from kvseal.node.engine_process import run

UNCHUNKED_TOKENS = 8_192


def engine(config: EngineConfig) -> Engine:
    return build_engine(config, step_s=None)


def serve(arguments: list[str]) -> int:
    """Until it is told to stop. Raises `SetupError`."""
    from kvseal.serve.boot import listen
    from kvseal.serve.server import run_server

    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log-level", default="error")
    options = parser.parse_args(arguments)
    sizes = EngineConfig(model=options.model, threads=1, chunk_tokens=UNCHUNKED_TOKENS)
    config = ServeConfig(engine=sizes, port=options.port, served_model_name="unchunked", log_level=options.log_level)
    with listen(config.host, config.port) as listener:
        run_server(config, listener=listener, engine_module="kvseal.bench.place.unchunked")
    return 0


def main() -> None:
    sys.exit(run(sys.argv, engine) if len(sys.argv) == 2 and sys.argv[1].isdigit() else serve(sys.argv[1:]))


if __name__ == "__main__":
    main()
