"""The real vllm-router in front of two workers: whole and streamed answers are those of one node, and the pages go over by hand-off.

A job of its own, for it needs somebody else's package: ``pip install vllm-router``, ``pytest -m slow tests/http/test_http_vllm_router.py``.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import READY, ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="the package vllm-router is not installed"),
]
PROMPT = (
    "The harbour was quiet that morning, and the ships lay still on the grey water while the keeper climbed the stairs of the tower. " * 5
)
START_S = 60.0


@contextmanager
def process(log: Path, *command: str) -> Iterator[None]:
    with log.open("wb") as out:
        running = subprocess.Popen([sys.executable, "-P", "-m", *command], stdout=out, stderr=out)
    try:
        yield
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait(10)


def said(log: Path, what: re.Pattern[str]) -> str:
    give_up_s = time.monotonic() + START_S
    while not (found := what.search(log.read_text(errors="replace"))):
        assert time.monotonic() < give_up_s, log.read_text(errors="replace")
        time.sleep(0.05)
    return found[1]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


class Front:
    """vllm-router, a prefill worker and a decode worker."""

    def __init__(self, folder: Path, model: Path, open_: ExitStack) -> None:
        secret = folder / "fleet.secret"
        secret.write_text("a secret of the tests, long enough")
        self.workers: dict[str, str] = {}
        for role in ("prefill", "decode"):
            options = ("--role", role, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--secret-file", str(secret))
            sizes = ("--pool-tokens", "2048", "--threads", "1")
            open_.enter_context(process(folder / f"{role}.log", "kvseal", "worker", str(model), *options, *sizes))
        self.workers = {role: said(folder / f"{role}.log", READY) for role in ("prefill", "decode")}
        self.url = f"http://127.0.0.1:{free_port()}"
        names = ("--prefill", self.workers["prefill"], "--decode", self.workers["decode"])
        place = ("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], "--prometheus-port", free_port())
        open_.enter_context(process(folder / "router.log", "vllm_router.launch_router", "--vllm-pd-disaggregation", *names, *place))
        self.client = open_.enter_context(httpx.Client(timeout=60.0))
        self.model = self.client.get(f"{self.workers['decode']}/v1/models").json()["data"][0]["id"]
        self._wait()

    def _wait(self) -> None:
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            try:
                if self.post("/v1/completions", prompt="ready?", max_tokens=1).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError("vllm-router never answered")

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{self.url}{path}", json={"model": self.model, "temperature": 0, **body})

    def counted(self, name: str) -> float:
        text = self.client.get(f"{self.workers['decode']}/metrics").text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])


@pytest.fixture(scope="module")
def front(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with ExitStack() as open_:
        yield Front(tmp_path_factory.mktemp("front"), demo_model_path, open_)


PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_answer_of_one_node_by_way_of_two(path: str, front: Front, server: ServerProcess) -> None:
    body = {**PATHS[path], "max_tokens": 12}
    received, pages = front.counted("kvseal_handoff_received_total"), front.counted("kvseal_handoff_pages_total")
    answer = front.post(path, **body).raise_for_status().json()
    right = server.client.post(path, json={"temperature": 0, **body}).raise_for_status().json()
    assert answer["choices"] == right["choices"]
    assert front.counted("kvseal_handoff_received_total") > received and front.counted("kvseal_handoff_pages_total") > pages + 5
    assert front.counted("kvseal_handoff_recomputed_total") == 0


@pytest.mark.parametrize("path", PATHS)
def test_the_same_streamed(path: str, front: Front, server: ServerProcess) -> None:
    body = {**PATHS[path], "max_tokens": 12, "stream": True, "cache_salt": "streamed"}
    received = front.counted("kvseal_handoff_received_total")
    found = _choices(front.post(path, **body).raise_for_status().text)
    right = _choices(server.client.post(path, json={"temperature": 0, **body}).raise_for_status().text)
    assert found == right and len(found) > 5
    assert front.counted("kvseal_handoff_received_total") > received


def _choices(stream: str) -> list[str]:
    return [line.partition('"choices":')[2] for line in stream.splitlines() if line.startswith("data: {") and '"choices":[{' in line]
