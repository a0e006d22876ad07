"""Sessions brought into each state by hand, and every event that can then happen."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvseal.handoff import messages as m
from kvseal.handoff.receive_session import ReceiveSession, ReceiveState
from kvseal.handoff.send_session import SendSession, SendState
from kvseal.handoff.session import Action, Actions, Patience, Say, Terms

KEY = b"k" * 16
PATIENCE = Patience(silence_s=4.0, fence_s=1.0)
SENDER, RECEIVER = "sender-0001", "receiver-01"
FOLDS = [bytes([ordinal]) * 16 for ordinal in range(1, 4)]
SOURCE = [10, 1010, 11, 1011, 12, 1012]
"""The sender's stamps of ordinals 0, 1, 2."""
NEXT_TOKEN = 77
"""What the sender has sampled after the last token."""
PRESENT = 1
DESTINATION = [21, 2021, 22, 2022]
"""The receiver's stamps of ordinals 1 and 2; ordinal 0 is there already. Of ordinal 2 three slots of four are written."""


def terms(**changed: object) -> Terms:
    fields: dict[str, object] = {
        "handoff": "handoff-1",
        "sender": SENDER,
        "receiver": RECEIVER,
        "scope": bytes(16),
        "format": 77,
        "page_tokens": 4,
        "page_bytes": 128,
        "prompt_tokens": 11,
        "valid_tokens": 11,
        "tokens_digest": m.tokens_digest(KEY, range(11)),
        "deadline_s": 10.0,
        "transport": "shm",
    }
    return Terms(**{**fields, **changed})  # type: ignore[arg-type]


def send_session(**changed: object) -> SendSession:
    return SendSession(terms(**changed), key=KEY, endpoint=b"there", patience=PATIENCE, now_s=0.0)


def receive_session(**changed: object) -> ReceiveSession:
    return ReceiveSession(terms(**changed), key=KEY, patience=PATIENCE, now_s=0.0)


def said(actions: Actions) -> list[m.AnyMessage]:
    return [action.message for action in actions if isinstance(action, Say)]


def kinds(actions: Actions) -> list[type[Action]]:
    return [type(action) for action in actions]


class Pair:
    """Both ends, talking directly, with the pool's and the transport's answers given by hand."""

    def __init__(self, **changed: object) -> None:
        self.sender, self.receiver = send_session(**changed), receive_session(**changed)
        self.to_receiver: list[m.AnyMessage] = []
        self.to_sender: list[m.AnyMessage] = []

    def from_sender(self, actions: Actions) -> Actions:
        self.to_receiver += said(actions)
        return actions

    def from_receiver(self, actions: Actions) -> Actions:
        self.to_sender += said(actions)
        return actions

    def start(self) -> None:
        self.from_sender(self.sender.start(0.0))

    def intent(self) -> None:
        self.from_receiver(self.receiver.receive(self.to_receiver.pop(0), 0.0))

    def lease(self) -> None:
        self.from_receiver(self.receiver.leased(FOLDS[:PRESENT], DESTINATION[: 2 * (self.receiver.pages - PRESENT)], 0.0))

    def grant(self) -> None:
        self.from_sender(self.sender.receive(self.to_sender.pop(0), 0.0))

    def seal(self, first: int, last: int) -> None:
        follows = NEXT_TOKEN if last == len(FOLDS) else None
        self.from_sender(self.sender.sealed(SOURCE[2 * first : 2 * last], FOLDS[first:last], 0.0, follows))

    def deliver(self) -> None:
        """Everything that is on its way, both ways."""
        while self.to_receiver or self.to_sender:
            if self.to_receiver:
                self.from_receiver(self.receiver.receive(self.to_receiver.pop(0), 0.0))
            else:
                self.from_sender(self.sender.receive(self.to_sender.pop(0), 0.0))

    def land(self, ordinal: int, pages: int = 1) -> None:
        self.from_receiver(self.receiver.landed(ordinal, pages, 0.0))

    def fence(self) -> None:
        self.from_receiver(self.receiver.fenced(True))

    def prove(self) -> None:
        self.from_receiver(self.receiver.proven(FOLDS))


Step = Callable[[Pair], object]
STEPS: list[Step] = [
    Pair.start,
    Pair.intent,
    Pair.lease,
    Pair.grant,
    lambda pair: pair.seal(0, 2),
    Pair.deliver,
    lambda pair: pair.land(1),
    lambda pair: pair.seal(2, 3),
    Pair.deliver,
    lambda pair: pair.land(2),
    Pair.fence,
    Pair.prove,
    Pair.deliver,
]
"""A good hand-off, step by step."""

SEND_STATES: dict[SendState, int] = {
    SendState.NEW: 0,
    SendState.OFFERED: 1,
    SendState.GRANTED: 5,
    SendState.DECLARED: 8,
    SendState.DELIVERED: len(STEPS),
}
RECEIVE_STATES: dict[ReceiveState, int] = {
    ReceiveState.WAITING: 1,
    ReceiveState.ASKED: 2,
    ReceiveState.GRANTED: 6,
    ReceiveState.DECLARED: 9,
    ReceiveState.FENCING: 10,
    ReceiveState.PROVING: 11,
    ReceiveState.COMMITTED: 12,
}


def after(steps: int) -> Pair:
    pair = Pair()
    for step in STEPS[:steps]:
        step(pair)
    return pair


def sender_in(state: SendState) -> SendSession:
    if state is SendState.FAILED:
        session = after(SEND_STATES[SendState.GRANTED]).sender
        session.cancel(m.Reason.CANCELLED)
    else:
        session = after(SEND_STATES[state]).sender
    assert session.state is state
    return session


def receiver_in(state: ReceiveState) -> ReceiveSession:
    if state in (ReceiveState.ABORTING, ReceiveState.FAILED):
        session = after(RECEIVE_STATES[ReceiveState.GRANTED]).receiver
        session.cancel(m.Reason.CANCELLED)
        if state is ReceiveState.FAILED:
            session.fenced(True)
    else:
        session = after(RECEIVE_STATES[state]).receiver
    assert session.state is state
    return session


def numbered(message: m.AnyMessage, number: int) -> m.AnyMessage:
    return msgspec.structs.replace(message, number=number)


def good_messages() -> dict[str, m.AnyMessage]:
    """One of each kind, as a good hand-off says them, and one `Alive` and one `Abort` of each end."""
    pair = Pair()
    originals = (pair.receiver.receive, pair.sender.receive)
    log: list[m.AnyMessage] = []

    def listen(receive: Callable[[m.AnyMessage, float], Actions]) -> Callable[[m.AnyMessage, float], Actions]:
        def heard(message: m.AnyMessage, now_s: float) -> Actions:
            log.append(message)
            return receive(message, now_s)

        return heard

    pair.receiver.receive, pair.sender.receive = listen(originals[0]), listen(originals[1])  # type: ignore[method-assign]
    for step in STEPS:
        step(pair)
    found = {type(message).__name__: message for message in log}
    for role, name in ((m.Role.SENDER, "Sender"), (m.Role.RECEIVER, "Receiver")):
        found[f"Alive of {name}"] = m.Alive("handoff-1", SENDER, RECEIVER, role, 0)
        found[f"Abort of {name}"] = m.Abort("handoff-1", SENDER, RECEIVER, role, 0, m.Reason.CANCELLED, "left")
    return found
