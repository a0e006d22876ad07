"""What a message says must be exactly what is known: every field of it, changed one by one, ends the hand-off (L9)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvseal.core.errors import LawBroken
from kvseal.handoff import messages as m
from kvseal.handoff.proof import Move
from kvseal.handoff.receive_session import ReceiveState
from kvseal.handoff.send_session import SendState
from kvseal.handoff.session import Failure, Fetch, Lease, Offer, Say, Settle

from . import scripted as s

MESSAGES = s.good_messages()


def test_messages_of_others_are_no_events() -> None:
    session = s.receiver_in(ReceiveState.WAITING)
    good = MESSAGES["Intent"]
    for changed in ({"handoff": "handoff-2"}, {"sender": "sender-0002"}, {"receiver": "receiver-02"}, {"role": m.Role.RECEIVER}):
        assert not session.receive(msgspec.structs.replace(good, **changed), 0.0)
    assert session.state is ReceiveState.WAITING and session.ignored == 4
    assert isinstance(session.receive(good, 0.0)[0], Lease)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"format": 78}, m.Reason.FORMAT),
        ({"page_tokens": 8}, m.Reason.FORMAT),
        ({"page_bytes": 192}, m.Reason.FORMAT),
        ({"scope": bytes(15) + b"x"}, m.Reason.SCOPE),
        ({"prompt_tokens": 12}, m.Reason.TOKENS),
        ({"valid_tokens": 10}, m.Reason.TOKENS),
        ({"valid_tokens": 12}, m.Reason.TOKENS),
        ({"tokens_digest": bytes(16)}, m.Reason.TOKENS),
        ({"pages": 2}, m.Reason.TOKENS),
        ({"transport": "tcp"}, m.Reason.TRANSPORT),
    ],
    ids=str,
)
def test_an_intent_that_is_not_the_request_is_refused(changed: dict[str, Any], reason: m.Reason) -> None:
    session = s.receiver_in(ReceiveState.WAITING)
    actions = session.receive(msgspec.structs.replace(MESSAGES["Intent"], **changed), 0.0)
    assert session.state is ReceiveState.FAILED and session.settled
    (abort,) = s.said(actions)
    assert isinstance(abort, m.Abort) and abort.reason is reason


@pytest.mark.parametrize(("valid_tokens", "pages"), [(11, 3), (8, 2), (9, 3), (1, 1)])
def test_a_receiver_that_knows_no_number_of_tokens_takes_that_of_the_intent(valid_tokens: int, pages: int) -> None:
    session = s.receive_session(valid_tokens=None)
    session.receive(msgspec.structs.replace(MESSAGES["Intent"], valid_tokens=valid_tokens, pages=pages), 0.0)
    assert session.state is ReceiveState.ASKED and (session.pages, session.valid_tokens) == (pages, valid_tokens)


@pytest.mark.parametrize(("valid_tokens", "pages"), [(12, 3), (13, 4), (11, 2), (11, 4), (8, 3)])
def test_more_than_the_tokens_or_in_other_pages_than_they_need_is_refused(valid_tokens: int, pages: int) -> None:
    session = s.receive_session(valid_tokens=None)
    session.receive(msgspec.structs.replace(MESSAGES["Intent"], valid_tokens=valid_tokens, pages=pages), 0.0)
    assert isinstance(session.outcome, Failure) and session.outcome.reason is m.Reason.TOKENS


@pytest.mark.parametrize(
    "changed",
    [
        {"present_pages": 0},
        {"present_pages": 2},
        {"stamps": m.packed_stamps([21, 2021])},
        {"stamps": m.packed_stamps([21, 2021, 21, 2022])},
        {"stamps": m.packed_stamps([21, 2021, 22, 0])},
        {"stamps": bytes(31)},
        {"present_pages": 3},
    ],
    ids=str,
)
def test_a_grant_that_does_not_cover_the_intent_is_refused(changed: dict[str, Any]) -> None:
    session = s.sender_in(SendState.OFFERED)
    session.receive(msgspec.structs.replace(MESSAGES["Grant"], **changed), 0.0)
    assert isinstance(session.outcome, Failure) and session.outcome.reason is m.Reason.PROTOCOL


@pytest.mark.parametrize(
    "changed",
    [
        {"first_ordinal": 1},
        {"first_ordinal": 3},
        {"stamps": b"", "folds": b""},
        {"stamps": bytes(31)},
        {"folds": bytes(17)},
        {"folds": bytes(32)},
        {"stamps": bytes(32), "folds": bytes(32)},
        {"stamps": m.packed_stamps([2**31, 5])},
    ],
    ids=str,
)
def test_announced_pages_come_in_order_each_once(changed: dict[str, Any]) -> None:
    session = s.receiver_in(ReceiveState.GRANTED)
    good = s.numbered(MESSAGES["PagesReady"], session._heard)
    session.receive(msgspec.structs.replace(good, **changed), 0.0)
    assert session.state is ReceiveState.ABORTING


def test_announced_pages_become_moves_into_the_granted_ones() -> None:
    session = s.receiver_in(ReceiveState.GRANTED)
    (fetch,) = session.receive(s.numbered(MESSAGES["PagesReady"], session._heard), 0.0)
    assert fetch == Fetch((Move(2, 12, 1012, 22, s.FOLDS[2], 3),))
    assert list(session.granted_nonces) == [2021, 2022]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pages": 2}, m.Reason.MANIFEST),
        ({"prompt_tokens": 10}, m.Reason.MANIFEST),
        ({"next_token": None}, m.Reason.MANIFEST),
        ({"next_token": s.NEXT_TOKEN + 1}, m.Reason.MANIFEST),
        ({"tokens_digest": bytes(16)}, m.Reason.MANIFEST),
        ({"grant": bytes(16)}, m.Reason.MANIFEST),
        ({"stamps": m.packed_stamps([11, 1011])}, m.Reason.MANIFEST),
        ({"stamps": m.packed_stamps([12, 1012, 11, 1011])}, m.Reason.MANIFEST),
        ({"folds": b"".join(s.FOLDS[:2])}, m.Reason.MANIFEST),
        ({"folds": b"".join([s.FOLDS[0], s.FOLDS[2], s.FOLDS[1]])}, m.Reason.MANIFEST),
        ({"folds": b"".join([s.FOLDS[1], *s.FOLDS[1:]])}, m.Reason.TWIN),
        ({"whole": bytes(16)}, m.Reason.MANIFEST),
    ],
    ids=str,
)
def test_a_manifest_that_differs_in_anything_is_refused(changed: dict[str, Any], reason: m.Reason) -> None:
    session = s.receiver_in(ReceiveState.GRANTED)
    session.receive(s.numbered(MESSAGES["PagesReady"], session._heard), 0.0)
    session.receive(msgspec.structs.replace(s.numbered(MESSAGES["Manifest"], session._heard), **changed), 0.0)
    assert isinstance(session.outcome, Failure) and session.outcome.reason is reason


def test_a_token_that_follows_tokens_which_were_not_handed_over_is_refused() -> None:
    """Even when everything else agrees: what it was sampled from is not here."""
    pair = s.Pair(valid_tokens=8)
    for step in s.STEPS[:4]:
        step(pair)
    pair.from_sender(pair.sender.sealed(s.SOURCE[:4], s.FOLDS[:2], 0.0, s.NEXT_TOKEN))
    pair.deliver()
    assert isinstance(pair.receiver.outcome, Failure) and pair.receiver.outcome.reason is m.Reason.MANIFEST


def test_a_manifest_before_all_pages_were_announced_is_refused() -> None:
    session = s.receiver_in(ReceiveState.GRANTED)
    session.receive(s.numbered(MESSAGES["Manifest"], session._heard), 0.0)
    assert isinstance(session.outcome, Failure) and session.outcome.reason is m.Reason.MANIFEST


@pytest.mark.parametrize(("ordinal", "pages"), [(2, 1), (0, 1), (1, 2)])
def test_pages_that_land_out_of_order_or_unasked_end_it(ordinal: int, pages: int) -> None:
    session = s.receiver_in(ReceiveState.GRANTED)
    session.landed(ordinal, pages, 0.0)
    assert isinstance(session.outcome, Failure) and session.outcome.reason is m.Reason.TRANSPORT


@pytest.mark.parametrize("changed", [{"pages": 2}, {"whole": bytes(16)}], ids=str)
def test_a_receipt_of_something_else_is_no_receipt(changed: dict[str, Any]) -> None:
    session = s.sender_in(SendState.DECLARED)
    session.receive(msgspec.structs.replace(s.numbered(MESSAGES["Receipt"], session._heard), **changed), 0.0)
    assert isinstance(session.outcome, Failure) and session.outcome.reason is m.Reason.MANIFEST


def test_the_fence_is_asked_until_it_is_quiet_or_out_of_time() -> None:
    session = s.receiver_in(ReceiveState.ABORTING)
    assert not session.fenced(False)
    assert s.kinds(session.tick(0.9))[0].__name__ == "Fence"
    assert session.tick(1.0) == [Settle(quiet=False)] and session.settled
    assert not session.fenced(True), "too late: the pages are in quarantine now, and leave it another way"


def test_everything_landed_but_not_quiet_is_failure() -> None:
    session = s.receiver_in(ReceiveState.FENCING)
    session.fenced(False)
    assert session.state is ReceiveState.ABORTING


def test_a_lease_that_comes_after_the_end_is_given_back() -> None:
    session = s.receiver_in(ReceiveState.ASKED)
    session.cancel(m.Reason.CANCELLED)
    assert [kind.__name__ for kind in s.kinds(session.leased(s.FOLDS[:1], s.DESTINATION, 0.0))] == ["Drop", "Settle"]


def test_the_sender_offers_again_to_withdraw_until_it_is_quiet() -> None:
    session = s.sender_in(SendState.FAILED)
    assert s.kinds(session.tick(1.0))[0].__name__ == "Withdraw"
    assert not session.withdrawn(False) and not session.settled
    assert s.kinds(session.withdrawn(True))[0].__name__ == "Unpin" and session.settled
    assert not session.withdrawn(True) and not session.tick(2.0)


def test_pages_sealed_before_the_grant_are_announced_with_it() -> None:
    session = s.sender_in(SendState.OFFERED)
    assert not session.sealed(s.SOURCE, s.FOLDS, 0.0)
    actions = session.receive(MESSAGES["Grant"], 0.0)
    offer, pages, manifest = actions
    assert isinstance(offer, Offer) and m.unpacked_stamps(offer.stamps).tolist() == s.SOURCE[2:]
    assert isinstance(pages, Say) and isinstance(pages.message, m.PagesReady) and pages.message.first_ordinal == 1
    assert isinstance(manifest, Say) and isinstance(manifest.message, m.Manifest) and len(manifest.message.folds) == 48


def test_everything_present_already_needs_no_page_and_still_a_receipt() -> None:
    pair = s.Pair()
    pair.start()
    pair.intent()
    pair.from_receiver(pair.receiver.leased(s.FOLDS, [], 0.0))
    pair.grant()
    pair.seal(0, 3)
    pair.deliver()
    pair.fence()
    pair.prove()
    pair.deliver()
    assert pair.sender.state is SendState.DELIVERED and pair.receiver.state is ReceiveState.COMMITTED


def test_pages_past_those_that_are_handed_over_are_not_taken() -> None:
    session = s.sender_in(SendState.OFFERED)
    session.sealed([*s.SOURCE, 13, 1013], [*s.FOLDS, bytes(16)], 0.0)
    assert session.sealed_pages == 3


def test_our_own_mistakes_are_said_aloud() -> None:
    with pytest.raises(LawBroken):
        s.send_session().sealed([1], [], 0.0)
    with pytest.raises(LawBroken):
        s.receiver_in(ReceiveState.ASKED).leased([], s.DESTINATION, 0.0)


def test_heartbeats_are_said_while_it_is_open_and_heard_in_time() -> None:
    pair = s.after(4)
    (alive,) = s.said(pair.sender.tick(1.0))
    assert isinstance(alive, m.Alive)
    assert not pair.sender.tick(1.5), "not more often than needed"
    pair.receiver.receive(alive, 3.9)
    assert all(isinstance(message, m.Alive) for message in s.said(pair.receiver.tick(7.8)))
    assert pair.receiver.open
    pair.receiver.tick(7.9)
    assert isinstance(pair.receiver.outcome, Failure) and pair.receiver.outcome.reason is m.Reason.SILENCE


def test_time_that_goes_back_stands_still() -> None:
    session = s.sender_in(SendState.OFFERED)
    session.tick(3.0)
    session.tick(-100.0)
    assert session.open
    session.tick(4.0)
    assert isinstance(session.outcome, Failure) and session.outcome.reason is m.Reason.SILENCE


def test_the_shorter_deadline_of_the_two_holds() -> None:
    session = s.receiver_in(ReceiveState.WAITING)
    session.receive(msgspec.structs.replace(MESSAGES["Intent"], deadline_s=2.0), 0.0)
    session.tick(2.0)
    assert isinstance(session.outcome, Failure) and session.outcome.reason is m.Reason.DEADLINE


def test_a_manifest_or_a_digest_without_its_ground_is_our_own_bug() -> None:
    with pytest.raises(LawBroken):
        s.send_session()._declare()
    with pytest.raises(LawBroken):
        s.receive_session()._whole_of(b"")
    assert s.receive_session().endpoint == b"" and s.receiver_in(ReceiveState.ASKED).endpoint == b"there"


def test_a_peer_that_speaks_and_moves_no_page_is_silent_too() -> None:
    session = s.receiver_in(ReceiveState.GRANTED)
    for second in (1.0, 2.0, 3.0):
        session.receive(m.Alive("handoff-1", s.SENDER, s.RECEIVER, m.Role.SENDER, session._heard), second)
    session.tick(3.9)
    assert session.open
    session.tick(4.0)
    assert isinstance(session.outcome, Failure) and "no page" in session.outcome.detail


def test_pages_that_come_slowly_are_progress() -> None:
    session = s.receiver_in(ReceiveState.GRANTED)
    session.receive(s.numbered(MESSAGES["PagesReady"], session._heard), 1.0)
    session.landed(1, 1, 3.0)
    session.receive(m.Alive("handoff-1", s.SENDER, s.RECEIVER, m.Role.SENDER, session._heard), 5.0)
    session.tick(6.9)
    assert session.open
    session.landed(2, 1, 6.95)
    session.receive(m.Alive("handoff-1", s.SENDER, s.RECEIVER, m.Role.SENDER, session._heard), 8.0)
    session.tick(9.9)
    assert session.open, "no page is due"
