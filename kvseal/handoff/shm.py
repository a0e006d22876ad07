"""Shared memory on one host: the receiver maps the sender's arena read-only and copies what it wants into its own.

Owns the passing of the arena's file and the copy. The arena is a file without a name (memfd, sealed against change of size); its
descriptor, reopened for reading alone, goes over a Unix socket to a process of the same user that has proven the shared secret. Nobody but
the receiver writes the receiver's arena, so the fence needs nobody else. Laws L3 (copy first, then compare: a page that was reused
meanwhile bears another nonce and is refused, so withdrawing needs no answer), L8, L9.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvseal.core.errors import ConfigError
from kvseal.handoff.auth import Dialer, Listener, NotTrusted, checked_secret, dial, listen
from kvseal.handoff.door import HANDSHAKE_S, Door
from kvseal.handoff.lanes import FetchFailed, Pulling
from kvseal.handoff.proof import Claims, Landing, Memory, Move
from kvseal.handoff.transport import Source

BATCH_BYTES = 2 * 2**20
"""Copied between two looks at the fence."""
_PURPOSE = "arena"
_SHAPE = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("3i")
_F_GET_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1034, 2, 4
"""Of linux/fcntl.h; Python names them only from 3.13 on."""


class SharedMemory(Pulling):
    """`memory` [pages, page_bytes] is the arena behind `file` (`exec.backends.cpu.NativeArena.file`)."""

    name = "shm"
    local_fence = True

    def __init__(self, memory: Memory, file: int, *, incarnation: str, secret: bytes, wake: Callable[[], None] | None = None) -> None:
        if file < 0:
            raise ConfigError("shared memory needs a shared arena; this one is private to the process")
        self.incarnation = incarnation
        self._secret = checked_secret(secret)
        self._shape = memory.shape
        self._file = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        self._address = f"\0kvseal-{secrets.token_hex(16)}"
        super().__init__(self.name, self.map, wake)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address)
        self._door = Door(listener, self._prove, self._serve)

    @property
    def endpoint(self) -> bytes:
        return self._address.encode()

    def send(self, transfer: str, receiver: str, stamps: Sequence[int]) -> None:
        """Nothing to do: whoever holds the descriptor can read."""

    def withdraw(self, transfer: str) -> bool:
        """True: a page that is read too late bears another nonce, and its reader refuses it."""
        return True

    def close(self) -> None:
        self._lanes.stop()
        self._door.close()
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    # --- the sender's side, on the door's threads ------------------------------------------------------------

    def _prove(self, sock: socket.socket) -> str:
        _pid, user, _group = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.getuid():
            raise NotTrusted("the dialer runs as another user")
        return listen(sock, Listener(self._secret, _PURPOSE, self.incarnation))

    def _serve(self, sock: socket.socket, _receiver: str) -> None:
        socket.send_fds(sock, [_SHAPE.pack(*self._shape)], [self._file])
        sock.settimeout(None)
        sock.recv(1)  # returns when the other side closes: until then this side's end tells it that we live

    # --- the receiver's side, on a lane's thread -------------------------------------------------------------

    def map(self, source: Source) -> MappedArena:
        """The arena of that process, once both have proven themselves. Raises `FetchFailed`, `NotTrusted` or `OSError`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(HANDSHAKE_S)
            sock.connect(source.endpoint.decode("utf-8", "replace"))
            dial(sock, Dialer(self._secret, _PURPOSE, self.incarnation, source.incarnation))
            shape, files, _flags, _address = socket.recv_fds(sock, _SHAPE.size, 1)
            arena = _mapped(shape, files)
            sock.setblocking(False)
            return MappedArena(sock, arena)
        except BaseException:
            sock.close()
            raise


def _mapped(shape: bytes, files: Sequence[int]) -> Memory:
    """The sender's arena, read-only. Raises `FetchFailed` for anything that could be changed in size under us."""
    try:
        if len(shape) != _SHAPE.size or len(files) != 1:
            raise FetchFailed("the sender did not pass its arena")
        pages, page_bytes = _SHAPE.unpack(shape)
        sealed = fcntl.fcntl(files[0], _F_GET_SEALS)
        if os.fstat(files[0]).st_size != pages * page_bytes or not sealed & _F_SEAL_SHRINK or not sealed & _F_SEAL_GROW:
            raise FetchFailed("the sender's arena is not of the size that it says, or its size could change")
        mapping = mmap.mmap(files[0], pages * page_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        for file in files:
            os.close(file)
    return np.frombuffer(mapping, dtype=np.uint8).reshape(pages, page_bytes)


class MappedArena:
    """A sender's arena as it is mapped here. The socket tells whether the sender lives."""

    def __init__(self, sock: socket.socket, arena: Memory) -> None:
        self._sock = sock
        self.memory = arena

    def fetch(self, transfer: str, moves: Sequence[Move], landing: Landing) -> Iterator[int]:
        pages, page_bytes = self.memory.shape
        if page_bytes != landing.page_bytes or any(move.source_page >= pages for move in moves):
            raise FetchFailed(f"a page is outside the sender's arena of {pages} pages, or of another size")
        step, claims = max(1, BATCH_BYTES // page_bytes), Claims(moves)
        for first in range(0, len(moves), step):
            if not self._sender_lives():
                raise FetchFailed("the sender's process has ended")
            batch = claims.part(first, first + step)
            fault = landing.copy(self.memory, batch)
            if fault is not None:
                raise FetchFailed("a page is not what was announced", fault)
            yield len(batch)

    def _sender_lives(self) -> bool:
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True

    def interrupt(self) -> None:
        """A copy ends by itself."""

    def close(self) -> None:
        self._sock.close()
