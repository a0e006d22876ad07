"""The last page of a sequence, not full: it travels like the others, proven like the others, and its receiver goes on with it (L5, L9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvseal.core.laws import Law
from kvseal.exec.backends.cpu import NativeArena, new_arena
from kvseal.exec.backends.reference_arena import ReferenceArena
from kvseal.exec.backends.reference_digest import page_fold, section_digests
from kvseal.handoff import messages as m
from kvseal.handoff.node import Tail
from kvseal.handoff.proof import Claims, Landing, Move, PageFault, close_tail
from kvseal.handoff.session import Delivered, Failure, Patience
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE, SealCheck
from kvseal.lab.handoff_rig import GEOMETRY, SCOPE, HandOff, Node, Rig
from kvseal.lab.local_transport import LocalTransport, LocalWorld
from kvseal.lab.pages import closed, compute, payload, read_payload, write_digested

TOKENS = list(range(100, 123))
"""Five full pages of four tokens, and a sixth with three."""
FILLED = 3
PATIENCE = Patience(silence_s=2.0, fence_s=1.0)
Memory = npt.NDArray[np.uint8]


def seals_of(memory: Memory, geometry: KVGeometry, page: int) -> np.ndarray:
    """[layers], a view."""
    sections = memory[page].reshape(geometry.layers, geometry.section_bytes)
    return np.concatenate([sections[layer, :SEAL_BYTES].view(SEAL_DTYPE) for layer in range(geometry.layers)])


# --- closing ---


@pytest.mark.parametrize("arena_of", [new_arena, ReferenceArena])
@pytest.mark.parametrize("kv_dtype", list(KVDtype), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("page_tokens", "filled"), [(4, 1), (4, 3), (5, 2), (16, 15)])
def test_what_is_closed_has_zeros_behind_and_a_digest_of_all_of_it(
    kv_dtype: KVDtype, page_tokens: int, filled: int, arena_of: Callable[[KVGeometry, int], NativeArena | ReferenceArena]
) -> None:
    """In the arenas of both backends: what is checked here is native in either."""
    geometry = KVGeometry(layers=3, kv_heads=3, head_dim=8, kv_dtype=kv_dtype, page_tokens=page_tokens)
    arena = arena_of(geometry, 3)
    arena.memory[:] = 0xA5
    content = payload(geometry, b"content")
    write_digested(arena.memory, geometry, 1, np.zeros((1, 3, 2), np.uint64), 7, SCOPE, 9, content, filled)
    fold = close_tail(arena.memory, geometry, SCOPE, 1, 7, 9, filled)
    expected = closed(geometry, content, filled)
    digests = section_digests(np.ascontiguousarray(expected).view("<u8"), geometry.format).reshape(1, 3, 2)
    assert fold == page_fold(digests).astype("<u8").tobytes()
    assert np.array_equal(read_payload(arena.memory, geometry, 1), expected)
    seals = seals_of(arena.memory, geometry, 1)
    assert np.array_equal(seals["digest"], digests[0]) and (seals["filled"] == filled).all()
    assert (arena.memory[[0, 2]] == 0xA5).all(), "nothing else is touched"


@pytest.mark.parametrize(
    ("field", "value", "check"),
    [
        ("magic", 1, SealCheck.MAGIC),
        ("nonce", 8, SealCheck.NONCE),
        ("scope", (1, 1), SealCheck.SCOPE),
        ("format", 1, SealCheck.FORMAT),
        ("layer", 9, SealCheck.LAYER),
        ("ordinal", 8, SealCheck.ORDINAL),
        ("filled", 2, SealCheck.FILLED),
        ("filled", 4, SealCheck.FILLED),
        ("digest", (0, 1), SealCheck.REUSED),
    ],
)
def test_a_page_that_is_not_what_its_holder_thinks_is_left_alone(field: str, value: object, check: SealCheck) -> None:
    arena = new_arena(GEOMETRY, 2)
    write_digested(arena.memory, GEOMETRY, 1, np.zeros((1, 2, 2), np.uint64), 7, SCOPE, 9, payload(GEOMETRY, b"content"), FILLED)
    arena.memory[1, GEOMETRY.section_bytes :][:SEAL_BYTES].view(SEAL_DTYPE)[field] = value
    before = arena.memory.copy()
    fault = close_tail(arena.memory, GEOMETRY, SCOPE, 1, 7, 9, FILLED)
    assert fault == PageFault(9, 1, check) and fault.check.law in Law
    assert np.array_equal(arena.memory, before)


@pytest.mark.parametrize(("page", "filled"), [(0, 0), (0, 4), (0, 5), (-1, 3), (2, 3)])
def test_only_a_page_of_the_arena_that_is_not_full_can_be_closed(page: int, filled: int) -> None:
    with pytest.raises(ValueError, match=r"outside its arena|some of its slots"):
        close_tail(new_arena(GEOMETRY, 2).memory, GEOMETRY, SCOPE, page, 7, 9, filled)


# --- travelling ---


@pytest.fixture
def pair() -> Iterator[Rig]:
    make = LocalTransport.maker(LocalWorld())
    made = Rig(Node("prefill", make, patience=PATIENCE), Node("decode", make, patience=PATIENCE))
    yield made
    made.close()


def tail_page(one: HandOff) -> int:
    return int(one.grant.table.stamps[10])


def finish(pair: Rig, start_s: float = 0.0) -> Delivered | Failure:
    for turn in range(80):
        pair.pump(start_s + 0.05 * turn)
        if pair.idle:
            break
    return pair.ends["receiver"]["handoff-1"].outcome


def refused(pair: Rig, one: HandOff, reason: m.Reason, check: str = "") -> None:
    found = finish(pair)
    assert isinstance(found, Failure) and found.reason is reason and check in found.detail, found
    assert pair.ends["receiver"]["handoff-1"].grant is None
    assert pair.receiver.kv.probe(SCOPE, TOKENS) == 0, "nothing of it is visible"
    pair.sender.kv.drop(one.grant)
    for node in (pair.sender, pair.receiver):
        node.check()
        usage = node.kv.usage()
        assert usage.leased == usage.draining == usage.quarantined == 0


def test_its_receiver_goes_on_with_it(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    assert isinstance(finish(pair), Delivered)
    grant = pair.ends["receiver"]["handoff-1"].grant
    assert grant is not None and pair.receiver.holds(grant, TOKENS)
    page, nonce = grant.lease.stamps
    seals = seals_of(pair.receiver.memory, GEOMETRY, page)
    assert (seals["nonce"] == nonce).all() and (seals["filled"] == FILLED).all() and (seals["ordinal"] == 5).all()
    assert (seals["digest"] == 0).all(), "with a digest no kernel would write to it"
    pair.receiver.check()
    pair.receiver.kv.drop(grant)
    assert pair.receiver.kv.usage().free == 64 - 5, "it was never shared (L7)"


def test_it_stays_until_the_receipt_though_its_holder_has_gone(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    pair.sender.kv.drop(one.grant)
    assert pair.sender.kv.usage().draining == 1
    pair.sender.check()
    assert isinstance(finish(pair), Delivered)
    assert pair.sender.kv.usage().draining == 0 and pair.sender.kv.usage().free == 64 - 5


def set_seal(field: str, value: object) -> Callable[[Memory, int], None]:
    def spoil(memory: Memory, page: int) -> None:
        memory[page, :SEAL_BYTES].view(SEAL_DTYPE)[field] = value

    return spoil


def flip(at: int) -> Callable[[Memory, int], None]:
    def spoil(memory: Memory, page: int) -> None:
        memory[page, at] ^= 1

    return spoil


LAST_SLOT = SEAL_BYTES + FILLED * 8 * 2
"""The first byte of a slot that is not written: eight elements of two bytes each."""
SPOILT = [
    (set_seal("nonce", 5), "nonce"),
    (set_seal("scope", (1, 1)), "scope"),
    (set_seal("format", 5), "format"),
    (set_seal("ordinal", 4), "ordinal"),
    (set_seal("layer", 1), "layer"),
    (set_seal("filled", FILLED - 1), "filled"),
    (set_seal("filled", FILLED + 1), "filled"),
    (set_seal("filled", 0), "filled"),
    (set_seal("digest", (0, 0)), "digest"),
    (flip(SEAL_BYTES), "digest"),
    (flip(LAST_SLOT - 1), "digest"),
    (flip(LAST_SLOT), "digest"),
]
NAMES = [f"{check}-{number}" for number, (_, check) in enumerate(SPOILT)]


@pytest.mark.parametrize(("spoil", "check"), SPOILT, ids=NAMES)
def test_changed_at_the_sender_it_is_refused(pair: Rig, spoil: Callable[[Memory, int], None], check: str) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    spoil(pair.sender.memory, tail_page(one))
    refused(pair, one, m.Reason.SEAL, check)


@pytest.mark.parametrize(("spoil", "check"), SPOILT, ids=NAMES)
def test_changed_after_it_has_landed_it_is_refused(pair: Rig, spoil: Callable[[Memory, int], None], check: str) -> None:
    """A late write, or a bit that flips: what counts is what stands there after the fence."""
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    transport = pair.receiver.transport
    fence = transport.fence

    def late(transfer: str) -> bool:
        quiet = fence(transfer)
        session = pair.receiver.receiving._in[transfer].session
        if len(session.moves) == 6:
            spoil(pair.receiver.memory, session.moves[5].page)
        return quiet

    transport.fence = late  # type: ignore[method-assign]
    refused(pair, one, m.Reason.SEAL, check)


def altered(pair: Rig, kind: type[m.Message], change: Callable[[m.AnyMessage], list[m.AnyMessage]]) -> None:
    def forth(body: bytes) -> list[bytes]:
        message = m.decode(body)
        return [m.encode(one) for one in change(message)] if isinstance(message, kind) else [body]

    pair.forth = forth


def replaced(**fields: object) -> Callable[[m.AnyMessage], list[m.AnyMessage]]:
    return lambda message: [msgspec.structs.replace(message, **fields)]


@pytest.mark.parametrize("valid_tokens", [21, 22])
def test_agreed_as_emptier_than_it_is_it_is_refused(pair: Rig, valid_tokens: int) -> None:
    """The two ends agree on a number of tokens, and the page has another."""
    where = {"scope": SCOPE, "tokens": TOKENS, "valid_tokens": valid_tokens, "deadline_s": 30.0, "now_s": 0.0}
    pair.receiver.receiving.expect("handoff-1", sender=pair.sender.incarnation, **where)  # type: ignore[arg-type]
    one = HandOff("handoff-1", TOKENS, 6, pair.sender.admit("prefill", TOKENS))
    pair.sender.sending.begin("handoff-1", receiver=pair.receiver.incarnation, **where)  # type: ignore[arg-type]
    pair.compute(one, 6, 0.0)
    refused(pair, one, m.Reason.SEAL, "filled")


@pytest.mark.parametrize("valid_tokens", [20, 22, 24])
def test_an_intent_of_another_length_is_refused(pair: Rig, valid_tokens: int) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    altered(pair, m.Intent, replaced(valid_tokens=valid_tokens))
    pair.compute(one, 6, 0.0)
    refused(pair, one, m.Reason.TOKENS)


def test_said_twice_it_is_refused(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 5, 0.0)
    pair.pump(0.0)
    altered(pair, m.PagesReady, lambda message: [message, message])
    pair.compute(one, 6, 0.0)
    refused(pair, one, m.Reason.PROTOCOL)


def test_never_said_it_is_missed(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 5, 0.0)
    pair.pump(0.0)
    session = pair.sender.sending._out["handoff-1"].session
    session.pages = 5  # a sender that forgets it declares what it knows
    pair.sender.sending._do("handoff-1", session._announce())
    refused(pair, one, m.Reason.MANIFEST)


def test_a_token_that_the_manifest_says_otherwise_than_its_digest_is_refused(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    one.next_token = 5
    altered(pair, m.Manifest, replaced(next_token=6))
    pair.compute(one, 6, 0.0)
    refused(pair, one, m.Reason.MANIFEST)


def test_for_a_hand_off_that_has_ended_it_is_given_back_at_once(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 5, 0.0)
    pair.sender.sending.cancel("handoff-1", m.Reason.CANCELLED, 0.0)
    pair.compute(one, 6, 0.0)
    pair.sender.kv.drop(one.grant)
    usage = pair.sender.kv.usage()
    assert usage.draining == 0 and usage.free + usage.evictable == 64


def test_a_tail_names_its_page_by_stamp(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    compute(pair.sender.kv, pair.sender.memory, one.grant, TOKENS, 23)
    stamp = one.grant.table.stamps[10:12]
    tail = pair.sender.sending.close_tail(SCOPE, stamp, 5, FILLED)
    assert isinstance(tail, Tail) and tail.ticket.stamps == stamp
    again = pair.sender.sending.close_tail(SCOPE, stamp, 5, FILLED)
    assert again == PageFault(5, 0, SealCheck.REUSED)
    tail.ticket.release()


def test_restamped_it_has_no_digest_and_a_full_page_keeps_its() -> None:
    arena = new_arena(GEOMETRY, 2)
    landing, content = Landing(arena.memory, GEOMETRY, SCOPE), payload(GEOMETRY, b"content")
    write_digested(arena.memory, GEOMETRY, 1, np.zeros((1, 2, 2), np.uint64), 7, SCOPE, 9, content, FILLED)
    fold = close_tail(arena.memory, GEOMETRY, SCOPE, 1, 7, 9, FILLED)
    assert isinstance(fold, bytes)
    move = Move(9, 1, 7, 1, fold, FILLED)
    assert landing.check([move]) is None and landing.check([move._replace(filled=4)]) == PageFault(9, 0, SealCheck.FILLED)
    landing.restamp(Claims([move]), [11])
    seals = seals_of(arena.memory, GEOMETRY, 1)
    assert (seals["nonce"] == 11).all() and (seals["digest"] == 0).all() and (seals["filled"] == FILLED).all()
