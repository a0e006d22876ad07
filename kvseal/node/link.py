"""One connection to one engine process: frames in, messages out, and its loss told once.

Owns the introduction (the engine's report, or its reason not to start) and the framing. Never interprets what comes after it: the client
does. Anything that is no message of this protocol is treated like a death (L12).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from kvseal.core.errors import EngineDied, SetupError
from kvseal.node import messages as m
from kvseal.node.channel import Channel
from kvseal.node.peer_messages import NodeCard
from kvseal.node.report import StartReport

_log = logging.getLogger("kvseal.node")


class Link(asyncio.Protocol):
    """One connection to one engine process. Anything but a message is treated as a death."""

    def __init__(self, on_message: Callable[[m.FromEngine], None], on_lost: Callable[[Link], None], channel: Channel | None = None) -> None:
        """`channel`: the proven link to another machine; None for a socketpair."""
        self._channel = channel
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = m.Frames()
        self._transport: asyncio.Transport | None = None
        self.card: NodeCard | None = None
        """Who answers, if it is a node of several; known when `ready` is done."""
        self.lost = asyncio.Event()
        self.ready: asyncio.Future[StartReport] = asyncio.get_running_loop().create_future()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def send(self, message: m.ToEngine) -> None:
        if self._transport is not None and not self.lost.is_set():
            frame = m.frame(message)
            self._transport.write(frame if self._channel is None else self._channel.closed(frame))

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                message = m.decode_from_engine(body if self._channel is None else self._channel.opened(body))
                if self.ready.done():
                    self._on_message(message)
                else:
                    self._introduced(message)
        except m.ProtocolBroken as error:
            _log.error("dropping the engine: %s", error)
            self.close()
            self._gone()

    def _introduced(self, message: m.FromEngine) -> None:
        match message:
            case m.Ready(version, report, card) if version == m.PROTOCOL_VERSION:
                self.card = card
                self.ready.set_result(report)
            case m.SetupFailed(wire):
                error = m.unpack_error(wire)
                self.ready.set_exception(error if isinstance(error, SetupError) else EngineDied(str(error)))
            case _:
                raise m.ProtocolBroken("the engine's first message was not an introduction of this version")

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _gone(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(EngineDied("the engine process ended before it was ready; its log says why"))
        if not self.lost.is_set():
            self.lost.set()
            self._on_lost(self)
