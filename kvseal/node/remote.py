"""The router's hold on a worker on another machine: a `NodeClient` whose process is somebody else's.

Owns the connection and its renewal: a connection that is lost ends every leg on it at once, and is tried again after a pause that doubles.
Never configures the worker: what it serves is what its own command line says. Laws: as `client`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from kvseal.core.clock import Clock, MonotonicClock
from kvseal.core.config import EngineConfig, TLSFiles
from kvseal.core.errors import EngineDied, SetupError
from kvseal.handoff.auth import NotTrusted
from kvseal.node.channel import HANDSHAKE_S, client_context, prove_to_worker
from kvseal.node.client import STALL_AFTER_S
from kvseal.node.link import Link
from kvseal.node.node_client import NodeClient

CONNECT_S = 5.0
AGAIN_S = 0.5
HANGS_UP_S = 5.0
"""For a worker that hangs up in the handshake: one that is flooded by strangers may, one that expects something else always does."""

_log = logging.getLogger("kvseal.node")


class RemoteNode(NodeClient):
    """Made by `connect`."""

    def __init__(self, host: str, port: int, secret: bytes, tls: TLSFiles | None, *, stall_after_s: float, clock: Clock) -> None:
        super().__init__(EngineConfig(model=Path("remote")), module="", stall_after_s=stall_after_s, clock=clock)
        self.address = f"{host}:{port}"
        self._host, self._port = host, port
        self._secret = secret
        self._tls = tls
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        secret: bytes,
        tls: TLSFiles | None = None,
        stall_after_s: float = STALL_AFTER_S,
        clock: Clock | None = None,
        patience_s: float = 0.0,
    ) -> RemoteNode:
        """Waits until the worker has introduced itself. `SetupError`: it cannot be trusted, or not be reached for `patience_s`."""
        clock = clock or MonotonicClock()
        node = cls(host, port, secret, tls, stall_after_s=stall_after_s, clock=clock)
        began_s, told = clock.now_s(), False
        while True:
            try:
                await node._begin()
                return node
            except EngineDied as error:
                most_s = _patience_s(error.__cause__, patience_s)
                if clock.now_s() - began_s >= most_s:
                    raise SetupError(str(error)) from error
            if not told:
                _log.warning("worker %s cannot be reached yet; waiting up to %.0f s for it", node.address, most_s)
                told = True
            await asyncio.sleep(AGAIN_S)

    async def _spawn(self) -> Link:
        """A new connection. Raises `EngineDied` when there is none to be had."""
        try:
            return await self._connected()
        except NotTrusted as error:
            raise EngineDied(f"worker {self.address} is not trusted: {error}") from error
        except (OSError, EOFError, TimeoutError) as error:
            if _hung_up(error):
                why = "it hangs up in the handshake; give TLS at both ends or at neither, and see its log"
            else:
                why = str(error) or type(error).__name__
            raise EngineDied(f"worker {self.address} cannot be reached ({why})") from error

    async def _connected(self) -> Link:
        context = None if self._tls is None else client_context(self._tls)
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=context, ssl_handshake_timeout=None if context is None else HANDSHAKE_S
            )
        try:
            channel = await prove_to_worker(reader, writer, self._secret)
        except BaseException:
            writer.close()
            raise
        self._writer = writer  # One that nobody holds closes its connection.
        link = Link(self._handle, self._connection_lost, channel)
        # Nothing can have come yet: the worker speaks when it has our proof, and this process has not listened since it was sent.
        writer.transport.set_protocol(link)
        link.connection_made(writer.transport)
        async with asyncio.timeout(CONNECT_S):
            await self._introduced(link)
        return link

    def _kill(self) -> None:
        """A worker that hangs is dropped, not killed: its own supervisor does that."""
        if self._link is not None:
            self._link.close()


def _hung_up(error: BaseException | None) -> bool:
    return isinstance(error, EOFError | ConnectionResetError | BrokenPipeError | ssl.SSLEOFError | ssl.SSLZeroReturnError)


def _patience_s(error: BaseException | None, most_s: float) -> float:
    """How long it is worth trying again."""
    if _hung_up(error):
        return min(most_s, HANGS_UP_S)
    return most_s if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else 0.0
