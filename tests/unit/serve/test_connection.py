"""Connections that do not say what they want: closed in time, and the others left alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from kvseal.serve.connection import BoundedConnection

HEAD_TIMEOUT_S = 0.3


class _Hasty(BoundedConnection):
    head_timeout_s = HEAD_TIMEOUT_S


async def _slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers later than a head may take."""
    await asyncio.sleep(3 * HEAD_TIMEOUT_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[tuple[str, int]]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            _slow_app, http=_Hasty, ws="none", timeout_keep_alive=60, timeout_graceful_shutdown=1, lifespan="off", log_config=None
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        await serving
        listener.close()


async def _talk(pieces: Iterable[bytes]) -> tuple[bytes, float]:
    """Sends pieces with pauses; returns all that came back and how long the connection lived."""
    async with _serving() as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        start_s = time.monotonic()

        async def send() -> None:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(HEAD_TIMEOUT_S / 10)

        sending = asyncio.create_task(send())
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # What was sent after the close.
            while part := await asyncio.wait_for(reader.read(4096), 10):
                answer += part
        lived_s = time.monotonic() - start_s
        sending.cancel()
        writer.close()
        return answer, lived_s


@pytest.mark.parametrize(
    "pieces", [[], [b"POST /v1/comp"], [b"GET / HTTP/1.1\r\n", *[b"X: y\r\n"] * 1000]], ids=["silent", "half", "trickle"]
)
def test_a_head_that_never_ends(pieces: list[bytes]) -> None:
    answer, lived_s = asyncio.run(_talk(pieces))
    assert answer == b""
    assert HEAD_TIMEOUT_S * 0.9 < lived_s < 10 * HEAD_TIMEOUT_S


def test_a_complete_head_may_wait_for_its_answer() -> None:
    answer, _ = asyncio.run(_talk([b"GET / HTTP/1.1\r\nHost: x\r\n", b"Connection: close\r\n\r\n"]))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok")


def test_a_second_request_on_the_connection_has_its_own_time() -> None:
    pause = [b""] * 40  # Longer than the first answer takes: the connection is idle when the second head begins.
    answer, lived_s = asyncio.run(_talk([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", *pause, b"GET / HT"]))
    assert answer.count(b"200 OK") == 1
    assert 4 * HEAD_TIMEOUT_S < lived_s < 20 * HEAD_TIMEOUT_S
