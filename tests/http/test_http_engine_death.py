"""The engine is killed under open requests: each gets an error, readiness fails, and the server comes back by itself."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import echo_model
from servers import ECHO, ServerProcess

LONG = {"prompt": "a long story", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def mortal(demo_model_path: Path, logs: Path) -> Iterator[ServerProcess]:
    with ServerProcess(echo_model(logs, demo_model_path, "echo-slow"), logs / "mortal.log", module=ECHO) as server:
        yield server


def test_death_under_open_requests(mortal: ServerProcess) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{mortal.url}/v1/completions", json=LONG, timeout=30))

    whole = threading.Thread(target=ask)
    whole.start()
    with mortal.client.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    ) as stream:
        lines = stream.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        mortal.wait_until(lambda seen: seen["kvseal_requests_running"] == 2)
        os.kill(mortal.engine_pid, signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-1][6:])["error"]["code"] == "engine_died", "the stream ends with an error event"
    assert "data: [DONE]" not in rest
    whole.join(10)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "engine_died"
    assert answers[0].headers["retry-after"]


def test_readiness_fails_and_comes_back(mortal: ServerProcess) -> None:
    mortal.wait_ready()
    os.kill(mortal.engine_pid, signal.SIGKILL)
    statuses: list[int] = []
    deadline_s = time.monotonic() + 15
    while time.monotonic() < deadline_s and (503 not in statuses or statuses[-1] != 200):
        statuses.append(mortal.client.get("/readyz").status_code)
        assert mortal.client.get("/livez").status_code == 200
        time.sleep(0.005)
    assert set(statuses) == {200, 503}
    assert statuses[-1] == 200
    assert mortal.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    assert mortal.metrics()["kvseal_engine_restarts_total"] >= 2
    assert "the engine runs again" in mortal.text
