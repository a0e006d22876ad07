"""Whatever a caller sends, the answer is a clear 4xx in the one error shape, and the server goes on."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from servers import ServerProcess

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def _assert_error(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages": [',
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'\xef\xbb\xbf{"messages": []}',
        b'{"messages": [], "messages": []}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [], "n": ' + b"1" * 10_000 + b"}",
        b'{"messages": []}',
        b'{"messages": [{"role": "wizard", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -5}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": null, "top_p": 7}',
        b"\x00" * 1000,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_malformed_bodies(echo: ServerProcess, body: bytes) -> None:
    error = _assert_error(echo.client.post("/v1/chat/completions", content=body))
    assert error["type"] == "invalid_request_error"


def test_the_content_type_does_not_matter(echo: ServerProcess) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = echo.client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
        assert answer.status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_ten_megabytes(echo: ServerProcess, declared: bool) -> None:
    body = b'{"prompt": "' + b"x" * 10 * 2**20 + b'"}'
    content = body if declared else (body[i : i + 65536] for i in range(0, len(body), 65536))
    error = _assert_error(echo.client.post("/v1/completions", content=content), 413)
    assert error["code"] == "body_too_large"
    assert "4194304" in error["message"]


@pytest.mark.parametrize("declared", [5_000_000, 99_999_999_999])
@pytest.mark.parametrize("sent", [0, 100])
def test_a_body_that_is_declared_too_large_is_refused_before_it_comes(echo: ServerProcess, declared: int, sent: int) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {declared}\r\n\r\n".encode()
    assert _raw_answer(echo, head + b"x" * sent).startswith(b"HTTP/1.1 413 ")


def test_nobody_is_told_to_send_a_body_that_is_too_large(echo: ServerProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\nExpect: 100-continue\r\n\r\n"
    assert _raw_answer(echo, head).startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_is_refused_where_it_gets_too_large(echo: ServerProcess) -> None:
    """Its sender pauses and does not end it."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    assert _raw_answer(echo, head + 70 * chunk).startswith(b"HTTP/1.1 413 ")


def _raw_answer(server: ServerProcess, sent: bytes) -> bytes:
    """The first bytes that come back while the connection stays open."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(sent)
        return raw.recv(4096)


def test_a_prompt_of_a_megabyte_is_counted_and_refused(echo: ServerProcess) -> None:
    error = _assert_error(echo.client.post("/v1/completions", json={"prompt": "hello " * 150_000}))
    assert error["code"] == "context_length_exceeded"
    assert error["details"]["prompt_tokens"] >= 150_000


def test_endless_headers(echo: ServerProcess) -> None:
    host, port = echo.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-pad: " + b"a" * 200_000)
        assert b" 400 " in raw.recv(4096).split(b"\r\n")[0]
    assert echo.client.get("/livez").status_code == 200


def test_unknown_fields_are_said(echo: ServerProcess) -> None:
    answer = echo.client.post("/v1/chat/completions", json=CHAT | {"frobnicate": 1, "service_tier": "flex"})
    assert answer.headers["x-kvseal-ignored-fields"] == "frobnicate"
    assert answer.json()["service_tier"] == "default"


def test_what_would_change_the_answer_is_refused(echo: ServerProcess) -> None:
    for name, value in {"tools": [{"type": "function"}], "response_format": {"type": "json_object"}, "store": True, "audio": {}}.items():
        error = _assert_error(echo.client.post("/v1/chat/completions", json=CHAT | {name: value}))
        assert error["param"] == name


def test_streams_that_cannot_begin_have_a_status(echo: ServerProcess) -> None:
    error = _assert_error(echo.client.post("/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 10**6}))
    assert error["code"] == "context_length_exceeded"


def test_prompts_are_never_logged(echo: ServerProcess) -> None:
    secret = "xyzzy-plugh"
    echo.client.post("/v1/completions", json={"prompt": secret})
    echo.client.post("/v1/completions", json={"prompt": secret, "n": secret})
    echo.client.post("/v1/completions?token=" + secret, content=b'{"prompt": "' + secret.encode())
    echo.client.post("/v1/chat/completions", json={"messages": [{"role": secret, "content": secret}]})
    echo.client.get("/" + secret)
    assert secret not in echo.text
    assert "route=/v1/completions status=400" in echo.text, "every request has its one line"
