"""Framed TCP between hosts: the receiver asks for pages and reads the answer straight into its own arena.

Owns the data connections and their frames. The receiver alone writes its arena, and reads a page only after the header in front of it says
exactly what was asked for. A few pages at a time are read into a buffer that stays in the processor's cache, and are checked on their way
from there to their places: a page goes through memory once. The fence shuts the connection and waits for the thread that reads. Every
connection opens with the handshake of `auth`, inside TLS where contexts are given. Laws L3 (the sender compares each stamp with what was
offered and with the seal before it sends; the receiver compares after), L8, L9.

Frames, little-endian, over one connection, strictly in order::

    receiver -> sender   request: magic, pages, batch number, transfer id (64 bytes); then pages x (page, nonce)
    sender -> receiver   for each group: magic, status, pages, batch number, payload bytes; then the pages as they lie in the arena
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from kvseal.core.errors import ConfigError
from kvseal.handoff.auth import Dialer, Listener, checked_secret, dial, fill, listen, read_exactly
from kvseal.handoff.door import HANDSHAKE_S, Door, shut
from kvseal.handoff.lanes import FetchFailed, Pulling
from kvseal.handoff.messages import MAX_PAGES, packed_stamps, unpacked_stamps
from kvseal.handoff.proof import Claims, Landing, Memory, Move, seal_nonces
from kvseal.handoff.transport import FENCE_S, Source

GROUP_BYTES = 2 * 2**20
"""Sent behind one header."""
STAGE_BYTES = 2 * 2**20
"""Read and put in place at a time, or one page if that is more: little enough for the machine's cache, and so much that the reader seldom
waits. (With a quarter of it, loopback brings a fifth less; with a sixteenth, half.)"""
GROUP_PAGES = 256
MAX_ENDPOINT_CHARS = 300
_PURPOSE = "pages"
_ASK = struct.Struct("<4sIQ64s")
_GIVE = struct.Struct("<4sHHQQ")
_ASK_MAGIC, _GIVE_MAGIC = b"KVA1", b"KVG1"
_OK, _REFUSED = 0, 1


class TLS(NamedTuple):
    """Contexts that demand the peer's certificate, each for its side."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class TCP(Pulling):
    """Listens on `host` (a name or address that the other nodes can reach) and a free port, or `port`."""

    name = "tcp"
    local_fence = True

    def __init__(
        self,
        memory: Memory,
        *,
        incarnation: str,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TLS | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self._secret = checked_secret(secret)
        self._tls = tls
        self._offers = _Offers(memory)
        super().__init__(self.name, self._dial, wake)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen for page transfers on {host}:{port}: {error.strerror or error}") from None
        self.host, self.port = host, int(listener.getsockname()[1])
        self._door = Door(listener, self._prove, self._serve, wrap=None if tls is None else self._inside_tls)

    @property
    def endpoint(self) -> bytes:
        return f"{self.port} {self.host}".encode()

    def send(self, transfer: str, receiver: str, stamps: Sequence[int]) -> None:
        self._offers.add(transfer, receiver, stamps)

    def withdraw(self, transfer: str) -> bool:
        return self._offers.withdraw(transfer)

    def close(self) -> None:
        self._door.close()
        self._lanes.stop()

    # --- the receiver's side, on a lane's thread -------------------------------------------------------------

    def _dial(self, source: Source) -> _Stream:
        port, _, host = source.endpoint[:MAX_ENDPOINT_CHARS].decode("ascii", "replace").partition(" ")
        if not port.isdigit() or not 0 < int(port) < 65_536 or not host:
            raise FetchFailed("the sender's endpoint is no address")
        sock = socket.create_connection((host, int(port)), HANDSHAKE_S)
        try:
            if self._tls is not None:
                sock = self._tls.client.wrap_socket(sock, server_hostname=host)
            dial(sock, Dialer(self._secret, _PURPOSE, self.incarnation, source.incarnation))
            _tune(sock)
            return _Stream(sock)
        except BaseException:
            sock.close()
            raise

    # --- the sender's side, on the door's threads ------------------------------------------------------------

    def _inside_tls(self, sock: socket.socket) -> socket.socket:
        """The handshake is a part of the proof."""
        return sock if self._tls is None else self._tls.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _prove(self, sock: socket.socket) -> str:
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        return listen(sock, Listener(self._secret, _PURPOSE, self.incarnation))

    def _serve(self, sock: socket.socket, receiver: str) -> None:
        _tune(sock)
        while True:
            magic, pages, batch, name = _ASK.unpack(read_exactly(sock, _ASK.size))
            if magic != _ASK_MAGIC or not 0 < pages <= MAX_PAGES:
                return
            stamps = unpacked_stamps(read_exactly(sock, 16 * pages))
            transfer = name.rstrip(b"\0").decode("ascii", "replace")
            self._offers.serve(sock, transfer, receiver, batch, stamps)


class _Stream:
    """One connection to a source."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._whole = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
        """As few reads as can be."""
        self._batches = count(1)
        self._stage = np.empty((0, 0), dtype=np.uint8)

    def _staging(self, page_bytes: int) -> Memory:
        if self._stage.shape[1] != page_bytes:
            self._stage = np.empty((max(1, STAGE_BYTES // page_bytes), page_bytes), dtype=np.uint8)
        return self._stage

    def fetch(self, transfer: str, moves: Sequence[Move], landing: Landing) -> Iterator[int]:
        batch = next(self._batches)
        name = transfer.encode("ascii")
        stamps = packed_stamps(word for move in moves for word in (move.source_page, move.source_nonce))
        self._sock.sendall(_ASK.pack(_ASK_MAGIC, len(moves), batch, name) + stamps)
        at, claims, stage = 0, Claims(moves), self._staging(landing.page_bytes)
        while at < len(moves):
            group = self._header(batch, len(moves) - at, landing.page_bytes)
            for first in range(at, at + group, len(stage)):
                part = claims.part(first, min(first + len(stage), at + group))
                fill(self._sock, stage[: len(part)].reshape(-1).data, self._whole)
                fault = landing.place(stage, part)
                if fault is not None:
                    raise FetchFailed("a page is not what was announced", fault)
            at += group
            yield group

    def _header(self, batch: int, most: int, page_bytes: int) -> int:
        """How many pages follow. Nothing has been written yet when this fails."""
        magic, status, pages, number, size = _GIVE.unpack(read_exactly(self._sock, _GIVE.size))
        if magic != _GIVE_MAGIC or number != batch:
            raise FetchFailed("the sender's answer is not one to this request")
        if status != _OK:
            raise FetchFailed("the sender does not offer these pages (any more)")
        if not 0 < pages <= most or size != pages * page_bytes:
            raise FetchFailed(f"the sender announces {pages} pages in {size} bytes; at most {most} of {page_bytes} were asked for")
        return int(pages)

    def interrupt(self) -> None:
        shut(self._sock)

    def close(self) -> None:
        self._sock.close()


@dataclass(slots=True)
class _Offer:
    receiver: str
    nonces: dict[int, int]
    """By page."""


class _Offers:
    """What may be fetched from us, and who is being served."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._changed = threading.Condition()
        self._offers: dict[str, _Offer] = {}
        self._serving: dict[socket.socket, str] = {}

    def add(self, transfer: str, receiver: str, stamps: Sequence[int]) -> None:
        with self._changed:
            offer = self._offers.setdefault(transfer, _Offer(receiver, {}))
            offer.nonces.update(zip(stamps[::2], stamps[1::2], strict=True))

    def withdraw(self, transfer: str) -> bool:
        with self._changed:
            self._offers.pop(transfer, None)
            busy = [sock for sock, name in self._serving.items() if name == transfer]
            for sock in busy:
                shut(sock)
            return not busy or self._changed.wait_for(lambda: transfer not in self._serving.values(), FENCE_S)

    def serve(self, sock: socket.socket, transfer: str, receiver: str, batch: int, stamps: array[int]) -> None:
        """Sends the pages, or one header that refuses all of them. Raises `OSError` when the connection fails."""
        with self._changed:
            allowed = self._allowed(transfer, receiver, stamps)
            if allowed:
                self._serving[sock] = transfer
        if not allowed:
            sock.sendall(_GIVE.pack(_GIVE_MAGIC, _REFUSED, 0, batch, 0))
            return
        try:
            page_bytes = int(self._memory.shape[1])
            step = min(GROUP_PAGES, max(1, GROUP_BYTES // page_bytes))
            for first in range(0, len(stamps) // 2, step):
                pages = stamps[2 * first : 2 * (first + step) : 2]
                header = _GIVE.pack(_GIVE_MAGIC, _OK, len(pages), batch, len(pages) * page_bytes)
                _send_all(sock, [memoryview(header), *(self._memory[page].data for page in pages)])
        finally:
            with self._changed:
                del self._serving[sock]
                self._changed.notify_all()

    def _allowed(self, transfer: str, receiver: str, stamps: array[int]) -> bool:
        """Offered to this receiver, and still what was offered (L3)."""
        offer = self._offers.get(transfer)
        if offer is None or offer.receiver != receiver:
            return False
        pages, nonces = stamps[::2].tolist(), stamps[1::2].tolist()
        return list(map(offer.nonces.get, pages)) == nonces == seal_nonces(self._memory, pages)


def _tune(sock: socket.socket) -> None:
    """From here on the fence, not a timeout, ends what waits."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)  # a host that is gone does not hold a thread for hours
    # Buffer sizes are left to the system: setting one switches its own tuning off, and usually sets less.


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    if isinstance(sock, ssl.SSLSocket):
        for view in views:
            sock.sendall(view)
        return
    while views:
        views = _rest(views, sock.sendmsg(views))


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of these buffers after `done` bytes."""
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]]
        done -= len(view)
    return []
