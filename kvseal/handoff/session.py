"""The two ends of a hand-off as pure state machines: events in, actions out.

Owns what may follow what. Never does I/O, has no clock (time is handed in, in seconds that never go back), touches no page: the actions say
what the caller must do, and the caller answers with events. Laws: L9 (every session starts failed, and only a complete receipt changes
that), L11 (an ended session is absorbing), L8 (a failed receiver ends in a fence, and its pages are free only if that was proven).

Both machines are tables: (state, event) -> what happens. What is not in the table ends the session (`Reason.PROTOCOL`) while it is open
and is ignored once it has ended. A message of another hand-off or another incarnation is not an event at all: it is counted and ignored.

::

    sender    NEW --start--> OFFERED --grant--> GRANTED --all sealed--> DECLARED --receipt equal--> DELIVERED
                 \\______________\\_________________\\________________________\\-- anything else -----> FAILED

    receiver  WAITING --intent--> ASKED --leased--> GRANTED --manifest equal--> DECLARED --all landed--> FENCING --quiet--> PROVING
                                                                                                   proven, equal |
              COMMITTED <-----------------------------------------------------------------------------------------+
              anything else: WAITING, ASKED -> FAILED;   the others -> ABORTING (fence) --fenced--> FAILED (quiet or quarantined)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvseal.handoff.messages import AnyMessage, Intent, Reason
from kvseal.handoff.proof import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a session waits. All by its own monotonic clock."""

    silence_s: float = 5.0
    """Without a word or a page from the peer. `Alive` is said four times as often."""
    fence_s: float = 1.0
    """For the transport to prove quiet, from the abort on; then the pages are quarantined."""


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
    """Sender: `Transport.withdraw`; answer with `withdrawn` (again and again until it is quiet)."""


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
    """Receiver: compare every seal in our memory once more and recompute; answer with `proven` or `broken`."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Receiver: close the ticket, write the granted nonces into the seals, make the tokens valid."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Receiver: give everything back. Not `quiet`: the leased pages go to quarantine, not to free."""

    quiet: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The session's last word, exactly once."""

    outcome: Outcome


Action = Say | Offer | Withdraw | Unpin | Lease | Fetch | Fence | Prove | Commit | Abandon | Ended
Actions = Sequence[Action]


class SendState(Enum):
    NEW = auto()
    OFFERED = auto()
    GRANTED = auto()
    DECLARED = auto()
    DELIVERED = auto()
    FAILED = auto()


class ReceiveState(Enum):
    WAITING = auto()
    ASKED = auto()
    GRANTED = auto()
    DECLARED = auto()
    FENCING = auto()
    PROVING = auto()
    COMMITTED = auto()
    ABORTING = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What both ends of one hand-off must agree on. The receiver's own: from its own model and the request that it holds."""

    handoff: str
    sender: str
    receiver: str
    scope: bytes
    format: int
    page_tokens: int
    page_bytes: int
    prompt_tokens: int
    pages: int
    tokens_digest: bytes
    deadline_s: float


class SendSession:
    """One hand-off at its sender. Every method returns the actions to be done, in order."""

    def __init__(self, terms: Terms, *, key: bytes, transport: str, endpoint: bytes, patience: Patience, now_s: float) -> None:
        raise NotImplementedError

    state: SendState
    outcome: Outcome
    """`Failure(Reason.UNFINISHED)` until the receipt has been found equal (L9)."""
    settled: bool
    """Ended, and the pins were given back: nothing more will happen."""
    ignored: int
    """Messages of other hand-offs, other incarnations, or after the end."""

    def start(self, now_s: float) -> Actions: ...  # type: ignore[empty-body]
    def sealed(self, stamps: Sequence[int], folds: Sequence[bytes], now_s: float) -> Actions:  # type: ignore[empty-body]
        """The next pages of the sequence are sealed here (page, nonce, ...; pool digests), in order of ordinal from 0. May come before the
        grant. The last of them makes the Manifest."""

    def receive(self, message: AnyMessage, now_s: float) -> Actions: ...  # type: ignore[empty-body]
    def tick(self, now_s: float) -> Actions: ...  # type: ignore[empty-body]
    def cancel(self, reason: Reason, detail: str = "") -> Actions: ...  # type: ignore[empty-body]
    def withdrawn(self, quiet: bool) -> Actions: ...  # type: ignore[empty-body]


class ReceiveSession:
    """One hand-off at its receiver."""

    def __init__(self, terms: Terms, *, key: bytes, transport: str, patience: Patience, now_s: float) -> None:
        raise NotImplementedError

    state: ReceiveState
    outcome: Outcome
    settled: bool
    ignored: int

    def receive(self, message: AnyMessage, now_s: float) -> Actions: ...  # type: ignore[empty-body]
    def leased(self, present_folds: Sequence[bytes], stamps: Sequence[int], now_s: float) -> Actions:  # type: ignore[empty-body]
        """The pool's answer to `Lease`: digests of the pages that are here already, stamps of those to be filled."""

    def refused(self, reason: Reason, detail: str = "") -> Actions: ...  # type: ignore[empty-body]
    def landed(self, first_ordinal: int, pages: int, now_s: float) -> Actions: ...  # type: ignore[empty-body]
    def broken(self, reason: Reason, detail: str = "") -> Actions: ...  # type: ignore[empty-body]
    def fenced(self, quiet: bool) -> Actions: ...  # type: ignore[empty-body]
    def proven(self, folds: Sequence[bytes]) -> Actions:  # type: ignore[empty-body]
        """Digests of every page of the hand-off, from our own memory and ledger."""

    def tick(self, now_s: float) -> Actions: ...  # type: ignore[empty-body]
    def cancel(self, reason: Reason, detail: str = "") -> Actions: ...  # type: ignore[empty-body]
