"""Two processes prove to each other that they hold the same secret, and who they are.

Owns the handshake that opens every data connection: challenge and response with both sides' random numbers, roles and names under
HMAC-SHA256, so that an answer cannot be replayed, reflected or used by another incarnation. Before the other side has proven itself it gets
random numbers and names, nothing else. It does not encrypt: whoever can alter packets on the way is kept out by TLS or a private network.

::

    dialer    -> listener   greeting: version, purpose, random, dialer's name, the name that it wants to reach
    listener  -> dialer     random, listener's name, HMAC(secret, "listener" | everything said so far)
    dialer    -> listener   HMAC(secret, "dialer" | everything said so far)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from dataclasses import dataclass

from kvseal.core.errors import ConfigError, KVSealError

MIN_SECRET_BYTES = 16
RANDOM_BYTES = 32
MAC_BYTES = 32
NAME_BYTES = 64
_MAGIC = b"KVSEAL-AUTH\x01"
_PURPOSE_BYTES = 16
_GREETING_BYTES = len(_MAGIC) + _PURPOSE_BYTES + RANDOM_BYTES + 2 * NAME_BYTES
_ANSWER_BYTES = RANDOM_BYTES + NAME_BYTES + MAC_BYTES


class NotTrusted(KVSealError):
    """The other side did not prove itself, or is not the one that was wanted. Says which, never the secret."""


def checked_secret(secret: bytes) -> bytes:
    """Raises `ConfigError` for one that is too short to mean anything."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"the secret that nodes share has {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES}")
    return secret


@dataclass(slots=True)
class Dialer:
    """The side that connects. Send `greeting`, feed `answer_bytes` to `proof`, send what it returns."""

    secret: bytes
    purpose: str
    name: str
    wanted: str
    answer_bytes: int = _ANSWER_BYTES
    _said: bytes = b""

    def greeting(self) -> bytes:
        self._said = _MAGIC + _padded(self.purpose, _PURPOSE_BYTES) + secrets.token_bytes(RANDOM_BYTES) + _names(self.name, self.wanted)
        return self._said

    def proof(self, answer: bytes) -> bytes:
        """Raises `NotTrusted`."""
        if len(answer) != _ANSWER_BYTES or not self._said:
            raise NotTrusted("the listener's answer has the wrong size")
        said, mac = self._said + answer[:-MAC_BYTES], answer[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self.secret, b"listener", said)):
            raise NotTrusted("the listener does not hold the same secret")
        if answer[RANDOM_BYTES:-MAC_BYTES] != _padded(self.wanted, NAME_BYTES):
            raise NotTrusted("another process listens there now (its incarnation differs)")
        return _mac(self.secret, b"dialer", said + mac)


@dataclass(slots=True)
class Listener:
    """The side that is connected to. Feed `greeting_bytes` to `answer`, send what it returns, feed `MAC_BYTES` to `accept`."""

    secret: bytes
    purpose: str
    name: str
    greeting_bytes: int = _GREETING_BYTES
    _said: bytes = b""
    _mac: bytes = b""
    _dialer: str = ""

    def answer(self, greeting: bytes) -> bytes:
        """Raises `NotTrusted` for what is no greeting of this version and purpose, or is meant for another incarnation. Even so nothing but
        the secret proves the dialer: wait for `accept`."""
        if len(greeting) != _GREETING_BYTES or not greeting.startswith(_MAGIC + _padded(self.purpose, _PURPOSE_BYTES)):
            raise NotTrusted("not a greeting of this version and purpose")
        dialer, wanted = greeting[-2 * NAME_BYTES : -NAME_BYTES], greeting[-NAME_BYTES:]
        if wanted != _padded(self.name, NAME_BYTES):
            raise NotTrusted("the dialer wants another process (its incarnation differs)")
        said = greeting + secrets.token_bytes(RANDOM_BYTES) + _padded(self.name, NAME_BYTES)
        self._mac = _mac(self.secret, b"listener", said)
        self._said = said + self._mac
        self._dialer = dialer.rstrip(b"\0").decode("ascii", "replace")
        return said[_GREETING_BYTES:] + self._mac

    def accept(self, proof: bytes) -> str:
        """The dialer's name. Raises `NotTrusted`."""
        if not self._said or not hmac.compare_digest(proof, _mac(self.secret, b"dialer", self._said)):
            raise NotTrusted("the dialer does not hold the same secret")
        return self._dialer


def dial(sock: socket.socket, dialer: Dialer) -> None:
    """Over a blocking socket with a timeout. Raises `NotTrusted`, or `OSError` when the connection fails."""
    sock.sendall(dialer.greeting())
    sock.sendall(dialer.proof(read_exactly(sock, dialer.answer_bytes)))


def listen(sock: socket.socket, listener: Listener) -> str:
    """The other side of `dial`; returns the dialer's name."""
    sock.sendall(listener.answer(read_exactly(sock, listener.greeting_bytes)))
    return listener.accept(read_exactly(sock, MAC_BYTES))


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """Raises `ConnectionError` when the peer closes before that."""
    found = bytearray(size)
    fill(sock, memoryview(found))
    return bytes(found)


def fill(sock: socket.socket, view: memoryview, flags: int = 0) -> None:
    """Reads straight into memory; `flags` are those of `recv_into`, of which a TLS socket takes none. Raises `ConnectionError` when the
    peer closes before it is full."""
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:], 0, flags)
        if not got:
            raise ConnectionError(f"the peer closed the connection {len(view) - at} bytes too early")
        at += got


def _mac(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.new(secret, role + b"|" + said, hashlib.sha256).digest()


def _names(*names: str) -> bytes:
    return b"".join(_padded(name, NAME_BYTES) for name in names)


def _padded(text: str, size: int) -> bytes:
    data = text.encode("ascii")
    if len(data) > size:
        raise NotTrusted(f"a name of {len(data)} bytes is longer than {size}")
    return data.ljust(size, b"\0")
