"""A worker's end of the control links: routers connect, prove the secret, and use the node as if it were their own process.

Owns every router's connection and the requests that came over it: a router that is lost has its requests cancelled. Never serves anything
before the proof, and never restarts the engine (the worker's own `NodeClient` does). Laws: L11 (each request of a router ends once, or with
the connection), and bounded: so many routers, so many bytes that a router does not read, so many who have not proven anything yet (a flood
of them pushes out its own first ones), and a line of the log a second about them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from kvseal.core.config import TLSFiles
from kvseal.core.errors import ConfigError, EngineDied, KVSealError
from kvseal.core.events import EndedEvent, Event
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Refused
from kvseal.handoff.auth import NotTrusted
from kvseal.node import messages as m
from kvseal.node import peer_messages as p
from kvseal.node.channel import HANDSHAKE_S, Channel, prove_to_router, server_context
from kvseal.node.node_client import Leg, NodeClient

MAX_ROUTERS = 32
MAX_STRANGERS = 64
SAY_EVERY_S = 1.0
"""How often the log speaks of those who were turned away."""
MAX_UNREAD_BYTES = 64 * 2**20
MAX_CARRIED = 4096
"""Hand-offs whose other end is remembered; older ones have long ended."""
RECEIVE_BYTES = 256 * 1024
RECENT_S = 1.5
"""An engine that has moved so lately counts as moving: its own client asks it every second."""

_log = logging.getLogger("kvseal.worker")


class Carrier(Protocol):
    """Who takes what the node says about a hand-off to the other node."""

    @property
    def closed(self) -> bool: ...

    def send(self, message: m.FromEngine) -> None: ...


class LinkServer:
    """Started by `listen`, ended by `close`."""

    def __init__(self, node: NodeClient, secret: bytes, tls: TLSFiles | None) -> None:
        self.port = 0
        self._node = node
        self._secret = secret
        self._tls = tls
        self._routers: set[_Router] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._turned_away = 0
        self._said_s = float("-inf")
        self._of_handoff: dict[str, Carrier] = {}
        self._server: asyncio.Server | None = None
        node.on_relay, node.on_lost, node.on_cache = self._relayed, self._engine_lost, self._cache_changed

    async def listen(self, host: str, port: int) -> None:
        """Raises `ConfigError` when it cannot."""
        context = None if self._tls is None else server_context(self._tls)
        try:
            handshake_s = None if context is None else HANDSHAKE_S
            self._server = await asyncio.start_server(self._came, host, port, ssl=context, ssl_handshake_timeout=handshake_s)
        except OSError as error:
            raise ConfigError(f"--listen: cannot listen on {host}:{port} ({error.strerror or error})") from error
        self.port = int(self._server.sockets[0].getsockname()[1])

    def carry(self, handoff: str, carrier: Carrier) -> None:
        """What the node says about this hand-off goes there."""
        if len(self._of_handoff) >= MAX_CARRIED:
            del self._of_handoff[next(iter(self._of_handoff))]
        self._of_handoff[handoff] = carrier

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for router in list(self._routers):
            router.close()

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        try:
            channel = await self._proven(reader, writer)
        except (NotTrusted, OSError, EOFError, TimeoutError) as error:
            self._turn_away(peer, error)
            writer.close()
            return
        if len(self._routers) >= MAX_ROUTERS or self._node.card is None:
            writer.close()
            return
        router = _Router(self._node, channel, writer, self.carry)
        self._routers.add(router)
        _log.info("router %s is connected", peer)
        try:
            await router.serve(reader)
        except (m.ProtocolBroken, OSError) as error:
            _log.error("router %s is dropped: %s", peer, error)
        finally:
            self._routers.discard(router)
            router.close()

    async def _proven(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
        self._strangers[writer] = None
        if len(self._strangers) > MAX_STRANGERS:
            first = next(iter(self._strangers))
            del self._strangers[first]
            first.transport.abort()
        try:
            return await prove_to_router(reader, writer, self._secret)
        finally:
            self._strangers.pop(writer, None)

    def _turn_away(self, peer: object, error: BaseException) -> None:
        self._turned_away += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            _log.warning("turned away %s: %s (%d so far)", peer, str(error) or type(error).__name__, self._turned_away)
            self._said_s = now_s

    # --- what the node says ---

    def _relayed(self, node: NodeClient, message: p.Relay) -> None:
        carrier = self._of_handoff.get(message.handoff)
        if carrier is None or carrier.closed:
            node.send(p.PeerGone(message.peer))
        else:
            carrier.send(message)

    def _engine_lost(self, node: NodeClient, incarnation: str) -> None:
        """Routers connect again, and get to know its successor."""
        for router in list(self._routers):
            router.close()

    def _cache_changed(self, message: p.CacheChanges) -> None:
        for router in self._routers:
            router.send(message)


class _Router:
    """One router's connection."""

    def __init__(self, node: NodeClient, channel: Channel, writer: asyncio.StreamWriter, carry: Callable[[str, Carrier], None]) -> None:
        self.closed = False
        self._node = node
        self._channel = channel
        self._writer = writer
        self._carry = carry
        self._legs: dict[RequestId, Leg] = {}
        self._events: list[Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps = 0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the router goes. Raises `ProtocolBroken`."""
        self.send(m.Ready(m.PROTOCOL_VERSION, self._node.report, self._node.card))
        if self._node.cached:
            self.send(p.CacheChanges(b"".join(self._node.cached), b""))
        frames = m.Frames()
        while data := await reader.read(RECEIVE_BYTES):
            for body in frames.feed(data):
                self._handle(m.decode_to_engine(self._channel.opened(body)))

    def send(self, message: m.FromEngine) -> None:
        if self.closed:
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            _log.error("a router does not read what it is sent: it is dropped")
            self.close()
            return
        self._writer.write(self._channel.closed(m.frame(message)))

    def close(self) -> None:
        """Cancels what it had open. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._writer.close()
        for leg in list(self._legs.values()):
            leg.cancel()
        for task in self._tasks:
            task.cancel()

    def _handle(self, message: m.ToEngine) -> None:
        match message:
            case m.Submit(request):
                self._open(request.request_id, message)
            case p.Prefill(request, handoff) | p.Receive(request, handoff):
                self._carry(handoff, self)
                self._open(request.request_id, message)
            case p.Give(handoff) | p.Take(handoff):
                self._carry(handoff, self)
                self._node.send(message)
            case p.Relay() | p.PeerGone():
                self._node.send(message)
            case p.HandoffLost(request_id) if request_id in self._legs:
                self._node.send(message)
            case m.Cancel(request_id) if request_id in self._legs:
                self._node.cancel(request_id)
            case m.Finish(request_id) if request_id in self._legs:
                self._node.finish(request_id)
            case m.Ping():
                moves = self._node.still_s < RECENT_S
                self._steps += moves
                self.send(m.Pong(self._steps, not moves))
            case m.AskStats(ask):
                task = asyncio.create_task(self._stats(ask))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case m.Hello() | m.Drain():
                raise m.ProtocolBroken("a router may neither configure nor stop a worker")

    def _open(self, request_id: RequestId, message: m.Submit | p.Prefill | p.Receive) -> None:
        try:
            leg = self._node.open(request_id, message, self._told)
        except ValueError:
            self._told_event(EndedEvent(request_id, Refused(EngineDied("another router has a request with this id open"))))
            return
        if not leg.ended:
            self._legs[request_id] = leg

    def _told(self, leg: Leg, event: Event) -> None:
        if isinstance(event, EndedEvent):
            self._legs.pop(leg.request_id, None)
        self._told_event(event)

    def _told_event(self, event: Event) -> None:
        """Those of one turn of the loop go together."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._steps += 1
        self.send(m.pack_events(self._steps, events))

    async def _stats(self, ask: int) -> None:
        try:
            self.send(m.Stats(ask, await self._node.stats()))
        except KVSealError:
            return  # The engine has just died; the connection goes with it.
