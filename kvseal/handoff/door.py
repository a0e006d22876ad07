"""A listening socket whose callers are served on threads of their own, and which can be closed with everybody inside.

Owns the accepted connections of a transport. Never speaks: `admit` does, and must authenticate before anything else. At most `MAX_CALLERS`
are inside at a time, and one that has not proven itself within `HANDSHAKE_S` is thrown out.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from kvseal.core.errors import KVSealError

HANDSHAKE_S = 2.0
MAX_CALLERS = 256


class Door:
    """`admit` gets each caller with a timeout of `HANDSHAKE_S` set, after `wrap` (TLS), and owns it until it returns."""

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[socket.socket], None],
        wrap: Callable[[socket.socket], socket.socket] | None = None,
    ) -> None:
        self._admit = admit
        self._wrap = wrap
        self._inside: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = listener
        listener.listen(64)
        threading.Thread(target=self._run, name="kvseal-door", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._inside) >= MAX_CALLERS
                if not full:
                    self._inside.add(sock)
            if full:
                sock.close()
            else:
                threading.Thread(target=self._serve, args=(sock,), name="kvseal-door", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HANDSHAKE_S)
            if self._wrap is not None:
                plain, sock = sock, self._wrap(sock)
                with self._lock:
                    self._inside.discard(plain)
                    self._inside.add(sock)
            self._admit(sock)
        except (KVSealError, OSError):
            pass  # whoever it was, it is gone; what it was fetching fails at its own end
        finally:
            with self._lock:
                self._inside.discard(sock)
            sock.close()

    def close(self) -> None:
        with self._lock:
            inside = list(self._inside)
        for sock in (self._listener, *inside):
            shut(sock)
        self._listener.close()


def shut(sock: socket.socket) -> None:
    """Makes every call that waits on this socket, on any thread, return now."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
