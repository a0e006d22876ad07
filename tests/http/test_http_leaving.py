"""Clients that leave, at every moment: the engine's work stops at once and the pages come back."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest
from servers import ServerProcess

LONG: dict[str, Any] = {"prompt": "a long story about", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def _idle(seen: dict[str, float]) -> bool:
    return seen["kvseal_requests_running"] == 0 and seen["kvseal_requests_waiting"] == 0


def test_leaving_a_stream(slow: ServerProcess) -> None:
    before = slow.metrics()["kvseal_http_outcomes_total[cancelled]"]
    with slow.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()  # Kept: httpx closes the connection when the iterator is dropped.
        next(lines)
        assert slow.metrics()["kvseal_requests_running"] == 1
    slow.wait_until(_idle, timeout_s=2.0)
    slow.wait_until(lambda seen: seen["kvseal_http_outcomes_total[cancelled]"] == before + 1)
    assert "outcome=cancelled" in slow.text


def test_leaving_before_the_answer(slow: ServerProcess) -> None:
    with pytest.raises(httpx.ReadTimeout):
        slow.client.post("/v1/completions", json=LONG, timeout=0.5)
    slow.wait_until(_idle, timeout_s=2.0)


def test_leaving_with_several_choices(slow: ServerProcess) -> None:
    with pytest.raises(httpx.ReadTimeout):
        slow.client.post("/v1/completions", json=LONG | {"n": 5, "prompt": ["a", "b"]}, timeout=0.5)
    slow.wait_until(_idle, timeout_s=2.0)


def test_leaving_gives_back_the_pages(server: ServerProcess) -> None:
    free = server.metrics()
    with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.metrics()["kvseal_kv_pages[leased]"] > 0
    server.wait_until(lambda seen: _idle(seen) and seen["kvseal_kv_pages[leased]"] == 0, timeout_s=2.0)
    after = server.metrics()
    assert sum(v for k, v in after.items() if k.startswith("kvseal_kv_pages[")) == after["kvseal_kv_pool_tokens"] / 16
    assert after["kvseal_kv_pages[quarantined]"] == free["kvseal_kv_pages[quarantined]"]


def test_leaving_the_waiting_line(narrow: ServerProcess) -> None:
    """One runs, one waits; the waiting one leaves and never runs."""
    long = LONG | {"max_tokens": 200}
    with narrow.client.stream("POST", "/v1/completions", json=long | {"stream": True}) as running:
        lines = running.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            narrow.client.post("/v1/completions", json=long, timeout=0.3)
        narrow.wait_until(lambda seen: seen["kvseal_requests_waiting"] == 0, timeout_s=2.0)
    narrow.wait_until(_idle, timeout_s=2.0)


def test_a_full_line_says_so_before_the_first_byte(narrow: ServerProcess) -> None:
    long = LONG | {"max_tokens": 200}
    statuses: list[int] = []
    answers: list[httpx.Response] = []
    with narrow.client.stream("POST", "/v1/completions", json=long | {"stream": True}) as running:
        lines = running.iter_lines()
        next(lines)

        def wait_in_line() -> None:
            with suppress(httpx.HTTPError):
                statuses.append(httpx.post(f"{narrow.url}/v1/completions", json=long | {"max_tokens": 1}, timeout=30).status_code)

        waiting = threading.Thread(target=wait_in_line)
        waiting.start()
        narrow.wait_until(lambda seen: seen["kvseal_requests_waiting"] == 1)
        answers += [narrow.client.post("/v1/completions", json=long | {"stream": stream}) for stream in (False, True)]
    waiting.join(30)
    assert statuses == [200], "the one in the line was served once there was room"
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1


def test_a_reader_who_does_not_read_blocks_nobody(slow: ServerProcess) -> None:
    with slow.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}):
        started_s = time.monotonic()
        answer = httpx.post(f"{slow.url}/v1/completions", json={"prompt": "x", "max_tokens": 4}, timeout=10)
        assert answer.status_code == 200
        assert time.monotonic() - started_s < 3
    slow.wait_until(_idle, timeout_s=2.0)


def test_leaving_while_the_body_is_sent(echo: ServerProcess) -> None:
    import socket

    host, port = echo.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + json.dumps({"prompt": "x"}).encode())
    assert echo.client.get("/readyz").status_code == 200
    assert "internal error" not in echo.text
