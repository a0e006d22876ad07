"""The words of a session: states, events, actions, outcomes, and what both ends have in common.

Owns the numbering of messages, the identity check, deadlines and heartbeats. The machines themselves are `send_session` and
`receive_session`. Never does I/O, has no clock (time is handed in, in seconds), touches no page: actions say what the caller must do, in
order, and the caller answers with events. Laws: L9 (every session starts failed, and only a complete receipt changes that), L11 (an ended
session is absorbing), L8 (a failed receiver ends in a fence, and its pages are free only if that was proven).

Both machines are tables: (state, event) -> what happens. What is not in the table ends the session (`Reason.PROTOCOL`) while it is open
and is ignored once it has ended. A message of another hand-off or another incarnation is no event at all: it is counted and ignored.

::

    sender    NEW --start--> OFFERED --grant--> GRANTED --all sealed--> DECLARED --receipt equal--> DELIVERED
              anything else: FAILED

    receiver  WAITING --intent--> ASKED --leased--> GRANTED --manifest equal--> DECLARED --all landed--> FENCING --quiet--> PROVING
              PROVING --all equal--> COMMITTED
              anything else: WAITING, ASKED -> FAILED; the others -> ABORTING --fenced, or not in time--> FAILED
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from kvseal.handoff.messages import (
    Abort,
    Alive,
    AnyMessage,
    Grant,
    Intent,
    Manifest,
    Message,
    PagesReady,
    Reason,
    Receipt,
    Role,
    Taken,
)
from kvseal.handoff.proof import Move

HEARTBEATS = 4
"""`Alive` is said so many times within the silence that the peer would bear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a session waits, by its own monotonic clock."""

    silence_s: float = 25.0
    """Without a word from the peer. It speaks between two steps of its engine, so this is longer than a step may take before a node counts
    as stalled; whoever knows earlier that the peer is dead or frozen says so."""
    stall_s: float = 5.0
    """Pages were announced and none has come, whatever the peer says: pages need no step of its engine."""
    fence_s: float = 1.0
    """For the transport to prove quiet, from the abort on; then the pages are quarantined."""

    def __post_init__(self) -> None:
        """Whoever bears less silence bears no longer stall either."""
        object.__setattr__(self, "stall_s", min(self.stall_s, self.silence_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the two ends of a hand-off must agree on. Each end makes its own, from its own model and the request that it holds."""

    handoff: str
    sender: str
    receiver: str
    scope: bytes
    format: int
    page_tokens: int
    page_bytes: int
    prompt_tokens: int
    valid_tokens: int | None
    """How many of them are handed over, in whole pages and one that is not full. None, at a receiver: as many as the Intent says."""
    tokens_digest: bytes
    deadline_s: float
    transport: str


@dataclass(frozen=True, slots=True)
class Failure:
    reason: Reason
    detail: str = ""
    """Numbers and ids, never content."""
    by_peer: bool = False


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver has proven every page in its own memory, and both ends know the same digest of the whole."""

    pages: int
    sent_pages: int
    whole: bytes
    next_token: int | None = None
    """What follows the last token, if the sender has sampled it."""


Outcome = Delivered | Failure

# --- actions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """Send this message to the peer."""

    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Offer:
    """Sender: `Transport.send` these stamps, before the `Say` that follows."""

    stamps: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Sender: `Transport.withdraw`; answer with `withdrawn`."""


@dataclass(frozen=True, slots=True)
class Unpin:
    """Sender: nothing reads the pages for this hand-off any more; give the pins back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Receiver: find what is cached, lease the rest, open a ticket; answer with `leased` or `refused`."""

    intent: Intent


@dataclass(frozen=True, slots=True)
class Fetch:
    """Receiver: `Transport.receive` these."""

    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """Receiver: `Transport.fence`; answer with `fenced`."""


@dataclass(frozen=True, slots=True)
class Prove:
    """Receiver: compare every page once more, in our own memory; answer with `proven` or `broken`, now or later. A `Fence` that comes
    first ends it."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Receiver: write the granted nonces, close the ticket, make the tokens valid."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Receiver: give lease and pins back; pages with an open ticket drain."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Receiver: close the ticket. Not `quiet`: the draining pages go to quarantine, not to free (L8)."""

    quiet: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome is decided. Exactly once."""

    outcome: Outcome


Action = Say | Offer | Withdraw | Unpin | Lease | Fetch | Fence | Prove | Commit | Drop | Settle | Ended
Actions = list[Action]


class Event(Enum):
    """What can happen to a session: the peer's messages first, then what its own side says."""

    INTENT = auto()
    GRANT = auto()
    PAGES = auto()
    TAKEN = auto()
    MANIFEST = auto()
    RECEIPT = auto()
    ALIVE = auto()
    ABORT = auto()
    START = auto()
    SEALED = auto()
    WITHDRAWN = auto()
    LEASED = auto()
    REFUSED = auto()
    LANDED = auto()
    BROKEN = auto()
    FENCED = auto()
    PROVEN = auto()
    CANCEL = auto()


_EVENTS: Mapping[type[Message], Event] = {
    Intent: Event.INTENT,
    Grant: Event.GRANT,
    PagesReady: Event.PAGES,
    Taken: Event.TAKEN,
    Manifest: Event.MANIFEST,
    Receipt: Event.RECEIPT,
    Alive: Event.ALIVE,
    Abort: Event.ABORT,
}

M = TypeVar("M")


class Session(ABC):
    """One end of one hand-off. `now_s` never goes back; one that does is taken as standing still."""

    state: Enum

    def __init__(self, terms: Terms, role: Role, *, key: bytes, patience: Patience, now_s: float) -> None:
        self.terms = terms
        self.outcome: Outcome = Failure(Reason.UNFINISHED)
        """Failed until the receipt has been found equal (L9)."""
        self.settled = False
        """Nothing is held and nothing more will happen."""
        self.ignored = 0
        """Messages of other hand-offs or incarnations, or after the end."""
        self._role = role
        self._key = key
        self._patience = patience
        self.pages = -(-(terms.valid_tokens or 0) // terms.page_tokens)
        """How many are handed over; 0: not known yet."""
        self._now_s = now_s
        self._deadline_s = now_s + terms.deadline_s
        self._heard_s: float | None = None
        self._spoke_s: float | None = None
        self._moving_since_s: float | None = None
        """Since when a page is due and none has come; None: no page is due."""
        self._spoken = 0
        self._heard = 0

    @property
    @abstractmethod
    def open(self) -> bool:
        """The outcome is not decided yet."""

    def receive(self, message: AnyMessage, now_s: float) -> Actions:
        """A message from the peer. Never raises: what should not have come ends the session."""
        terms = self.terms
        named = (message.handoff, message.sender, message.receiver) == (terms.handoff, terms.sender, terms.receiver)
        if not named or message.role is self._role or not self.open:
            self.ignored += 1
            return []
        self._pass_time(now_s)
        if message.number != self._heard:
            return self._fail(Reason.PROTOCOL, f"message {message.number} came where {self._heard} was due")
        self._heard += 1
        self._heard_s = self._now_s
        return self._happened(_EVENTS[type(message)], message)

    def tick(self, now_s: float) -> Actions:
        """Time has passed: deadlines, silence, heartbeats."""
        self._pass_time(now_s)
        if not self.open:
            return self._still_settling()
        if self._now_s >= self._deadline_s:
            return self._fail(Reason.DEADLINE, f"not complete within {self.terms.deadline_s:g} s")
        if self._heard_s is not None and self._now_s - self._heard_s >= self._patience.silence_s:
            return self._fail(Reason.SILENCE, f"nothing heard for {self._patience.silence_s:g} s")
        stall_s = self._patience.stall_s
        if self._moving_since_s is not None and self._now_s - self._moving_since_s >= stall_s:
            return self._fail(Reason.SILENCE, f"pages were announced, and no page has come for {stall_s:g} s")
        if self._spoke_s is not None and self._now_s - self._spoke_s >= self._patience.silence_s / HEARTBEATS:
            return [self._say(Alive)]
        return []

    def cancel(self, reason: Reason, detail: str = "") -> Actions:
        """This end gives up. No effect once the outcome is decided."""
        return self._fail(reason, detail) if self.open else []

    # --- for the machines ------------------------------------------------------------------------------------

    def _happened(self, event: Event, what: Any = None) -> Actions:
        """What the machine's table says; what it does not say is failure while the session is open, and nothing after its end (L11)."""
        handler = self._handler(event)
        if handler is not None:
            return handler(what)
        return self._fail(Reason.PROTOCOL, f"{event.name} in state {self.state.name}") if self.open else []

    @abstractmethod
    def _handler(self, event: Event) -> Callable[[Any], Actions] | None:
        """The table's entry for this event in the present state."""

    @abstractmethod
    def _still_settling(self) -> Actions:
        """What is still to be done after the end, whenever time passes."""

    @abstractmethod
    def _give_up(self) -> Actions:
        """What the machine does when the session has failed; sets its state."""

    def _fail(self, reason: Reason, detail: str = "", *, by_peer: bool = False) -> Actions:
        self.outcome = Failure(reason, detail, by_peer)
        actions: Actions = []
        if not by_peer and self._spoken + self._heard > 0:
            actions.append(self._say(Abort, reason, detail[:300]))
        return [*actions, *self._give_up(), Ended(self.outcome)]

    def _aborted(self, message: Abort) -> Actions:
        return self._fail(message.reason, message.detail, by_peer=True)

    def _nothing(self, _what: Any) -> Actions:
        return []

    def _next(self, kind: Callable[..., M], *fields: Any) -> M:
        """The next message of this end, to be said now."""
        terms = self.terms
        message = kind(terms.handoff, terms.sender, terms.receiver, self._role, self._spoken, *fields)
        self._spoken += 1
        self._spoke_s = self._now_s
        return message

    def _say(self, kind: Callable[..., AnyMessage], *fields: Any) -> Say:
        return Say(self._next(kind, *fields))

    def _pass_time(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)


def pages_of(stamps: Sequence[int]) -> Sequence[int]:
    """The page numbers of page, nonce, page, nonce, ..."""
    return stamps[::2]
