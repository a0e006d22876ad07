"""What the HTTP process and the engine process say to each other: msgpack frames of typed structs, never pickle.

Owns the message types, the frame format and the translation of outcomes and errors into data and back. Never does I/O. A frame is a
little-endian 32-bit length and that many bytes of msgpack; a length above `MAX_FRAME_BYTES`, an unknown message or a wrong field type is
`ProtocolBroken`, after which neither side goes on talking. Law L11: an outcome keeps its type across the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from kvseal.core.config import EngineConfig
from kvseal.core.errors import (
    BodyTooLarge,
    BrokenSeal,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    EngineDied,
    Forbidden,
    InvalidRequest,
    KVSealError,
    KVTransferFailed,
    MethodNotAllowed,
    ModelCorrupt,
    ModelError,
    ModelNotFound,
    ModelNotServed,
    ModelUnsupported,
    NotFound,
    Overloaded,
    PoolTooSmall,
    PortInUse,
    RateLimited,
    RequestError,
    SamplingFailed,
    SetupError,
    Unauthenticated,
    Unavailable,
)
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.laws import Law
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused, Usage
from kvseal.core.request import Request
from kvseal.node.peer_messages import FromNode, NodeCard, ToNode
from kvseal.node.report import EngineStats, StartReport

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 * 2**20
"""Above the largest honest frame: prompt logprobs with 20 alternatives for 128 k tokens take about 40 MB."""

_LENGTH = struct.Struct("<I")


class ProtocolBroken(KVSealError):
    """The other process sent something that is no frame of this protocol version."""


# --- HTTP process to engine ----------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """First frame. Built from nothing but this: the engine reads no option from anywhere else."""

    version: int
    config: EngineConfig


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    request: Request


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    request_id: RequestId


class Finish(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """It is complete by what it has said: a stop string was found in its text."""

    request_id: RequestId


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Answered by `Pong` between two steps."""


class AskStats(msgspec.Struct, tag="stats?", array_like=True, frozen=True):
    ask: int


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """Finish what is open, refuse what is new, then exit with status 0."""


ToEngine = Hello | Submit | Cancel | Finish | Ping | AskStats | Drain | ToNode

# --- engine to HTTP process ----------------------------------------------------------------------------------


class WireError(msgspec.Struct, array_like=True, frozen=True):
    """An error of `core.errors`: class name, text, and the fields that its constructor takes."""

    name: str
    message: str
    fields: dict[str, Any] = {}


class WireOutcome(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    usage: Usage | None = None
    reason: str | None = None
    stop_token: int | None = None
    error: WireError | None = None


class Ended(msgspec.Struct, array_like=True, frozen=True):
    request_id: RequestId
    outcome: WireOutcome


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    version: int
    report: StartReport
    card: NodeCard | None = None
    """None: an engine by itself."""


class SetupFailed(msgspec.Struct, tag="setup-failed", array_like=True, frozen=True):
    error: WireError


class Events(msgspec.Struct, tag="events", array_like=True, frozen=True):
    """All events of one step (or none: the step is its own proof of progress). The tokens of a request come before its end."""

    steps: int
    tokens: tuple[TokensEvent, ...]
    """As they are: nothing is converted for a token on its way."""
    ended: tuple[Ended, ...] = ()


class Pong(msgspec.Struct, tag="pong", array_like=True, frozen=True):
    steps: int
    has_work: bool


class Stats(msgspec.Struct, tag="stats", array_like=True, frozen=True):
    ask: int
    stats: EngineStats


FromEngine = Ready | SetupFailed | Events | Pong | Stats | FromNode

# --- frames --------------------------------------------------------------------------------------------------


def frame(message: ToEngine | FromEngine) -> bytes:
    """One message with its length in front. Raises `ProtocolBroken` if it is larger than the other side would take."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolBroken(f"a message of {len(body)} bytes is larger than a frame may be ({MAX_FRAME_BYTES})")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into message bodies. `feed` what arrived, then iterate."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields every complete body. Raises `ProtocolBroken` on a length out of bounds, before anything of that size is kept."""
        if not self._buffer and len(data) >= _LENGTH.size and len(data) == _LENGTH.size + _LENGTH.unpack_from(data)[0] <= MAX_FRAME_BYTES:
            yield data[_LENGTH.size :]  # One message, whole: what nearly every read brings.
            return
        self._buffer += data
        offset = 0
        try:
            while len(self._buffer) - offset >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._buffer, offset)
                if size > MAX_FRAME_BYTES:
                    raise ProtocolBroken(f"a frame announces {size} bytes; at most {MAX_FRAME_BYTES} are taken")
                end = offset + _LENGTH.size + size
                if len(self._buffer) < end:
                    break
                yield bytes(self._buffer[offset + _LENGTH.size : end])
                offset = end
        finally:
            del self._buffer[:offset]


def decode_to_engine(body: bytes) -> ToEngine:
    try:
        return msgspec.msgpack.decode(body, type=ToEngine, dec_hook=_decode_path)
    except msgspec.MsgspecError as error:
        raise ProtocolBroken(f"the engine received a frame that is no message ({type(error).__name__})") from None


def decode_from_engine(body: bytes) -> FromEngine:
    try:
        return _FROM_ENGINE.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolBroken(f"the engine sent a frame that is no message ({type(error).__name__})") from None


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no wire form for {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no wire form for {kind.__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_path)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

# --- events, outcomes, errors --------------------------------------------------------------------------------


def pack_events(steps: int, events: Sequence[Event]) -> Events:
    ended = [event for event in events if type(event) is EndedEvent]
    if not ended:
        return Events(steps, cast(tuple[TokensEvent, ...], tuple(events)))
    tokens = tuple(event for event in events if type(event) is TokensEvent)
    return Events(steps, tokens, tuple(Ended(event.request_id, pack_outcome(event.outcome)) for event in ended))


def unpack_ended(wire: Ended) -> EndedEvent:
    return EndedEvent(wire.request_id, unpack_outcome(wire.outcome))


def pack_outcome(outcome: Outcome) -> WireOutcome:
    match outcome:
        case Completed(reason, usage, stop_token):
            return WireOutcome("completed", usage, reason.value, stop_token)
        case Cancelled(usage):
            return WireOutcome("cancelled", usage)
        case Refused(error):
            return WireOutcome("refused", error=pack_error(error))
        case Failed(error):
            return WireOutcome("failed", error=pack_error(error))


def unpack_outcome(wire: WireOutcome) -> Outcome:
    if wire.kind == "completed" and wire.usage is not None and wire.reason is not None:
        return Completed(FinishReason(wire.reason), wire.usage, wire.stop_token)
    if wire.kind == "cancelled" and wire.usage is not None:
        return Cancelled(wire.usage)
    if wire.error is not None:
        error = unpack_error(wire.error)
        if wire.kind == "refused" and isinstance(error, RequestError | Unavailable):
            return Refused(error)
        if wire.kind == "failed" and isinstance(error, BrokenSeal | Unavailable):
            return Failed(error)
    raise ProtocolBroken(f"no outcome {wire.kind!r} with these fields")


def pack_error(error: KVSealError) -> WireError:
    name = type(error).__name__
    match error:
        case RateLimited():
            return WireError(name, error.message, {"retry_after_s": error.retry_after_s})
        case RequestError():
            return WireError(name, error.message, {"param": error.param, "details": error.details})
        case Overloaded():
            return WireError(name, error.message, {"retry_after_s": error.retry_after_s})
        case BrokenSeal():
            place = {"page": error.page, "ordinal": error.ordinal, "layer": error.layer}
            return WireError(name, "", {"law": error.law.value, "check": error.check, **place})
        case _:
            return WireError(name, str(error))


def unpack_error(wire: WireError) -> KVSealError:
    """The same class with the same fields, or `ProtocolBroken` when this version has no such error."""
    fields = wire.fields
    try:
        if wire.name in _REQUEST_ERRORS:
            return _REQUEST_ERRORS[wire.name](wire.message, param=fields["param"], details=fields["details"])
        if wire.name in _RETRY_ERRORS:
            return _RETRY_ERRORS[wire.name](wire.message, retry_after_s=fields["retry_after_s"])
        if wire.name in _PLAIN_ERRORS:
            return _PLAIN_ERRORS[wire.name](wire.message)
        if wire.name == "BrokenSeal":
            place = {key: int(fields[key]) for key in ("page", "ordinal", "layer")}
            return BrokenSeal(Law(fields["law"]), check=str(fields["check"]), **place)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolBroken(f"error {wire.name!r} came without its fields") from error
    raise ProtocolBroken(f"no error {wire.name!r} in this version")


_REQUEST_ERRORS: dict[str, type[RequestError]] = {
    cls.__name__: cls
    for cls in (
        RequestError,
        InvalidRequest,
        ContextLengthExceeded,
        Unauthenticated,
        Forbidden,
        NotFound,
        ModelNotServed,
        MethodNotAllowed,
        BodyTooLarge,
    )
}
_RETRY_ERRORS: dict[str, type[RateLimited] | type[Overloaded]] = {cls.__name__: cls for cls in (RateLimited, Overloaded)}
_PLAIN_ERRORS: dict[str, type[Unavailable] | type[SetupError]] = {
    cls.__name__: cls
    for cls in (
        Unavailable,
        Draining,
        EngineDied,
        DeadlineExceeded,
        SamplingFailed,
        KVTransferFailed,
        SetupError,
        ConfigError,
        ModelError,
        ModelNotFound,
        ModelCorrupt,
        ModelUnsupported,
        PoolTooSmall,
        PortInUse,
    )
}
