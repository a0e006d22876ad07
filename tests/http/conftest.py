"""Servers that all tests of this folder share; each is started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import ECHO, ServerProcess


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def echo_model(folder: Path, demo_model_path: Path, name: str = "echo") -> Path:
    """The echo engine with the demo model's tokenizer: the engine goes by the name, the HTTP side by the content."""
    link = folder / name
    if not link.exists():
        link.symlink_to(demo_model_path)
    return link


@pytest.fixture(scope="session")
def echo(demo_model_path: Path, logs: Path) -> Iterator[ServerProcess]:
    """Answers with its own prompt, over and over, at once."""
    with ServerProcess(echo_model(logs, demo_model_path), logs / "echo.log", module=ECHO) as server:
        yield server


@pytest.fixture(scope="session")
def slow(demo_model_path: Path, logs: Path) -> Iterator[ServerProcess]:
    """The same, 50 ms a token."""
    with ServerProcess(echo_model(logs, demo_model_path, "echo-slow"), logs / "slow.log", module=ECHO) as server:
        yield server


@pytest.fixture(scope="session")
def server(demo_model_path: Path, logs: Path) -> Iterator[ServerProcess]:
    """The demo model, as served by default but with a smaller pool."""
    with ServerProcess(demo_model_path, logs / "server.log", engine={"pool_tokens": 8192}) as running:
        yield running


@pytest.fixture(scope="session")
def narrow(demo_model_path: Path, logs: Path) -> Iterator[ServerProcess]:
    """The demo model with room for 256 tokens, one request running and one waiting."""
    options = {"pool_tokens": 256, "max_running": 1, "max_queued": 1}
    with ServerProcess(demo_model_path, logs / "narrow.log", engine=options) as running:
        yield running
