"""A control link between machines: both ends prove the shared secret, and then every frame is proven too.

Owns the handshake over an asyncio stream (`handoff.auth`, purpose "control") and `Channel`, which puts a keyed digest with a counter in
front of every frame: what was changed, left out, repeated or swapped on the way is no frame of this link. It does not hide what is said:
where the network is not trusted to be private, give TLS certificates as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
import struct

from kvseal.core.config import TLSFiles
from kvseal.core.errors import ConfigError
from kvseal.core.hosts import addresses_of
from kvseal.handoff.auth import MAC_BYTES, Dialer, Listener
from kvseal.node.messages import ProtocolBroken

HANDSHAKE_S = 5.0
WORKER = "worker"
ROUTER = "router"
_PURPOSE = "control"
_DIGEST_BYTES = 16
_LENGTH = struct.Struct("<I")


class Channel:
    """One end of a proven link. `key` belongs to this connection alone."""

    def __init__(self, key: bytes, *, dialer: bool) -> None:
        self._out, self._in = (_direction(key, ours) for ours in (dialer, not dialer))
        self._sent = 0
        self._taken = 0

    def closed(self, frame: bytes) -> bytes:
        """A frame of `messages` for the other end."""
        body = frame[_LENGTH.size :]
        digest = self._digest(self._out, self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body) + _DIGEST_BYTES) + digest + body

    def opened(self, body: bytes) -> bytes:
        """The message in what came. Raises `ProtocolBroken` unless the other end sent exactly this, and now."""
        digest, message = body[:_DIGEST_BYTES], body[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(self._in, self._taken, message)):
            raise ProtocolBroken("a frame of the control link was changed, repeated or left out on the way")
        self._taken += 1
        return message

    @staticmethod
    def _digest(key: bytes, number: int, body: bytes) -> bytes:
        return hashlib.blake2b(number.to_bytes(8, "little") + body, key=key, digest_size=_DIGEST_BYTES).digest()


def _direction(key: bytes, dialer: bool) -> bytes:
    return hashlib.blake2b(b"dialer" if dialer else b"listener", key=key, digest_size=32).digest()


async def prove_to_worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Channel:
    """The router's side. Raises `NotTrusted`, or an `OSError`, `EOFError` or `TimeoutError` of the connection."""
    dialer = Dialer(secret, _PURPOSE, ROUTER, WORKER)
    writer.write(dialer.greeting())
    async with asyncio.timeout(HANDSHAKE_S):
        answer = await reader.readexactly(dialer.answer_bytes)
    proof = dialer.proof(answer)
    writer.write(proof)
    return Channel(_session_key(secret, answer, proof), dialer=True)


async def prove_to_router(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Channel:
    """The worker's side. Raises the same."""
    listener = Listener(secret, _PURPOSE, WORKER)
    async with asyncio.timeout(HANDSHAKE_S):
        answer = listener.answer(await reader.readexactly(listener.greeting_bytes))
    writer.write(answer)
    async with asyncio.timeout(HANDSHAKE_S):
        proof = await reader.readexactly(MAC_BYTES)
    listener.accept(proof)
    return Channel(_session_key(secret, answer, proof), dialer=False)


def _session_key(secret: bytes, answer: bytes, proof: bytes) -> bytes:
    """Of this connection: both random numbers went into what was said."""
    return hashlib.blake2b(answer + proof, key=hashlib.sha256(secret).digest(), digest_size=32, person=b"kvseal-channel").digest()


def server_context(files: TLSFiles) -> ssl.SSLContext:
    return _context(files, ssl.PROTOCOL_TLS_SERVER)


def client_context(files: TLSFiles) -> ssl.SSLContext:
    return _context(files, ssl.PROTOCOL_TLS_CLIENT)


def _context(files: TLSFiles, side: ssl._SSLMethod) -> ssl.SSLContext:
    """Both sides demand a certificate. Raises `ConfigError`."""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.certificate, files.key)
        context.load_verify_locations(files.authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the TLS files cannot be used ({error})") from error
    return context


def address_of(text: str, flag: str) -> tuple[str, int]:
    """ "HOST:PORT" -> (HOST, PORT). Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) < 65_536:
        raise ConfigError(f"{flag}: {text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def every_address(host: str) -> bool:
    """Whether this host is all addresses of the machine, however that is written: others cannot reach it by that name."""
    try:
        return any(address.is_unspecified for address in addresses_of(host))
    except OSError:
        return False  # whoever listens there is told so
