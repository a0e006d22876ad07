"""A listening socket whose callers are served on threads of their own, and which can be closed with everybody inside.

Owns the accepted connections of a transport. Never speaks: `prove` and `serve` do. A caller is a stranger until `prove` has returned. One
that has not proven itself within `HANDSHAKE_S`, however slowly it speaks, is thrown out, and so is the stranger that came first when there
are more than `MAX_STRANGERS`: whoever floods the port pushes out its own callers, not those who know the secret. At most `MAX_CALLERS` are
inside.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvseal.core.errors import KVSealError

HANDSHAKE_S = 2.0
MAX_STRANGERS = 64
MAX_CALLERS = 256
PAUSE_S = 0.05
"""Before the next caller, when the system had nothing left to accept this one with."""
Who = TypeVar("Who")


class Door(Generic[Who]):
    """`wrap` puts TLS around a caller, without a word said; `prove` says who it is, or raises; `serve` owns it then, until it returns."""

    def __init__(
        self,
        listener: socket.socket,
        prove: Callable[[socket.socket], Who],
        serve: Callable[[socket.socket, Who], None],
        wrap: Callable[[socket.socket], socket.socket] | None = None,
    ) -> None:
        self._prove = prove
        self._serve = serve
        self._wrap = wrap
        self._strangers: dict[socket.socket, float] = {}
        """And when each has had its time; the first came first."""
        self._inside: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = listener
        listener.listen(64)
        threading.Thread(target=self._run, name="kvseal-door", daemon=True).start()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._listener.settimeout(HANDSHAKE_S / 4 if self._strangers else None)
                sock, _ = self._listener.accept()
                self._came(sock)
            except TimeoutError:
                pass
            except (OSError, RuntimeError):  # no file, no thread to be had, a caller that left: the next one is another matter
                time.sleep(PAUSE_S)
            self._throw_out()

    def _came(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._strangers[sock] = time.monotonic() + HANDSHAKE_S
        try:
            threading.Thread(target=self._receive, args=(sock,), name="kvseal-door", daemon=True).start()
        except RuntimeError:
            self._gone(sock)
            raise

    def _throw_out(self) -> None:
        """Their threads find it out by themselves."""
        now_s = time.monotonic()
        with self._lock:
            late = [sock for sock, until_s in self._strangers.items() if now_s >= until_s]
            many = list(self._strangers)[: max(0, len(self._strangers) - MAX_STRANGERS)]
            for sock in {*late, *many}:
                del self._strangers[sock]
                shut(sock)

    def _receive(self, plain: socket.socket) -> None:
        sock = plain
        try:
            plain.settimeout(HANDSHAKE_S)
            if self._wrap is not None:
                sock = self._wrap(plain)  # takes the place of the plain one
                self._renamed(plain, sock)
            who = self._prove(sock)
            if self._comes_in(sock):
                self._serve(sock, who)
        except (KVSealError, OSError):
            pass  # whoever it was, it is gone; what it was fetching fails at its own end
        finally:
            self._gone(plain)
            self._gone(sock)

    def _renamed(self, plain: socket.socket, sock: socket.socket) -> None:
        with self._lock:
            until_s = self._strangers.pop(plain, None)
            if until_s is None:
                shut(sock)
            else:
                self._strangers = {sock: until_s, **self._strangers}  # it keeps the time that it had

    def _comes_in(self, sock: socket.socket) -> bool:
        with self._lock:
            known = self._strangers.pop(sock, None) is not None
            if not known or self._closed or len(self._inside) >= MAX_CALLERS:
                return False
            self._inside.add(sock)
            return True

    def _gone(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)
            self._inside.discard(sock)
        sock.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            everybody = [*self._strangers, *self._inside]
        for sock in (self._listener, *everybody):
            shut(sock)
        self._listener.close()


def shut(sock: socket.socket) -> None:
    """Makes every call that waits on this socket, on any thread, return now."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # a TLS socket's own would take the TLS away from under whoever waits
    except OSError:
        return
