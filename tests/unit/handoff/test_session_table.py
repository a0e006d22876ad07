"""Every event in every state, against a table written a second time here (L9, L11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvseal.handoff import messages as m
from kvseal.handoff.receive_session import ReceiveSession, ReceiveState
from kvseal.handoff.send_session import SendSession, SendState
from kvseal.handoff.session import Delivered, Ended, Failure

from . import scripted as s

R, S = ReceiveState, SendState
MESSAGES = s.good_messages()

# --- the sender ----------------------------------------------------------------------------------------------

SEND_EVENTS: dict[str, Callable[[SendSession], Any]] = {
    **{
        name: lambda session, message=message: session.receive(s.numbered(message, session._heard), 1.0)
        for name, message in MESSAGES.items()
        if message.role is m.Role.RECEIVER
    },
    "out of order": lambda session: session.receive(s.numbered(MESSAGES["Alive of Receiver"], session._heard + 1), 1.0),
    "repeated": lambda session: session.receive(s.numbered(MESSAGES["Alive of Receiver"], session._heard - 1), 1.0),
    "sealed": lambda session: session.sealed(s.SOURCE[4:], s.FOLDS[2:], 1.0) if session.sealed_pages == 2 else session.sealed([], [], 1.0),
    "start": lambda session: session.start(1.0),
    "cancel": lambda session: session.cancel(m.Reason.CANCELLED),
    "deadline": lambda session: session.tick(10.0),
    "silence": lambda session: session.tick(4.0),
    "a moment": lambda session: session.tick(0.5),
    "quiet": lambda session: session.withdrawn(True),
    "not quiet": lambda session: session.withdrawn(False),
}

OPEN_SENDERS = (S.NEW, S.OFFERED, S.GRANTED, S.DECLARED)
GOOD_AT_SENDER: dict[tuple[SendState, str], SendState] = {
    (S.NEW, "start"): S.OFFERED,
    (S.NEW, "sealed"): S.NEW,
    (S.NEW, "silence"): S.NEW,
    (S.OFFERED, "Grant"): S.GRANTED,
    (S.OFFERED, "sealed"): S.OFFERED,
    (S.GRANTED, "sealed"): S.DECLARED,
    (S.GRANTED, "Taken"): S.FAILED,  # of three ordinals, and two were announced
    (S.DECLARED, "sealed"): S.DECLARED,
    (S.DECLARED, "Taken"): S.DECLARED,
    (S.DECLARED, "Receipt"): S.DELIVERED,
    **{(state, "Alive of Receiver"): state for state in OPEN_SENDERS if state is not S.NEW},
    **{(state, "a moment"): state for state in OPEN_SENDERS},
}


@pytest.mark.parametrize("event", SEND_EVENTS)
@pytest.mark.parametrize("state", S, ids=lambda state: state.name)
def test_the_sender_goes_where_the_table_says_and_fails_otherwise(state: SendState, event: str) -> None:
    session = s.sender_in(state)
    outcome = session.outcome
    actions = SEND_EVENTS[event](session)
    ends = [action for action in actions if isinstance(action, Ended)]
    if state not in OPEN_SENDERS:
        assert session.state is state and session.outcome is outcome and not ends and not s.said(actions), "an end is absorbing (L11)"
        assert session.settled is (event == "quiet")
        return
    assert session.state is GOOD_AT_SENDER.get((state, event), S.FAILED)
    assert len(ends) == (not session.open)
    assert isinstance(session.outcome, Delivered) is (session.state is S.DELIVERED)
    if session.state is S.FAILED:
        by_peer = event == "Abort of Receiver" and state is not S.NEW
        aborts = [message for message in s.said(actions) if isinstance(message, m.Abort)]
        unknown_to_peer = state is S.NEW and session._heard == 0
        assert len(aborts) == (not by_peer and not unknown_to_peer)
        assert isinstance(session.outcome, Failure) and session.outcome.by_peer is by_peer


# --- the receiver --------------------------------------------------------------------------------------------

RECEIVE_EVENTS: dict[str, Callable[[ReceiveSession], Any]] = {
    **{
        name: lambda session, message=message: session.receive(s.numbered(message, session._heard), 1.0)
        for name, message in MESSAGES.items()
        if message.role is m.Role.SENDER
    },
    "out of order": lambda session: session.receive(s.numbered(MESSAGES["Alive of Sender"], session._heard + 1), 1.0),
    "repeated": lambda session: session.receive(s.numbered(MESSAGES["Alive of Sender"], session._heard - 1), 1.0),
    "leased": lambda session: session.leased(s.FOLDS[: s.PRESENT], s.DESTINATION, 1.0),
    "refused": lambda session: session.refused(m.Reason.NO_ROOM),
    "landed": lambda session: session.landed(1 + session._landed, 1, 1.0),
    "broken": lambda session: session.broken(m.Reason.SEAL),
    "fenced": lambda session: session.fenced(True),
    "not quiet": lambda session: session.fenced(False),
    "proven": lambda session: session.proven(s.FOLDS),
    "proven otherwise": lambda session: session.proven([*s.FOLDS[:2], bytes(16)]),
    "cancel": lambda session: session.cancel(m.Reason.CANCELLED),
    "deadline": lambda session: session.tick(10.0),
    "silence": lambda session: session.tick(4.0),
    "a moment": lambda session: session.tick(0.5),
}

OPEN_RECEIVERS = (R.WAITING, R.ASKED, R.GRANTED, R.DECLARED, R.FENCING, R.PROVING)
GOOD_AT_RECEIVER: dict[tuple[ReceiveState, str], ReceiveState] = {
    (R.WAITING, "Intent"): R.ASKED,
    (R.WAITING, "silence"): R.WAITING,
    (R.ASKED, "leased"): R.GRANTED,
    (R.GRANTED, "PagesReady"): R.GRANTED,
    (R.GRANTED, "landed"): R.GRANTED,
    (R.DECLARED, "landed"): R.FENCING,
    (R.FENCING, "fenced"): R.PROVING,
    (R.PROVING, "proven"): R.COMMITTED,
    **{(state, "Alive of Sender"): state for state in OPEN_RECEIVERS if state is not R.WAITING},
    **{(state, "a moment"): state for state in OPEN_RECEIVERS},
}
ABORTS: dict[ReceiveState, ReceiveState] = {
    R.WAITING: R.FAILED,
    R.ASKED: R.FAILED,
    R.GRANTED: R.ABORTING,
    R.DECLARED: R.ABORTING,
    R.FENCING: R.ABORTING,
    R.PROVING: R.ABORTING,
}
AFTER_THE_END: dict[tuple[ReceiveState, str], ReceiveState] = {
    (R.ABORTING, "fenced"): R.FAILED,
    (R.ABORTING, "deadline"): R.FAILED,
    (R.ABORTING, "silence"): R.FAILED,
}


@pytest.mark.parametrize("event", RECEIVE_EVENTS)
@pytest.mark.parametrize("state", R, ids=lambda state: state.name)
def test_the_receiver_goes_where_the_table_says_and_fails_otherwise(state: ReceiveState, event: str) -> None:
    session = s.receiver_in(state)
    outcome = session.outcome
    actions = RECEIVE_EVENTS[event](session)
    ends = [action for action in actions if isinstance(action, Ended)]
    if state not in OPEN_RECEIVERS:
        assert session.state is AFTER_THE_END.get((state, event), state) and session.outcome is outcome
        assert not ends and not s.said(actions), "an end is absorbing (L11)"
        return
    assert session.state is GOOD_AT_RECEIVER.get((state, event), ABORTS[state])
    assert len(ends) == (not session.open)
    assert isinstance(session.outcome, Delivered) is (session.state is R.COMMITTED)
    if session.state in (R.ABORTING, R.FAILED):
        names = [kind.__name__ for kind in s.kinds(actions)]
        held = state not in (R.WAITING, R.ASKED)
        assert ("Drop" in names) is held, "what was leased is given up once"
        assert ("Fence" in names) is (state in (R.GRANTED, R.DECLARED, R.PROVING)), "nothing is free before the fence (L8)"
        assert "Settle" not in names


def test_failure_is_the_initial_state() -> None:
    for session in (s.send_session(), s.receive_session()):
        assert session.outcome == Failure(m.Reason.UNFINISHED)


def test_a_good_hand_off_ends_delivered_at_both_ends() -> None:
    pair = s.after(len(s.STEPS))
    assert pair.sender.outcome == pair.receiver.outcome
    assert isinstance(pair.sender.outcome, Delivered) and (pair.sender.outcome.pages, pair.sender.outcome.sent_pages) == (3, 2)
