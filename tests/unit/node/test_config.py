"""Options that cannot mean anything are refused before a model is loaded, each by the name of its flag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kvseal.core.config import MAX_THREADS, TRANSPORTS, EngineConfig, NodeConfig, ServeConfig, TLSFiles
from kvseal.core.errors import ConfigError


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        *[("--request-timeout", {"request_timeout_s": value}) for value in (0.0, -1.0, math.nan, math.inf)],
        *[("--drain-timeout", {"drain_timeout_s": value}) for value in (-1.0, math.nan, math.inf)],
        ("--max-body", {"max_body_bytes": 1}),
        ("--port", {"port": 65536}),
    ],
)
def test_server_options(flag: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} is "):
        ServeConfig(engine=EngineConfig(model=Path("model.gguf")), **options)


@pytest.mark.parametrize("threads", [-1, MAX_THREADS + 1])
def test_threads(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"^--threads is {threads}"):
        EngineConfig(model=Path("model.gguf"), threads=threads)


def test_the_edges_are_allowed() -> None:
    engine = EngineConfig(model=Path("model.gguf"), threads=MAX_THREADS)
    assert ServeConfig(engine=engine, request_timeout_s=0.001, drain_timeout_s=0.0, port=0).engine.threads == MAX_THREADS


def node(**changed: Any) -> NodeConfig:
    return NodeConfig(role="decode", name="decode-0", secret=bytes(32), **changed)


def test_how_pages_go_is_checked_at_the_start() -> None:
    for name in (None, *TRANSPORTS):
        assert node(transport=name).transport == name
    with pytest.raises(ConfigError, match="--transport"):
        node(transport="carrier pigeon")
    with pytest.raises(ConfigError, match="cannot use TLS"):
        node(transport="nixl", tls=TLSFiles(Path("c"), Path("k"), Path("a")))
