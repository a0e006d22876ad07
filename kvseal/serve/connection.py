"""One HTTP connection that has to say what it wants in time.

Owns `BoundedConnection` and `RawBody`. uvicorn bounds the pause between two requests, but waits for ever for the rest of a request's
head: clients that send half a line each, or nothing, would hold all the file descriptors there are. Bodies have their own time (`app`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_RAW_BODY = "kvseal.raw_body"

HEAD_TIMEOUT_S = 20.0
"""From the connection, or the first byte of a later request, to the end of the request's headers."""


class RawBody:
    """The chunked body of the answer that a connection is giving: written straight to the transport.

    A streamed token would otherwise pass through four coroutines and h11's state machine, which cost more than all that makes the token's
    text. For use between the answer's head and its last piece, which both go the usual way; h11 sees no difference, because in between
    its state does not depend on the data.
    """

    def __init__(self, connection: BoundedConnection) -> None:
        self._connection = connection

    @property
    def paused(self) -> bool:
        """The client reads more slowly than the answer grows: whoever writes must first wait, the usual way."""
        return self._connection.flow.write_paused

    def write(self, data: bytes) -> None:
        """One chunk; `data` is not empty. What nobody can receive any more is dropped."""
        transport = self._connection.transport
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def raw_body_of(scope: Scope) -> RawBody | None:
    """None where the answer has no chunks to be written: another server, or HTTP/1.0."""
    raw: Any = scope.get(_RAW_BODY)
    return raw if isinstance(raw, RawBody) and scope.get("http_version") == "1.1" else None


class BoundedConnection(H11Protocol):
    """uvicorn's protocol, closed when a request's head is not complete in time."""

    _head_timer: asyncio.TimerHandle | None = None
    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        app, raw = self.app, RawBody(self)

        async def with_raw_body(scope: Scope, receive: Receive, send: Send) -> None:
            scope[_RAW_BODY] = raw
            await app(scope, receive, send)

        self.app = with_raw_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # Part of a head; whoever trickles it gains no time by that.
            self._start_head_timer()
        else:
            self._stop_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
