"""The receiving end of a hand-off, as a pure state machine.

Owns what the receiver believes, and when: nothing, until grant, manifest and its own memory are exactly equal. See `session` for the
picture and the laws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

from kvseal.core.errors import LawBroken
from kvseal.core.laws import Law
from kvseal.handoff.messages import (
    Grant,
    Intent,
    Manifest,
    MessageInvalid,
    PagesReady,
    Reason,
    Receipt,
    Role,
    Taken,
    grant_digest,
    packed_stamps,
    split_folds,
    unpacked_stamps,
    whole_digest,
)
from kvseal.handoff.proof import Move
from kvseal.handoff.session import (
    Actions,
    Commit,
    Delivered,
    Drop,
    Ended,
    Event,
    Failure,
    Fence,
    Fetch,
    Lease,
    Patience,
    Prove,
    Say,
    Session,
    Settle,
    Terms,
    pages_of,
)


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


class ReceiveSession(Session):
    """One hand-off at its receiver. Every method returns the actions to be done, in order."""

    def __init__(self, terms: Terms, *, key: bytes, patience: Patience, now_s: float) -> None:
        super().__init__(terms, Role.RECEIVER, key=key, patience=patience, now_s=now_s)
        self.state: ReceiveState = ReceiveState.WAITING
        self.moves: list[Move] = []
        """Every page that was announced so far, in order of ordinal."""
        self._intent: Intent | None = None
        self._present_folds: list[bytes] = []
        self._stamps: Sequence[int] = ()
        self._agreed = b""
        self._next_token: int | None = None
        self._landed = 0
        """How many of `moves` stand checked in our memory."""
        self._whole = b""
        self._fence_by_s = 0.0

    @property
    def open(self) -> bool:
        return self.state not in _CLOSED

    @property
    def endpoint(self) -> bytes:
        """Where the sender's pages are reached."""
        return b"" if self._intent is None else self._intent.endpoint

    @property
    def valid_tokens(self) -> int:
        """How many tokens the pages hold; 0: not known yet."""
        return 0 if self._intent is None else self._intent.valid_tokens

    @property
    def granted_nonces(self) -> Sequence[int]:
        """What `moves` must bear from the commit on, in order."""
        return self._stamps[1::2]

    def leased(self, present_folds: Sequence[bytes], stamps: Sequence[int], now_s: float) -> Actions:
        """The answer to `Lease`: digests of the pages that are here already, stamps (page, nonce, ...) of those to be filled."""
        if len(present_folds) + len(stamps) // 2 != self.pages:
            raise LawBroken(Law.L9, f"a lease of {len(present_folds)} + {len(stamps) // 2} pages for {self.pages}")
        self._pass_time(now_s)
        return self._happened(Event.LEASED, (list(present_folds), list(stamps)))

    def refused(self, reason: Reason, detail: str = "") -> Actions:
        """The other answer to `Lease`."""
        return self._happened(Event.REFUSED, Failure(reason, detail))

    def landed(self, first_ordinal: int, pages: int, now_s: float) -> Actions:
        """The transport has put so many pages in place, and they passed the check."""
        self._pass_time(now_s)
        return self._happened(Event.LANDED, (first_ordinal, pages))

    def broken(self, reason: Reason, detail: str = "") -> Actions:
        """The transport lost the transfer, or a page is not what was announced."""
        return self._happened(Event.BROKEN, Failure(reason, detail))

    def fenced(self, quiet: bool) -> Actions:
        """The answer to `Fence`."""
        return self._happened(Event.FENCED, quiet)

    def proven(self, folds: Sequence[bytes]) -> Actions:
        """The answer to `Prove`: the digest of every page of the hand-off, from our own memory and ledger."""
        return self._happened(Event.PROVEN, folds)

    # --- inside ----------------------------------------------------------------------------------------------

    def _handler(self, event: Event) -> Callable[[Any], Actions] | None:
        handler = _TABLE.get((self.state, event))
        return None if handler is None else partial(handler, self)

    def _still_settling(self) -> Actions:
        if self.state is not ReceiveState.ABORTING:
            return []
        return self._settle(False) if self._now_s >= self._fence_by_s else [Fence()]

    def _give_up(self) -> Actions:
        if self.state in (ReceiveState.WAITING, ReceiveState.ASKED):
            self.state = ReceiveState.FAILED
            self.settled = True
            return []
        fencing = self.state is ReceiveState.FENCING
        self.state = ReceiveState.ABORTING
        self._fence_by_s = self._now_s + self._patience.fence_s
        return [Drop()] if fencing else [Drop(), Fence()]

    def _settle(self, quiet: bool) -> Actions:
        self.state = ReceiveState.FAILED
        self.settled = True
        return [Settle(quiet)]

    def _intended(self, intent: Intent) -> Actions:
        terms = self.terms
        self._intent = intent
        self._deadline_s = min(self._deadline_s, self._now_s + intent.deadline_s)
        if (intent.format, intent.page_tokens, intent.page_bytes) != (terms.format, terms.page_tokens, terms.page_bytes):
            return self._fail(Reason.FORMAT, f"the sender's pages have format {intent.format:016x}, ours {terms.format:016x}")
        if intent.scope != terms.scope:
            return self._fail(Reason.SCOPE, "the intent names another scope than the request")
        same = (intent.prompt_tokens, intent.tokens_digest) == (terms.prompt_tokens, terms.tokens_digest)
        whole = intent.valid_tokens <= terms.prompt_tokens and intent.pages == -(-intent.valid_tokens // terms.page_tokens)
        if not same or not whole or terms.valid_tokens not in (None, intent.valid_tokens):
            what = f"{intent.valid_tokens} of {intent.prompt_tokens} tokens in {intent.pages} pages are intended"
            return self._fail(Reason.TOKENS, f"{what}; {terms.prompt_tokens} tokens are expected")
        self.pages = intent.pages
        if intent.transport != terms.transport:
            return self._fail(Reason.TRANSPORT, "the two ends use different transports")
        self.state = ReceiveState.ASKED
        return [Lease(intent)]

    def _leased(self, what: tuple[list[bytes], list[int]]) -> Actions:
        self._present_folds, self._stamps = what
        self.state = ReceiveState.GRANTED
        grant = self._next(Grant, len(self._present_folds), packed_stamps(self._stamps))
        self._agreed = grant_digest(self._key, grant)
        return [Say(grant)]

    def _leased_late(self, _what: object) -> Actions:
        """The session failed while the pool was asked. Nothing was ever in flight."""
        return [Drop(), Settle(True)]

    def _refused(self, failure: Failure) -> Actions:
        return self._fail(failure.reason, failure.detail)

    def _announced(self, message: PagesReady) -> Actions:
        first = len(self._present_folds) + len(self.moves)
        try:
            stamps, folds = unpacked_stamps(message.stamps), split_folds(message.folds)
        except MessageInvalid as error:
            return self._fail(Reason.PROTOCOL, str(error))
        if message.first_ordinal != first or not folds or len(stamps) != 2 * len(folds) or first + len(folds) > self.pages:
            what = f"{len(folds)} pages from ordinal {message.first_ordinal}; {first} is next of {self.pages}"
            return self._fail(Reason.PROTOCOL, what)
        pages = pages_of(self._stamps)[len(self.moves) :]
        moves = tuple(
            Move(first + i, stamps[2 * i], stamps[2 * i + 1], page, fold, self._filled(first + i))
            for i, (page, fold) in enumerate(zip(pages, folds, strict=False))
        )
        if any(move.source_page >= 2**31 for move in moves):
            return self._fail(Reason.PROTOCOL, "a page number is out of bounds")
        if self._moving_since_s is None:
            self._moving_since_s = self._now_s
        self.moves.extend(moves)
        return [Fetch(moves)]

    def _filled(self, ordinal: int) -> int:
        size = self.terms.page_tokens
        return min(size, self.valid_tokens - ordinal * size)

    def _came(self, what: tuple[int, int]) -> Actions:
        first_ordinal, pages = what
        present = len(self._present_folds)
        if first_ordinal != present + self._landed or self._landed + pages > len(self.moves):
            return self._fail(
                Reason.TRANSPORT, f"{pages} pages from ordinal {first_ordinal} have landed; {present + self._landed} was next"
            )
        self._landed += pages
        self._heard_s = self._now_s
        self._moving_since_s = None if self._landed == len(self.moves) else self._now_s
        return [self._say(Taken, present + self._landed), *self._fence_when_complete()]

    def _declared(self, manifest: Manifest) -> Actions:
        terms = self.terms
        present = len(self._present_folds)
        if manifest.folds[: 16 * present] != b"".join(self._present_folds):
            return self._fail(Reason.TWIN, f"of {present} pages that are here already, the sender has others")
        sent = packed_stamps(word for move in self.moves for word in (move.source_page, move.source_nonce))
        folds = b"".join((*self._present_folds, *(move.fold for move in self.moves)))
        said = (manifest.pages, manifest.prompt_tokens, manifest.tokens_digest, manifest.grant, manifest.stamps, manifest.folds)
        known = (self.pages, terms.prompt_tokens, terms.tokens_digest, self._agreed, sent, folds)
        self._next_token = manifest.next_token
        follows = manifest.next_token is None or self.valid_tokens == terms.prompt_tokens
        complete = present + len(self.moves) == self.pages
        if said != known or not complete or not follows or manifest.whole != self._whole_of(folds):
            return self._fail(
                Reason.MANIFEST, f"{present + len(self.moves)} of {self.pages} pages were announced, {manifest.pages} are declared"
            )
        self.state = ReceiveState.DECLARED
        self._whole = manifest.whole
        return self._fence_when_complete()

    def _fence_when_complete(self) -> Actions:
        if self.state is not ReceiveState.DECLARED or self._landed != len(self.moves):
            return []
        self.state = ReceiveState.FENCING
        return [Fence()]

    def _quiet_or_not(self, quiet: bool) -> Actions:
        if not quiet:
            return self._fail(Reason.TRANSPORT, "everything has landed, and the transport cannot say that it is quiet")
        self.state = ReceiveState.PROVING
        return [Prove()]

    def _proven(self, folds: Sequence[bytes]) -> Actions:
        if self._whole_of(b"".join(folds)) != self._whole:
            return self._fail(Reason.MANIFEST, "what stands in our memory is not what was declared")
        self.state = ReceiveState.COMMITTED
        self.settled = True
        self.outcome = Delivered(self.pages, len(self.moves), self._whole, self._next_token)
        return [Commit(), self._say(Receipt, self.pages, self._whole), Ended(self.outcome)]

    def _fenced_after_abort(self, quiet: bool) -> Actions:
        return self._settle(True) if quiet else []

    def _whole_of(self, folds: bytes) -> bytes:
        if self._intent is None:
            raise LawBroken(Law.L9, "a manifest before its intent")
        stamps = packed_stamps(word for move in self.moves for word in (move.source_page, move.source_nonce))
        return whole_digest(self._key, self._intent, grant=self._agreed, stamps=stamps, folds=folds, next_token=self._next_token)


_CLOSED = frozenset({ReceiveState.COMMITTED, ReceiveState.ABORTING, ReceiveState.FAILED})
_OPEN = tuple(state for state in ReceiveState if state not in _CLOSED)
_MOVING = (ReceiveState.GRANTED, ReceiveState.DECLARED)

_TABLE: Mapping[tuple[ReceiveState, Event], Callable[[ReceiveSession, Any], Actions]] = {
    (ReceiveState.WAITING, Event.INTENT): ReceiveSession._intended,
    (ReceiveState.ASKED, Event.LEASED): ReceiveSession._leased,
    (ReceiveState.ASKED, Event.REFUSED): ReceiveSession._refused,
    (ReceiveState.GRANTED, Event.PAGES): ReceiveSession._announced,
    (ReceiveState.GRANTED, Event.MANIFEST): ReceiveSession._declared,
    **{(state, Event.LANDED): ReceiveSession._came for state in _MOVING},
    **{(state, Event.BROKEN): ReceiveSession._refused for state in (*_MOVING, ReceiveState.PROVING)},
    (ReceiveState.FENCING, Event.FENCED): ReceiveSession._quiet_or_not,
    (ReceiveState.PROVING, Event.PROVEN): ReceiveSession._proven,
    (ReceiveState.ABORTING, Event.FENCED): ReceiveSession._fenced_after_abort,
    (ReceiveState.FAILED, Event.LEASED): ReceiveSession._leased_late,
    **{(state, Event.ALIVE): ReceiveSession._nothing for state in _OPEN if state is not ReceiveState.WAITING},
    **{(state, Event.ABORT): ReceiveSession._aborted for state in _OPEN},
}
