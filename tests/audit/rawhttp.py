"""A small HTTP/1.1 server on asyncio streams, for servers that must be able to misbehave: nothing is checked, everything is allowed."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

Handler = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """One request and the ways to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    started: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def reply(self, status: int, body: Any, *, kind: str = "application/json", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.started = True
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await self.writer.drain()

    async def start_stream(self, kind: str = "text/event-stream") -> None:
        self.started = True
        self.writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def event(self, body: Any) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        await self.chunk(f"data: {text}\n\n".encode())

    async def end_stream(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def slam(self) -> None:
        """Breaks the connection."""
        self.writer.transport.abort()


class RawServer:
    """Use as ``async with RawServer(handler) as server``; `server.url` ends in /v1."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._host = host
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}/v1"

    async def __aenter__(self) -> RawServer:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._protocol, self._host, 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(_Reader(), self._connected)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (exchange := await _read(reader, writer)) is not None:
                await self._serve(exchange)
                if writer.is_closing():
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, exchange: Exchange) -> None:
        """Runs the handler, and tells it when the client has gone."""
        handling = asyncio.create_task(self._handler(exchange))
        watching = asyncio.create_task(_watch(exchange))
        try:
            await asyncio.wait({handling, watching}, return_when=asyncio.FIRST_COMPLETED)
            await handling
        finally:
            watching.cancel()
            handling.cancel()
            await asyncio.gather(watching, handling, return_exceptions=True)


class _Reader(asyncio.StreamReader):
    """Says when the client has gone: asking again and again would take time from what is measured."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 24)
        self.ended = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.ended.set()

    def set_exception(self, error: BaseException) -> None:
        super().set_exception(error)
        self.ended.set()


async def _watch(exchange: Exchange) -> None:
    assert isinstance(exchange.reader, _Reader)
    await exchange.reader.ended.wait()
    exchange.gone.set()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Exchange(method, path, headers, body, reader, writer)
