"""The first moments of a server: what the HTTP process must not import, and an engine process that nobody takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvseal.core.config import EngineConfig, ServeConfig
from kvseal.core.errors import PortInUse
from kvseal.node.spawn import SpawnedEngine
from kvseal.serve import boot


def test_the_http_process_starts_without_numpy() -> None:
    """It costs a tenth of a second and 20 MB, and computes nothing there."""
    code = (
        "import sys, kvseal.serve.boot, kvseal.serve.server; print([n for n in ('numpy', 'httpx', 'huggingface_hub') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_an_engine_that_nobody_takes_is_ended() -> None:
    spawned = SpawnedEngine(EngineConfig(model=Path("nowhere")), module="this")  # Prints the Zen and ends, or is killed before.
    spawned.discard()
    spawned.discard()
    with pytest.raises(ValueError, match="taken"):
        spawned.take()


def test_an_engine_that_is_taken_is_left_alone() -> None:
    spawned = SpawnedEngine(EngineConfig(model=Path("nowhere")), module="this")
    process, sock = spawned.take()
    spawned.discard()
    with sock:
        assert process.wait(timeout=30) == 0


def test_a_port_in_use_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "SpawnedEngine", None)  # Would raise.
    with boot.listen("127.0.0.1", 0) as taken, pytest.raises(PortInUse):
        boot.serve(ServeConfig(engine=EngineConfig(model=Path("nowhere")), port=taken.getsockname()[1]))
