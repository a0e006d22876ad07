"""What the two ends of a hand-off say to each other: typed, versioned, bounded.

Owns the message types, their wire form and the keyed digests that tie them together. Never does I/O. Whatever is not exactly a message of
this version (another version, an unknown or missing field, a size out of bounds) is `MessageInvalid`: unknown is failure (L9).

A hand-off, in order; S is the sender (the prefill node), R the receiver::

    S Intent      what I am about to send, exactly: tokens, pages, how much of the last one is written, scope, format
    R Grant       what I lease for it (stamps), and the first pages that I hold already, which are not sent
    S PagesReady  these ordinals are complete; here is where they lie and what their digests are (again and again, chunk by chunk)
    R Taken       so many pages stand verified in my memory (again and again)
    S Manifest    that was all: every ordinal, every digest, token count and token digest, the token that follows, and the grant that I
                  understood
    R Receipt     what I verified in my own memory

`Alive` says that the speaker still works on it; `Abort` ends it from either side, and nothing follows it. Every message bears the
hand-off's id (made by the server), both incarnations (random, one per process start), who speaks, and a number that counts the speaker's
messages of this hand-off from 0, so that a lost, repeated or reordered message is seen as such.

Wire form: ``b"KVH"``, one byte of version, then msgpack of an array. Pages travel as packed little-endian words: stamps as (page, nonce)
pairs of 16 bytes, page digests (the fold over the layers that `Backend.seal_digests` returns) as 16 bytes each.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvseal.core.errors import KVSealError
from kvseal.kv.pool import DIGEST_BYTES
from kvseal.kv.prefix_key import PackedTokens, pack_tokens

PROTOCOL_VERSION = 2
MAX_PAGES = 65_536
"""Of one hand-off: a million tokens of 16-token pages."""
MAX_MESSAGE_BYTES = 4 * 2**20
"""Above the largest honest message, a manifest of `MAX_PAGES`."""
MAX_ENDPOINT_BYTES = 64 * 1024
STAMP_BYTES = 16
_PREFIX = b"KVH" + bytes([PROTOCOL_VERSION])

HandoffId = Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
"""Made by the server that sends, never by a caller."""
Incarnation = Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
"""Random, one per start of a process: a message to or from a process that is no more is never taken for one of its successor's."""
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Stamps = Annotated[bytes, Meta(max_length=STAMP_BYTES * MAX_PAGES)]
Folds = Annotated[bytes, Meta(max_length=DIGEST_BYTES * MAX_PAGES)]
Pages = Annotated[int, Meta(ge=0, le=MAX_PAGES)]
Word = Annotated[int, Meta(ge=0)]
Token = Annotated[int, Meta(ge=0, lt=2**32)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class MessageInvalid(KVSealError):
    """No message of this protocol version. `version` is the sender's when that is what differs, else None."""

    def __init__(self, what: str, *, version: int | None = None) -> None:
        super().__init__(what)
        self.version = version


class Role(StrEnum):
    SENDER = "s"
    RECEIVER = "r"


class Reason(StrEnum):
    """Why a hand-off ended without a receipt. The value goes over the wire and into metrics."""

    UNFINISHED = "unfinished"
    """The initial state of every session: nothing has been proven yet (L9)."""
    NEVER_FITS = "never_fits"
    """The receiver's pool can never hold the request (L1)."""
    NO_ROOM = "no_room"
    """The receiver has no pages for it now, and nobody waits for it there."""
    FORMAT = "format"
    """Weights, KV dtype or layout differ (L10)."""
    SCOPE = "scope"
    TOKENS = "tokens"
    """Token count or digest differ from what the receiver holds for this request."""
    TRANSPORT = "transport"
    """The pages could not be moved: connection lost, refused, out of bounds."""
    SEAL = "seal"
    """A page in the receiver's memory does not bear what was promised (nonce, scope, ordinal, layer, filled, format or digest)."""
    MANIFEST = "manifest"
    """Grant, manifest and memory are not exactly equal."""
    TWIN = "twin"
    """A page that the receiver holds already has another digest than the sender's page of the same tokens (L13)."""
    DEADLINE = "deadline"
    SILENCE = "silence"
    """The peer neither spoke nor moved a page for too long: frozen, or the network is full."""
    PROTOCOL = "protocol"
    """A message that is not allowed in this state, out of order, repeated, or against its own bounds."""
    VERSION = "version"
    CANCELLED = "cancelled"
    """The client left, or this end has no use for it any more."""
    PEER_GONE = "peer_gone"
    """The control connection is lost, or the peer runs as another incarnation now."""
    QUARANTINE_FULL = "quarantine_full"
    SHUTDOWN = "shutdown"


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What every message bears."""

    handoff: HandoffId
    sender: Incarnation
    receiver: Incarnation
    role: Role
    """Who speaks."""
    number: Word
    """Counts the speaker's messages of this hand-off from 0."""


class Intent(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="intent"):
    scope: Digest
    format: Word
    page_tokens: Annotated[int, Meta(ge=1, le=256)]
    page_bytes: Annotated[int, Meta(ge=64)]
    prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_PAGES * 256)]
    """Exact length of the token sequence that `tokens_digest` covers."""
    pages: Annotated[int, Meta(ge=1, le=MAX_PAGES)]
    """Ordinals 0 to pages - 1 are handed over."""
    valid_tokens: Annotated[int, Meta(ge=1, le=MAX_PAGES * 256)]
    """So many of the tokens are in these pages: all but the last page are full, and that one up to here."""
    tokens_digest: Digest
    deadline_s: Seconds
    """From now until the receipt; each end measures with its own monotonic clock."""
    transport: Annotated[str, Meta(max_length=32)]
    endpoint: Annotated[bytes, Meta(max_length=MAX_ENDPOINT_BYTES)]
    """How the sender's pages are reached (`Transport.endpoint`)."""


class Grant(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="grant"):
    present_pages: Pages
    """Ordinals 0 to present_pages - 1 are in the receiver's cache, pinned until the end; they are not sent."""
    stamps: Stamps
    """The receiver's pages for the other ordinals, in order."""


class PagesReady(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="pages"):
    first_ordinal: Pages
    """Ordinals come in order, each once, from `Grant.present_pages` on."""
    stamps: Stamps
    """Where they lie in the sender's arena, and the nonce that their seals bear there."""
    folds: Folds


class Taken(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="taken"):
    ordinals: Pages
    """Ordinals below this one stand verified in the receiver's memory, or were there before."""


class Manifest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="manifest"):
    pages: Pages
    prompt_tokens: Word
    tokens_digest: Digest
    grant: Digest
    """`grant_digest` of the grant that the sender understood."""
    stamps: Stamps
    """Of every ordinal that was sent."""
    folds: Folds
    """Of every ordinal, those that the receiver had already included."""
    next_token: Token | None
    """What the sender has sampled after the last of the tokens, if they are all in these pages: the answer goes on with it."""
    whole: Digest
    """`whole_digest` of all of it."""


class Receipt(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="receipt"):
    pages: Pages
    whole: Digest
    """`whole_digest` of what the receiver found in its own memory."""


class Alive(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="alive"):
    """The speaker still works on it."""


class Abort(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="abort"):
    reason: Reason
    detail: Annotated[str, Meta(max_length=300)] = ""
    """Numbers and ids for the log, never content."""


FromSender = Intent | PagesReady | Manifest | Alive | Abort
FromReceiver = Grant | Taken | Receipt | Alive | Abort
AnyMessage = Intent | Grant | PagesReady | Taken | Manifest | Receipt | Alive | Abort

_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Raises `MessageInvalid` for what the other side would not take: nothing out of bounds leaves."""
    body = _PREFIX + msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageInvalid(f"a message of {len(body)} bytes is larger than {MAX_MESSAGE_BYTES}")
    return body


def decode(body: bytes) -> AnyMessage:
    """Raises `MessageInvalid`."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageInvalid(f"a message of {len(body)} bytes is larger than {MAX_MESSAGE_BYTES}")
    if body[:3] != _PREFIX[:3] or len(body) < 4:
        raise MessageInvalid("not a message of this protocol")
    if body[3] != PROTOCOL_VERSION:
        raise MessageInvalid(f"the peer speaks version {body[3]} of the hand-off protocol, this is {PROTOCOL_VERSION}", version=body[3])
    try:
        return _DECODER.decode(memoryview(body)[4:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageInvalid(f"not a message of this protocol version ({type(error).__name__})") from None


def packed_stamps(stamps: Iterable[int]) -> bytes:
    """page, nonce, page, nonce, ... -> little-endian words, as every machine has them that the seals work on."""
    return array("Q", stamps).tobytes()


def unpacked_stamps(packed: bytes) -> array[int]:
    """The inverse of `packed_stamps`. Raises `MessageInvalid` unless these are whole pairs."""
    if len(packed) % STAMP_BYTES:
        raise MessageInvalid(f"{len(packed)} bytes are no whole stamps")
    return array("Q", packed)


def split_folds(packed: bytes) -> list[bytes]:
    """16 bytes each. Raises `MessageInvalid` unless these are whole digests."""
    if len(packed) % DIGEST_BYTES:
        raise MessageInvalid(f"{len(packed)} bytes are no whole page digests")
    return [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]


def tokens_digest(key: bytes, tokens: Sequence[int] | PackedTokens) -> bytes:
    """Of a token sequence, 16 bytes. `key` (at least 16 bytes) is shared by the two ends, so that nobody else can test a guess."""
    return _keyed(key, b"kvseal-tokens", (pack_tokens(tokens).data,))


def grant_digest(key: bytes, grant: Grant) -> bytes:
    numbers = grant.present_pages.to_bytes(4, "little")
    return _keyed(key, b"kvseal-grant", (grant.handoff.encode(), grant.sender.encode(), grant.receiver.encode(), numbers, grant.stamps))


def whole_digest(key: bytes, intent: Intent, *, grant: bytes, stamps: bytes, folds: bytes, next_token: int | None) -> bytes:
    """Of everything that must be equal at both ends: intent, grant, where each page came from, what each page holds, what follows."""
    names = (intent.handoff.encode(), intent.sender.encode(), intent.receiver.encode(), intent.scope)
    follows = 0 if next_token is None else next_token + 1
    sizes = (intent.page_tokens, intent.page_bytes, intent.prompt_tokens, intent.pages, intent.valid_tokens, follows)
    numbers = intent.format.to_bytes(8, "little") + b"".join(size.to_bytes(8, "little") for size in sizes)
    return _keyed(key, b"kvseal-whole", (*names, numbers, intent.tokens_digest, grant, stamps, folds))


def _keyed(key: bytes, person: bytes, fields: Iterable[bytes]) -> bytes:
    """Each field is preceded by its length, so that ("a", "bc") and ("ab", "c") differ."""
    digest = hashlib.blake2b(key=hashlib.blake2b(key, digest_size=64).digest(), digest_size=DIGEST_BYTES, person=person)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()
