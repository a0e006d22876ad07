"""Both ends of a node over real caches and real pages: what is held is given back once, and only proven pages are ever seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvseal.core.errors import LawBroken
from kvseal.handoff import messages as m
from kvseal.handoff.receiving import MAX_EARLY_INTENTS, MAX_REMEMBERED
from kvseal.handoff.session import Delivered, Drop, Failure, Patience, Prove, Settle, Unpin
from kvseal.kv.ledger import PageState
from kvseal.lab.handoff_rig import GEOMETRY, SCOPE, Deliver, HandOff, Node, Rig, as_it_is
from kvseal.lab.local_transport import LocalTransport, LocalWorld
from kvseal.lab.pages import compute

TOKENS = list(range(100, 123))
"""23 tokens of 4-token pages: 5 pages are full, the last one holds 3 tokens."""
NEXT_TOKEN = 4711
PATIENCE = Patience(silence_s=2.0, fence_s=1.0)


def rig(*, sticky: bool = False, receiver_pages: int = 64, cap: int = 0, forth: Deliver = as_it_is, back: Deliver = as_it_is) -> Rig:
    world = LocalWorld()
    make = LocalTransport.maker(world, sticky=sticky)
    sender = Node("prefill", make, patience=PATIENCE)
    receiver = Node("decode", make, pages=receiver_pages, patience=PATIENCE, quarantine_cap_pages=cap)
    return Rig(sender, receiver, forth=forth, back=back)


@pytest.fixture
def pair() -> Iterator[Rig]:
    made = rig()
    yield made
    made.close()


def run(pair: Rig, one: HandOff, *, chunk: int = 2, start_s: float = 0.0) -> None:
    now_s = start_s
    for _ in range(60):
        if one.sealed < one.pages:
            pair.compute(one, min(one.pages, one.sealed + chunk), now_s)
        pair.pump(now_s)
        now_s += 0.05
        if pair.idle:
            return


def local(node: Node) -> LocalTransport:
    assert isinstance(node.transport, LocalTransport)
    return node.transport


def outcome(pair: Rig, side: str, name: str = "handoff-1") -> Delivered | Failure:
    return pair.ends[side][name].outcome


def all_pages_back(pair: Rig) -> None:
    for node in (pair.sender, pair.receiver):
        node.check()
        usage = node.kv.usage()
        assert usage.leased == usage.draining == usage.quarantined == 0
        assert usage.free + usage.evictable == usage.total, "nobody holds anything"


def test_a_hand_off_chunk_by_chunk(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    one.next_token = NEXT_TOKEN
    run(pair, one)
    end = pair.ends["receiver"]["handoff-1"]
    assert isinstance(end.outcome, Delivered) and end.outcome == outcome(pair, "sender")
    assert (end.outcome.pages, end.outcome.sent_pages, end.outcome.next_token) == (6, 6, NEXT_TOKEN)
    grant = end.grant
    assert grant is not None and grant.table.valid_tokens == grant.cached_tokens == 23 and list(grant.tokens) == TOKENS
    assert pair.receiver.holds(grant, TOKENS)
    pair.receiver.check()
    pair.receiver.kv.drop(grant)
    assert pair.receiver.kv.probe(SCOPE, TOKENS) == 20, "the request that waits for it finds it as a prefix"
    pair.sender.kv.drop(one.grant)
    all_pages_back(pair)
    counted = pair.receiver.receiving.counters
    assert (counted.delivered, counted.pages, counted.bytes) == (1, 6, 6 * GEOMETRY.page_bytes)


def test_what_the_receiver_has_is_not_sent_again(pair: Rig) -> None:
    own = pair.receiver.admit("earlier", TOKENS[:12])
    compute(pair.receiver.kv, pair.receiver.memory, own, TOKENS[:12], 12)
    pair.receiver.kv.drop(own)
    run(pair, pair.begin("handoff-1", TOKENS, 0.0))
    end = pair.ends["receiver"]["handoff-1"]
    assert end.outcome == outcome(pair, "sender")
    assert isinstance(end.outcome, Delivered) and (end.outcome.pages, end.outcome.sent_pages) == (6, 3)
    assert end.grant is not None and pair.receiver.holds(end.grant, TOKENS)


@pytest.mark.parametrize(("tokens", "pages", "sent"), [(20, 5, 0), (23, 6, 1)])
def test_of_what_is_there_already_only_a_last_page_that_is_not_full_is_sent(pair: Rig, tokens: int, pages: int, sent: int) -> None:
    own = pair.receiver.admit("earlier", TOKENS)
    compute(pair.receiver.kv, pair.receiver.memory, own, TOKENS, 20)
    pair.receiver.kv.drop(own)
    run(pair, pair.begin("handoff-1", TOKENS[:tokens], 0.0))
    end = pair.ends["receiver"]["handoff-1"]
    assert isinstance(end.outcome, Delivered) and (end.outcome.pages, end.outcome.sent_pages) == (pages, sent)
    assert end.grant is not None and end.grant.table.valid_tokens == tokens and pair.receiver.holds(end.grant, TOKENS)
    pair.receiver.check()


def test_a_page_that_is_here_with_another_digest_fails_it(pair: Rig) -> None:
    own = pair.receiver.admit("earlier", TOKENS[:12])
    page, nonce = own.table.stamps[0], own.table.stamps[1]
    compute(pair.receiver.kv, pair.receiver.memory, own, TOKENS[:12], 12)
    pair.receiver.kv.pool.ledger.digest_at[16 * page] ^= 1
    run(pair, pair.begin("handoff-1", TOKENS, 0.0))
    found = outcome(pair, "receiver")
    assert isinstance(found, Failure) and found.reason is m.Reason.TWIN and nonce


def test_no_room_now_waits_and_no_room_ever_is_refused() -> None:
    pair = rig(receiver_pages=8)
    held = pair.receiver.admit("busy", list(range(20)))
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.pump(0.0)
    pair.pump(1.0)
    assert not pair.ends["receiver"], "it waits for pages"
    pair.receiver.kv.drop(held)
    run(pair, one, start_s=1.1)
    assert isinstance(outcome(pair, "receiver"), Delivered)
    pair.begin("handoff-2", list(range(40)), 3.0)
    pair.pump(3.0)
    found = outcome(pair, "sender", "handoff-2")
    assert isinstance(found, Failure) and found.reason is m.Reason.NEVER_FITS and found.by_peer


def test_no_room_in_time_ends_at_the_deadline() -> None:
    pair = rig(receiver_pages=8)
    held = pair.receiver.admit("busy", list(range(20)))
    pair.begin("handoff-1", TOKENS, 0.0, deadline_s=1.5)
    for now_s in (0.0, 0.7, 1.4, 1.6):
        pair.pump(now_s)
    assert isinstance(outcome(pair, "receiver"), Failure) and pair.idle
    pair.receiver.check()
    pair.receiver.kv.drop(held)


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("after_pumps", range(8))
def test_cancelled_at_any_moment_at_either_end_everything_comes_back(side: str, after_pumps: int) -> None:
    pair = rig()
    one = pair.begin("handoff-1", TOKENS, 0.0)
    for turn in range(after_pumps):
        if one.sealed < one.pages:
            pair.compute(one, min(one.pages, one.sealed + 2), 0.0)
        pair.pump(0.01 * turn)
    end = pair.sender.sending if side == "sender" else pair.receiver.receiving
    end.cancel("handoff-1", m.Reason.CANCELLED, 0.1)
    pair.compute(one, one.pages, 0.1)
    for now_s in (0.1, 0.2, 2.5, 40.0):
        pair.pump(now_s)
    assert pair.idle and set(pair.ends["sender"]) == set(pair.ends["receiver"]) == {"handoff-1"}
    delivered = [isinstance(outcome(pair, which), Delivered) for which in ("sender", "receiver")]
    assert delivered != [True, False], "the sender believes in a receipt alone"
    grant = pair.ends["receiver"]["handoff-1"].grant
    if grant is not None:
        pair.receiver.kv.drop(grant)
    pair.sender.kv.drop(one.grant)
    all_pages_back(pair)


def test_an_aborted_transfer_drains_and_is_free_after_the_fence_alone() -> None:
    pair = rig(sticky=True)
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    pair.pump(0.0)
    pair.receiver.receiving.cancel("handoff-1", m.Reason.CANCELLED, 0.1)
    usage = pair.receiver.kv.usage()
    assert usage.draining == 6 and not pair.idle
    pair.receiver.turn(0.5)
    assert pair.receiver.kv.usage().draining == 6, "nothing proves that it is quiet"
    local(pair.receiver).late("handoff-1")
    pair.receiver.turn(0.6)
    assert pair.receiver.kv.usage().free == 64
    pair.receiver.check()


def test_without_proof_in_time_the_pages_are_quarantined_and_come_back_on_proof() -> None:
    pair = rig(sticky=True)
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    pair.pump(0.0)
    pair.receiver.receiving.cancel("handoff-1", m.Reason.CANCELLED, 0.1)
    pair.receiver.turn(1.2)
    counted = pair.receiver.receiving.counters
    assert pair.receiver.kv.usage().quarantined == counted.quarantined_pages == 6
    pair.receiver.check()
    local(pair.receiver).late("handoff-1")
    assert pair.receiver.kv.usage().quarantined == 6, "a late write lands in a page that nobody owns"
    pair.receiver.turn(1.3)
    assert (counted.quarantined_pages, counted.readmitted_pages) == (0, 6)
    assert pair.receiver.kv.usage().free == 64


def test_a_full_quarantine_tears_the_transport_down() -> None:
    pair = rig(sticky=True, cap=4)
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    pair.pump(0.0)
    pair.receiver.receiving.cancel("handoff-1", m.Reason.CANCELLED, 0.1)
    pair.receiver.turn(1.2)
    assert local(pair.receiver).resets == 1 and pair.receiver.receiving.counters.resets == 1
    assert pair.receiver.kv.usage().quarantined == 0


def test_a_full_quarantine_that_cannot_be_emptied_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = rig(sticky=True, cap=4)
    monkeypatch.setattr(local(pair.receiver), "reset", lambda: False)
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    pair.pump(0.0)
    pair.receiver.receiving.cancel("handoff-1", m.Reason.CANCELLED, 0.1)
    pair.receiver.turn(1.2)
    pair.begin("handoff-2", [7, *TOKENS], 1.3)
    pair.pump(1.3)
    found = outcome(pair, "receiver", "handoff-2")
    assert isinstance(found, Failure) and found.reason is m.Reason.QUARANTINE_FULL
    assert pair.receiver.kv.usage().quarantined == 6


def test_everything_landed_and_not_quiet_is_not_committed() -> None:
    pair = rig(sticky=True)
    receiver = local(pair.receiver)
    receiver.stuck["handoff-1"] = []
    run(pair, pair.begin("handoff-1", TOKENS, 0.0))
    found = outcome(pair, "receiver")
    assert isinstance(found, Failure) and found.reason is m.Reason.TRANSPORT
    assert pair.receiver.kv.probe(SCOPE, TOKENS) == 0


def test_a_bit_changed_after_it_landed_is_found() -> None:
    pair = rig()
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 4, 0.0)
    for _ in range(3):
        pair.pump(0.0)
    session = pair.receiver.receiving._in["handoff-1"].session
    pair.receiver.memory[session.moves[1].page, 70] ^= 1
    run(pair, one, start_s=0.1)
    found = outcome(pair, "receiver")
    assert isinstance(found, Failure) and found.reason is m.Reason.SEAL and "digest" in found.detail
    assert pair.receiver.kv.usage().free == 64


def test_a_seal_changed_after_it_landed_is_always_found(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 4, 0.0)
    for _ in range(3):
        pair.pump(0.0)
    session = pair.receiver.receiving._in["handoff-1"].session
    pair.receiver.memory[session.moves[1].page, 8] ^= 1
    run(pair, one, start_s=0.1)
    found = outcome(pair, "receiver")
    assert isinstance(found, Failure) and found.reason is m.Reason.SEAL and "nonce" in found.detail


def test_a_page_reused_by_the_sender_is_refused(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    page = one.grant.table.stamps[2 * 3]
    pair.sender.memory[page, 8:16] = 9
    pair.pump(0.0)
    run(pair, one, start_s=0.1)
    found = outcome(pair, "receiver")
    assert isinstance(found, Failure) and found.reason is m.Reason.SEAL and "ordinal 3" in found.detail


def test_a_source_that_is_not_there_fails_the_transfer(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.compute(one, 6, 0.0)
    pair.sender.turn(0.0)
    for message in pair.sender.outbox():
        pair.receiver.take(m.encode(message), 0.0)
    for message in pair.receiver.outbox():
        pair.sender.take(m.encode(message), 0.0)
    local(pair.receiver).world.arenas.clear()
    run(pair, one)
    found = outcome(pair, "receiver")
    assert isinstance(found, Failure) and found.reason is m.Reason.TRANSPORT


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_peer_that_is_no_more_fails_its_hand_offs_alone(pair: Rig, who: str) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    pair.pump(0.0)
    ends = (pair.sender.sending, pair.receiver.receiving)
    for end in ends:
        end.peer_gone("somebody-else", 0.0)
    assert not pair.idle
    if who == "sender":
        pair.receiver.receiving.peer_gone(pair.sender.incarnation, 0.0)
    else:
        pair.sender.sending.peer_gone(pair.receiver.incarnation, 0.0)
    pair.pump(0.1)
    side = "receiver" if who == "sender" else "sender"
    found = outcome(pair, side)
    assert isinstance(found, Failure) and found.reason is m.Reason.PEER_GONE
    pair.sender.kv.drop(one.grant)
    all_pages_back(pair)


def test_an_intent_may_come_before_its_request(pair: Rig) -> None:
    grant = pair.sender.admit("prefill", TOKENS)
    receiver = pair.receiver
    pair.sender.sending.begin(
        "handoff-1", receiver=receiver.incarnation, scope=SCOPE, tokens=TOKENS, valid_tokens=23, deadline_s=30.0, now_s=0.0
    )
    pair.pump(0.0)
    receiver.receiving.expect("handoff-1", sender=pair.sender.incarnation, scope=SCOPE, tokens=TOKENS, deadline_s=30.0, now_s=0.5)
    run(pair, HandOff("handoff-1", TOKENS, 6, grant), start_s=0.5)
    assert isinstance(outcome(pair, "receiver"), Delivered)


def test_an_intent_that_nobody_waits_for_is_turned_away_in_time(pair: Rig) -> None:
    pair.sender.sending.begin(
        "handoff-1", receiver=pair.receiver.incarnation, scope=SCOPE, tokens=TOKENS, valid_tokens=23, deadline_s=30.0, now_s=0.0
    )
    pair.pump(0.0)
    pair.pump(0.9)
    assert not pair.ends["sender"]
    pair.pump(1.1)
    found = outcome(pair, "sender")
    assert isinstance(found, Failure) and found.by_peer


def intent_of(pair: Rig, name: str) -> m.Intent:
    pair.sender.sending.begin(
        name, receiver=pair.receiver.incarnation, scope=SCOPE, tokens=TOKENS, valid_tokens=23, deadline_s=30.0, now_s=0.0
    )
    (intent,) = pair.sender.sending.outbox()
    assert isinstance(intent, m.Intent)
    return intent


def test_early_intents_are_bounded_and_go_with_their_sender(pair: Rig) -> None:
    for number in range(MAX_EARLY_INTENTS + 1):
        pair.receiver.receiving.message(intent_of(pair, f"handoff-{number}"), 0.0)
    (abort,) = pair.receiver.receiving.outbox()
    assert isinstance(abort, m.Abort) and abort.handoff == f"handoff-{MAX_EARLY_INTENTS}"
    gone = m.Abort("handoff-0", pair.sender.incarnation, pair.receiver.incarnation, m.Role.SENDER, 1, m.Reason.CANCELLED)
    pair.receiver.receiving.message(gone, 0.0)
    pair.receiver.receiving.peer_gone(pair.sender.incarnation, 0.0)
    pair.receiver.turn(5.0)
    assert not pair.receiver.receiving.outbox()


def test_a_replayed_intent_is_answered_at_once_and_takes_nothing(pair: Rig) -> None:
    intents: list[bytes] = []
    pair.forth = lambda body: (intents.append(body), [body])[1]
    run(pair, pair.begin("handoff-1", TOKENS, 0.0))
    free = pair.receiver.kv.usage().free
    pair.receiver.take(intents[0], 1.0)
    (abort,) = pair.receiver.receiving.outbox()
    assert isinstance(abort, m.Abort) and pair.receiver.kv.usage().free == free
    for body in intents[1:]:
        pair.receiver.take(body, 1.0)
    assert not pair.receiver.receiving.outbox()
    assert pair.receiver.receiving.counters.ignored_messages == len(intents) - 1
    with pytest.raises(LawBroken, match="second time"):
        pair.receiver.receiving.expect("handoff-1", sender=pair.sender.incarnation, scope=SCOPE, tokens=TOKENS, deadline_s=1.0, now_s=1.0)


def test_only_so_many_ended_hand_offs_are_remembered(pair: Rig) -> None:
    receiving = pair.receiver.receiving
    for number in range(MAX_REMEMBERED + 2):
        receiving.expect(f"handoff-{number}", sender="sender-0001", scope=SCOPE, tokens=TOKENS, deadline_s=1.0, now_s=0.0)
        receiving.cancel(f"handoff-{number}", m.Reason.CANCELLED, 0.0)
    assert len(receiving._over) == MAX_REMEMBERED and "handoff-0" not in receiving._over


def test_what_is_not_known_is_ignored(pair: Rig) -> None:
    for end in (pair.sender.sending, pair.receiver.receiving):
        end.cancel("handoff-9", m.Reason.CANCELLED, 0.0)
        end.message(m.Alive("handoff-9", "sender-0001", "receiver-01", m.Role.SENDER, 0), 0.0)
        assert end.counters.ignored_messages == 1
    pair.sender.sending.sealed("handoff-9", pair.sender.kv.pool.pin(pair.sender.kv.cache.probe(SCOPE, _packed()), SCOPE), [], 0.0)
    pair.receiver.receiving._reported(_landed("handoff-9"), 0.0)


def _packed():  # type: ignore[no-untyped-def]
    from kvseal.kv.prefix_key import pack_tokens

    return pack_tokens(TOKENS)


def _landed(name: str):  # type: ignore[no-untyped-def]
    from kvseal.handoff.transport import Landed

    return Landed(name, 0, 1, 1)


def test_our_own_mistakes_are_said_aloud(pair: Rig) -> None:
    one = pair.begin("handoff-1", TOKENS, 0.0)
    where = {"receiver": pair.receiver.incarnation, "scope": SCOPE, "tokens": TOKENS, "deadline_s": 1.0, "now_s": 0.0}
    for valid_tokens in (0, 24):
        with pytest.raises(LawBroken):
            pair.sender.sending.begin("handoff-2", valid_tokens=valid_tokens, **where)  # type: ignore[arg-type]
    with pytest.raises(LawBroken):
        pair.sender.sending.begin("handoff-1", valid_tokens=23, **where)  # type: ignore[arg-type]
    pin = pair.sender.kv.pool.pin(one.grant.table.stamps[:0], SCOPE)
    pin.release()
    with pytest.raises(LawBroken):
        pair.sender.sending.sealed("handoff-1", pin, [1, 2], 0.0)


def test_quarantine_is_not_a_state_that_a_good_hand_off_ever_sees(pair: Rig) -> None:
    run(pair, pair.begin("handoff-1", TOKENS, 0.0))
    assert pair.receiver.kv.pool.count(PageState.QUARANTINED) == 0


def test_actions_of_the_other_end_and_pages_that_nobody_holds_are_our_own_bugs(pair: Rig) -> None:
    pair.begin("handoff-1", TOKENS, 0.0)
    sending, receiving = pair.sender.sending, pair.receiver.receiving
    with pytest.raises(LawBroken, match="no action of a sender"):
        sending._do("handoff-1", [Prove()])
    one = receiving._in["handoff-1"]
    for action, match in ((Unpin(), "no action of a receiver"), (Drop(), "without pages"), (Settle(True), "without a ticket")):
        with pytest.raises(LawBroken, match=match):
            receiving._act("handoff-1", one, action, 0.0)
    assert sending.knows("handoff-1") and receiving.knows("handoff-1")
    assert not sending.knows("handoff-2") and not receiving.knows("handoff-2")


def test_a_peer_that_is_no_more_takes_its_early_intents_alone(pair: Rig) -> None:
    pair.receiver.receiving.message(intent_of(pair, "handoff-1"), 0.0)
    pair.receiver.receiving.peer_gone("somebody-else", 0.0)
    assert len(pair.receiver.receiving._early) == 1
