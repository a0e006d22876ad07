"""The sending end of a hand-off, as a pure state machine.

Owns what the sender may say when, and when the receipt is good. See `session` for the picture and the laws.
"""

from __future__ import annotations

from array import array
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
    unpacked_stamps,
    whole_digest,
)
from kvseal.handoff.session import (
    Actions,
    Delivered,
    Ended,
    Event,
    Offer,
    Patience,
    Say,
    Session,
    Terms,
    Unpin,
    Withdraw,
    pages_of,
)


class SendState(Enum):
    NEW = auto()
    OFFERED = auto()
    GRANTED = auto()
    DECLARED = auto()
    DELIVERED = auto()
    FAILED = auto()


class SendSession(Session):
    """One hand-off at its sender. Every method returns the actions to be done, in order."""

    def __init__(self, terms: Terms, *, key: bytes, endpoint: bytes, patience: Patience, now_s: float) -> None:
        super().__init__(terms, Role.SENDER, key=key, patience=patience, now_s=now_s)
        self.state: SendState = SendState.NEW
        self._endpoint = endpoint
        self._stamps = array("Q")
        self._folds: list[bytes] = []
        self._next_token: int | None = None
        self._announced = 0
        """Ordinals below this one need no more announcing: present there, or announced."""
        self._intent: Intent | None = None
        self._grant: Grant | None = None
        self._whole = b""

    @property
    def open(self) -> bool:
        return self.state not in _CLOSED

    @property
    def sealed_pages(self) -> int:
        """How many pages, from ordinal 0 on, this session knows."""
        return len(self._folds)

    def start(self, now_s: float) -> Actions:
        self._pass_time(now_s)
        return self._happened(Event.START)

    def sealed(self, stamps: Sequence[int], folds: Sequence[bytes], now_s: float, next_token: int | None = None) -> Actions:
        """The next pages (page, nonce, ...; their digests) are sealed here, or closed if it is the last and not full, in order of ordinal
        from 0. May come before the grant; pages past the last one that is handed over are not taken. The last one makes the manifest, and
        brings the token that follows, if it is known."""
        if len(stamps) != 2 * len(folds):
            raise LawBroken(Law.L9, f"{len(stamps)} words are no stamps of {len(folds)} pages")
        self._pass_time(now_s)
        return self._happened(Event.SEALED, (stamps, folds, next_token))

    def withdrawn(self, quiet: bool) -> Actions:
        """The transport's answer to `Withdraw`."""
        return self._happened(Event.WITHDRAWN, quiet)

    # --- inside ----------------------------------------------------------------------------------------------

    def _handler(self, event: Event) -> Callable[[Any], Actions] | None:
        handler = _TABLE.get((self.state, event))
        return None if handler is None else partial(handler, self)

    def _still_settling(self) -> Actions:
        return [] if self.settled else [Withdraw()]

    def _give_up(self) -> Actions:
        self.state = SendState.FAILED
        return [Withdraw()]

    def _started(self, _what: None) -> Actions:
        terms = self.terms
        self.state = SendState.OFFERED
        self._heard_s = self._now_s
        self._intent = self._next(
            Intent,
            terms.scope,
            terms.format,
            terms.page_tokens,
            terms.page_bytes,
            terms.prompt_tokens,
            self.pages,
            terms.valid_tokens,
            terms.tokens_digest,
            terms.deadline_s,
            terms.transport,
            self._endpoint,
        )
        return [Say(self._intent)]

    def _keep(self, what: tuple[Sequence[int], Sequence[bytes], int | None]) -> Actions:
        stamps, folds, self._next_token = what
        room = self.pages - len(self._folds)
        self._stamps.extend(stamps[: 2 * room])
        self._folds.extend(folds[:room])
        return []

    def _keep_and_announce(self, what: tuple[Sequence[int], Sequence[bytes], int | None]) -> Actions:
        self._keep(what)
        return self._announce()

    def _granted(self, grant: Grant) -> Actions:
        try:
            stamps = unpacked_stamps(grant.stamps)
        except MessageInvalid as error:
            return self._fail(Reason.PROTOCOL, str(error))
        pages = pages_of(stamps)
        if grant.present_pages + len(pages) != self.pages or len(set(pages)) != len(pages) or 0 in stamps[1::2]:
            return self._fail(Reason.PROTOCOL, f"the grant names {grant.present_pages} + {len(pages)} pages for {self.pages}")
        self.state = SendState.GRANTED
        self._grant = grant
        self._announced = grant.present_pages
        return self._announce()

    def _announce(self) -> Actions:
        """Whatever is sealed and not announced yet; then, once, the manifest."""
        actions: Actions = []
        known, first = len(self._folds), self._announced
        if known > first:
            stamps = packed_stamps(self._stamps[2 * first : 2 * known])
            actions += [Offer(stamps), self._say(PagesReady, first, stamps, b"".join(self._folds[first:known]))]
            self._announced = known
        if known == self.pages:
            actions.append(self._declare())
        return actions

    def _declare(self) -> Any:
        terms, grant, intent = self.terms, self._grant, self._intent
        if grant is None or intent is None:
            raise LawBroken(Law.L9, "a manifest before its grant")
        agreed = grant_digest(self._key, grant)
        stamps = packed_stamps(self._stamps[2 * grant.present_pages :])
        folds = b"".join(self._folds)
        follows = self._next_token
        self._whole = whole_digest(self._key, intent, grant=agreed, stamps=stamps, folds=folds, next_token=follows)
        self.state = SendState.DECLARED
        return self._say(Manifest, self.pages, terms.prompt_tokens, terms.tokens_digest, agreed, stamps, folds, follows, self._whole)

    def _taken(self, message: Taken) -> Actions:
        if message.ordinals > self._announced:
            return self._fail(Reason.PROTOCOL, f"{message.ordinals} ordinals are taken, {self._announced} were announced")
        return []

    def _receipted(self, receipt: Receipt) -> Actions:
        if receipt.pages != self.pages or receipt.whole != self._whole:
            return self._fail(Reason.MANIFEST, "the receipt is not that of what was sent")
        self.state = SendState.DELIVERED
        sent = self.pages - (self._grant.present_pages if self._grant is not None else 0)
        self.outcome = Delivered(self.pages, sent, self._whole, self._next_token)
        return [Withdraw(), Ended(self.outcome)]

    def _withdrawn(self, quiet: bool) -> Actions:
        if not quiet or self.settled:
            return []
        self.settled = True
        return [Unpin()]


_CLOSED = frozenset({SendState.DELIVERED, SendState.FAILED})
_OPEN = tuple(state for state in SendState if state not in _CLOSED)

_TABLE: Mapping[tuple[SendState, Event], Callable[[SendSession, Any], Actions]] = {
    (SendState.NEW, Event.START): SendSession._started,
    (SendState.NEW, Event.SEALED): SendSession._keep,
    (SendState.OFFERED, Event.SEALED): SendSession._keep,
    (SendState.OFFERED, Event.GRANT): SendSession._granted,
    (SendState.GRANTED, Event.SEALED): SendSession._keep_and_announce,
    (SendState.GRANTED, Event.TAKEN): SendSession._taken,
    (SendState.DECLARED, Event.SEALED): SendSession._nothing,
    (SendState.DECLARED, Event.TAKEN): SendSession._taken,
    (SendState.DECLARED, Event.RECEIPT): SendSession._receipted,
    **{(state, Event.ALIVE): SendSession._nothing for state in _OPEN if state is not SendState.NEW},
    **{(state, Event.ABORT): SendSession._aborted for state in _OPEN if state is not SendState.NEW},
    **{(state, Event.WITHDRAWN): SendSession._withdrawn for state in _CLOSED},
}
