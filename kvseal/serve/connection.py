"""One HTTP connection that has to say what it wants in time.

Owns `BoundedConnection`. uvicorn bounds the pause between two requests, but waits for ever for the rest of a request's head: clients
that send half a line each, or nothing, would hold all the file descriptors that there are. Bodies have their own time (`app`).
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 20.0
"""From the connection, or the first byte of a later request, to the end of the request's headers."""


class BoundedConnection(H11Protocol):
    """uvicorn's protocol, closed when a request's head is not complete in time."""

    _head_timer: asyncio.TimerHandle | None = None
    head_timeout_s = HEAD_TIMEOUT_S

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
