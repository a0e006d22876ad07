"""Messages: exactly this version, exactly these fields, within bounds; everything else is refused (L9)."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvseal.handoff import messages as m

KEY = b"k" * 16
NAMES = ("handoff-1", "sender-0001", "receiver-01")
DIGEST = bytes(range(16))


def intent(**changed: object) -> m.Intent:
    fields = {
        "handoff": NAMES[0],
        "sender": NAMES[1],
        "receiver": NAMES[2],
        "role": m.Role.SENDER,
        "number": 0,
        "scope": DIGEST,
        "format": 2**64 - 1,
        "page_tokens": 16,
        "page_bytes": 64,
        "prompt_tokens": 40,
        "pages": 3,
        "valid_tokens": 40,
        "tokens_digest": DIGEST,
        "deadline_s": 5.0,
        "transport": "shm",
        "endpoint": b"there",
    }
    return m.Intent(**{**fields, **changed})  # type: ignore[arg-type]


EVERY: list[m.AnyMessage] = [
    intent(),
    m.Grant(*NAMES, m.Role.RECEIVER, 0, 1, m.packed_stamps([3, 2**64 - 1])),
    m.PagesReady(*NAMES, m.Role.SENDER, 1, 1, m.packed_stamps([7, 8]), DIGEST),
    m.Taken(*NAMES, m.Role.RECEIVER, 1, 2),
    m.Manifest(*NAMES, m.Role.SENDER, 2, 2, 40, DIGEST, DIGEST, m.packed_stamps([7, 8]), 2 * DIGEST, 2**32 - 1, DIGEST),
    m.Receipt(*NAMES, m.Role.RECEIVER, 2, 2, DIGEST),
    m.Alive(*NAMES, m.Role.SENDER, 3),
    m.Abort(*NAMES, m.Role.RECEIVER, 3, m.Reason.SEAL, "ordinal 1"),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: m.AnyMessage) -> None:
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_every_shortening_and_every_extra_field_is_refused(message: m.AnyMessage) -> None:
    body = m.encode(message)
    for cut in range(len(body)):
        with pytest.raises(m.MessageInvalid):
            m.decode(body[:cut])
    fields = msgspec.msgpack.decode(body[4:])
    for wrong in ([*fields, 0], fields[:-1] if not isinstance(message, m.Abort) else fields[:-2]):
        with pytest.raises(m.MessageInvalid):
            m.decode(body[:4] + msgspec.msgpack.encode(wrong))


def test_another_version_is_named() -> None:
    body = bytearray(m.encode(EVERY[0]))
    body[3] = 9
    with pytest.raises(m.MessageInvalid, match="version 9") as refused:
        m.decode(bytes(body))
    assert refused.value.version == 9
    with pytest.raises(m.MessageInvalid) as other:
        m.decode(b"GET / HTTP/1.1")
    assert other.value.version is None


@pytest.mark.parametrize(
    "changed",
    [
        {"handoff": "short"},
        {"handoff": "x" * 65},
        {"sender": "with space"},
        {"receiver": "über-lange"},
        {"number": -1},
        {"scope": b"short"},
        {"page_tokens": 0},
        {"page_tokens": 257},
        {"pages": 0},
        {"pages": m.MAX_PAGES + 1},
        {"valid_tokens": 0},
        {"valid_tokens": 256 * m.MAX_PAGES + 1},
        {"prompt_tokens": 0},
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"endpoint": bytes(m.MAX_ENDPOINT_BYTES + 1)},
        {"transport": "x" * 33},
        {"role": "sideways"},
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(m.MessageInvalid):
        m.decode(m.encode(intent(**changed)))


def test_the_largest_honest_manifest_passes_and_more_does_not() -> None:
    stamps, folds = bytes(16 * m.MAX_PAGES), bytes(16 * m.MAX_PAGES)
    manifest = m.Manifest(*NAMES, m.Role.SENDER, 2, m.MAX_PAGES, 40, DIGEST, DIGEST, stamps, folds, None, DIGEST)
    assert m.decode(m.encode(manifest)) == manifest
    larger = m.Manifest(*NAMES, m.Role.SENDER, 2, m.MAX_PAGES, 40, DIGEST, DIGEST, stamps + bytes(16), folds, None, DIGEST)
    with pytest.raises(m.MessageInvalid):
        m.decode(m.encode(larger))
    with pytest.raises(m.MessageInvalid, match="larger"):
        m.encode(m.Grant(*NAMES, m.Role.RECEIVER, 0, 1, bytes(m.MAX_MESSAGE_BYTES)))
    with pytest.raises(m.MessageInvalid, match="larger"):
        m.decode(bytes(m.MAX_MESSAGE_BYTES + 1))


def test_no_bytes_are_a_message_by_accident() -> None:
    chance = random.Random(1)
    for message in EVERY:
        body = m.encode(message)
        for _ in range(200):
            wrong = bytearray(body)
            wrong[chance.randrange(4, len(body))] ^= 1 << chance.randrange(8)
            try:
                found = m.decode(bytes(wrong))
            except m.MessageInvalid:
                continue
            assert found != message, "a flipped bit is another message or none"


def test_stamps_survive_packing() -> None:
    words = [0, 2**64 - 1, 5, 2**63]
    assert m.unpacked_stamps(m.packed_stamps(words)).tolist() == words


def test_parts_of_stamps_and_folds_are_refused() -> None:
    with pytest.raises(m.MessageInvalid):
        m.unpacked_stamps(bytes(17))
    with pytest.raises(m.MessageInvalid):
        m.split_folds(bytes(17))
    assert m.split_folds(DIGEST + bytes(16)) == [DIGEST, bytes(16)]


def test_the_digests_depend_on_everything_they_cover() -> None:
    grant = EVERY[1]
    assert isinstance(grant, m.Grant)
    assert m.tokens_digest(KEY, [1, 2, 3]) != m.tokens_digest(b"o" * 16, [1, 2, 3])
    assert m.tokens_digest(KEY, [1, 2, 3]) != m.tokens_digest(KEY, [1, 2, 4])
    other = msgspec.structs.replace(grant, present_pages=0)
    assert len({m.grant_digest(KEY, grant), m.grant_digest(KEY, other), m.grant_digest(b"o" * 16, grant)}) == 3
    parts: dict[str, Any] = {"grant": DIGEST, "stamps": bytes(16), "folds": bytes(32), "next_token": 0}
    first = m.whole_digest(KEY, intent(), **parts)
    again = m.whole_digest(KEY, intent(number=5, deadline_s=1.0), **parts)
    assert first == again, "what says nothing about the pages is not part of it"
    changed = [
        {"scope": bytes(16)},
        {"format": 1},
        {"prompt_tokens": 41},
        {"pages": 1},
        {"valid_tokens": 39},
        {"sender": "sender-0002"},
        {"page_tokens": 8},
    ]
    wholes = [m.whole_digest(KEY, intent(**change), **parts) for change in changed]
    wholes += [m.whole_digest(KEY, intent(), **{**parts, name: 5 if name == "next_token" else bytes(48)}) for name in parts]
    wholes.append(m.whole_digest(KEY, intent(), **{**parts, "next_token": None}))
    assert len({first, *wholes}) == len(wholes) + 1
