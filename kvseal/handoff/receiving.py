"""The receiving end of a node: every hand-off that it takes.

Owns the leases, tickets and pins of what arrives, the proof over our own memory before anything becomes valid, and the quarantine of pages
whose writer could not be proven gone. Called from the engine's thread, between steps. See `node` for how it is used.

A hand-off that is received holds a cache grant of its own. When the receipt is complete the full pages are sealed and published under it,
like pages that were computed here, and the grant, with a last page that is not full, goes to the request that waits for it; when it is not,
nothing of it was ever visible.

Laws: L1 and L2 (all pages or none), L3 (sender's nonce before the commit, ours after it), L5 and L9 (valid by the receipt alone), L7, L8
(the ticket is open until the transport is quiet; else quarantine, with a cap, an alarm and a way back), L11, L12.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvseal.core.errors import LawBroken
from kvseal.core.ids import RequestId, Scope
from kvseal.core.laws import Law
from kvseal.handoff.messages import Abort, AnyMessage, Intent, Reason, Role, tokens_digest
from kvseal.handoff.proof import Landing, Memory
from kvseal.handoff.prover import Proof, Prover, ProverThread
from kvseal.handoff.receive_session import ReceiveSession, ReceiveState
from kvseal.handoff.session import Action, Actions, Commit, Delivered, Drop, Ended, Fence, Fetch, Lease, Patience, Prove, Say, Settle, Terms
from kvseal.handoff.transport import Landed, Lost, Report, Source, Transport
from kvseal.handoff.words import Counters, End
from kvseal.kv.capacity import NeverFits
from kvseal.kv.handles import Ticket
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.pool import QuietProof
from kvseal.kv.prefix_key import TOKEN_BYTES, PackedTokens, pack_tokens

MAX_EARLY_INTENTS = 256
"""Intents that wait for their request."""
MAX_REMEMBERED = 1024
"""Ended hand-offs whose late or replayed Intent is answered at once."""

_log = logging.getLogger("kvseal.handoff")


@dataclass(slots=True)
class _In:
    session: ReceiveSession
    tokens: PackedTokens
    scope: Scope
    landing: Landing
    waits: bool
    asked_s: float = 0.0
    """When the Intent came."""
    grant: Grant | None = None
    ticket: Ticket | None = None
    wants_pages: bool = False


class Receiving:
    """All hand-offs that this process receives. `memory`: the arena, [pages, page_bytes]. `quarantine_cap_pages`: with more than these in
    quarantine because of hand-offs, the transport is torn down to get them back (0: a tenth of the pool). `prover`: None: a thread."""

    def __init__(
        self,
        kv: KVManager,
        transport: Transport,
        *,
        key: bytes,
        memory: Memory,
        patience: Patience | None = None,
        quarantine_cap_pages: int = 0,
        prover: Prover | None = None,
    ) -> None:
        self.counters = Counters()
        self._kv = kv
        self._transport = transport
        self._key = key
        self._memory = memory
        self._patience = patience or Patience()
        self._prover = prover or ProverThread()
        self._cap_pages = quarantine_cap_pages or max(1, kv.pool.pages // 10)
        self._in: dict[str, _In] = {}
        self._early: dict[str, tuple[Intent, float]] = {}
        self._over: dict[str, None] = {}
        self._quarantine: dict[str, array[int]] = {}
        self._next_reset_s = float("-inf")
        self._outbox: list[AnyMessage] = []
        self._ended: list[End] = []

    def expect(
        self,
        handoff: str,
        *,
        sender: str,
        scope: Scope,
        tokens: Sequence[int] | PackedTokens,
        deadline_s: float,
        now_s: float,
        valid_tokens: int | None = None,
        waits: bool = True,
    ) -> None:
        """The sequence whose pages `sender` (an incarnation) will hand over; its Intent may come, or has come. `valid_tokens`: exactly so
        many of its tokens; None: as many as the Intent says. Not `waits`: nobody waits for it, and its sender holds pages for it,
        so without room at once it is refused. Raises `LawBroken` (L11) for an id that is known here."""
        if handoff in self._in or handoff in self._over:
            raise LawBroken(Law.L11, f"hand-off {handoff} is expected a second time")
        packed, geometry = pack_tokens(tokens), self._kv.geometry
        terms = Terms(
            handoff=handoff,
            sender=sender,
            receiver=self._transport.incarnation,
            scope=bytes(scope),
            format=geometry.format,
            page_tokens=geometry.page_tokens,
            page_bytes=geometry.page_bytes,
            prompt_tokens=len(packed),
            valid_tokens=valid_tokens,
            tokens_digest=tokens_digest(self._key, packed),
            deadline_s=deadline_s,
            transport=self._transport.name,
        )
        session = ReceiveSession(terms, key=self._key, patience=self._patience, now_s=now_s)
        self._in[handoff] = _In(session, packed, scope, Landing(self._memory, geometry, scope), waits)
        early = self._early.pop(handoff, None)
        if early is not None:
            self._do(handoff, session.receive(early[0], now_s), now_s)

    def knows(self, handoff: str) -> bool:
        """Whether this id is expected here, or has been."""
        return handoff in self._in or handoff in self._over

    def cancel(self, handoff: str, reason: Reason, now_s: float) -> None:
        """No effect when it has ended."""
        if handoff in self._in:
            self._do(handoff, self._in[handoff].session.cancel(reason), now_s)

    def peer_gone(self, incarnation: str, now_s: float) -> None:
        """That process is no more, or is another one now: every hand-off from it fails."""
        for handoff, one in list(self._in.items()):
            if one.session.terms.sender == incarnation:
                self._do(handoff, one.session.cancel(Reason.PEER_GONE), now_s)
        for handoff, (intent, _) in list(self._early.items()):
            if intent.sender == incarnation:
                del self._early[handoff]

    def message(self, message: AnyMessage, now_s: float) -> None:
        one = self._in.get(message.handoff)
        if one is not None:
            ignored = one.session.ignored
            self._do(message.handoff, one.session.receive(message, now_s), now_s)
            self.counters.ignored_messages += one.session.ignored - ignored
        elif isinstance(message, Abort) and self._early.pop(message.handoff, None) is not None:
            return
        elif isinstance(message, Intent) and message.receiver == self._transport.incarnation and message.handoff not in self._early:
            self._came_early(message, now_s)
        else:
            self.counters.ignored_messages += 1

    def turn(self, now_s: float) -> None:
        """Takes what the transport has done, keeps deadlines, asks again for pages and for proof."""
        for report in self._transport.poll():
            self._reported(report, now_s)
        for proof in self._prover.done():
            self._proven(proof, now_s)
        for handoff, one in list(self._in.items()):
            self._do(handoff, one.session.tick(now_s), now_s)
            if one.wants_pages:
                self._lease(one, handoff, now_s)
        for handoff, (intent, came_s) in list(self._early.items()):
            if now_s - came_s >= self._patience.stall_s / 2:
                del self._early[handoff]
                self._turn_away(intent, "no request here waits for it")
        if self._quarantine:
            self._seek_proof(now_s)

    def outbox(self) -> list[AnyMessage]:
        """What is to be sent now, in order."""
        found, self._outbox = self._outbox, []
        return found

    def ended(self) -> list[End]:
        """Hand-offs whose outcome has been decided since the last call. Each grant in them is the caller's to drop."""
        found, self._ended = self._ended, []
        return found

    @property
    def open_handoffs(self) -> int:
        """Those that hold pages or wait: not ended, or not yet quiet."""
        return len(self._in)

    def close(self) -> None:
        """No page of the arena is read for a proof after this. Safe to call twice."""
        self._prover.close()

    # --- intents without a request ---------------------------------------------------------------------------

    def _came_early(self, intent: Intent, now_s: float) -> None:
        if intent.handoff in self._over:
            self._turn_away(intent, "this hand-off has ended here")
        elif len(self._early) >= MAX_EARLY_INTENTS:
            self._turn_away(intent, f"{MAX_EARLY_INTENTS} intents wait for their request already")
        else:
            self._early[intent.handoff] = (intent, now_s)

    def _turn_away(self, intent: Intent, why: str) -> None:
        self._outbox.append(Abort(intent.handoff, intent.sender, intent.receiver, Role.RECEIVER, 0, Reason.CANCELLED, why))

    # --- what the sessions want ------------------------------------------------------------------------------

    def _reported(self, report: Report, now_s: float) -> None:
        one = self._in.get(report.transfer)
        if one is None:
            return
        if isinstance(report, Landed):
            self.counters.pages += report.pages
            self.counters.bytes += report.bytes
            self._do(report.transfer, one.session.landed(report.first_ordinal, report.pages, now_s), now_s)
        else:
            self._do(report.transfer, one.session.broken(*_reason(report)), now_s)

    def _do(self, handoff: str, actions: Actions, now_s: float) -> None:
        one = self._in[handoff]
        for action in actions:
            self._act(handoff, one, action, now_s)
        if one.session.settled and self._in.get(handoff) is one:
            del self._in[handoff]
            self._over[handoff] = None
            if len(self._over) > MAX_REMEMBERED:
                del self._over[next(iter(self._over))]

    def _act(self, handoff: str, one: _In, action: Action, now_s: float) -> None:
        session = one.session
        match action:
            case Say(message):
                self._outbox.append(message)
            case Lease():
                one.wants_pages, one.asked_s = True, now_s
                self._lease(one, handoff, now_s)
            case Fetch(moves):
                self._transport.receive(handoff, _source_of(session), moves, one.landing)
            case Fence():
                self._do(handoff, session.fenced(self._fence(handoff)), now_s)
            case Prove():
                self._prover.begin(handoff, one.landing, session.moves)
            case Commit():
                self._commit(one)
            case Drop():
                one.wants_pages = False
                self._kv.drop(_held(one.grant))
            case Settle(quiet):
                self._settle(handoff, one, quiet)
            case Ended(outcome):
                one.wants_pages = False
                self.counters.count(outcome)
                if isinstance(outcome, Delivered):
                    self.counters.took(now_s - one.asked_s)
                self._ended.append(End(handoff, outcome, one.grant if session.state is ReceiveState.COMMITTED else None))
            case _:
                raise LawBroken(Law.L9, f"{type(action).__name__} is no action of a receiver")

    def _lease(self, one: _In, handoff: str, now_s: float) -> None:
        """All pages or none; none now means to ask again at the next turn, until the deadline, if somebody waits (L1)."""
        kv, session = self._kv, one.session
        valid_tokens = session.valid_tokens
        if self._pages_in_doubt() >= self._cap_pages:
            one.wants_pages = False
            self._do(handoff, session.refused(Reason.QUARANTINE_FULL, "too many pages wait for proof that their writer is gone"), now_s)
            return
        if isinstance(kv.verdict(valid_tokens, 0), NeverFits):
            one.wants_pages = False
            self._do(handoff, session.refused(Reason.NEVER_FITS, f"{session.pages} pages never fit"), now_s)
            return
        # One token more than the pages hold: the cache never gives all tokens of a sequence, and here it may give all full pages.
        tokens = PackedTokens(one.tokens.data[: TOKEN_BYTES * valid_tokens] + bytes(TOKEN_BYTES))
        cached = kv.probe(one.scope, tokens)
        grant = kv.admit(RequestId(handoff), one.scope, tokens, first_tokens=valid_tokens - cached)
        if grant is None and one.waits:
            return
        one.wants_pages = False
        if grant is None:
            self._do(handoff, session.refused(Reason.NO_ROOM, f"{session.pages} pages do not fit now, and nobody waits for them"), now_s)
            return
        one.grant = grant
        one.ticket = kv.pool.ticket(grant.lease.stamps)
        folds = [kv.pool.digest(page) for page in grant.pin.stamps[::2]]
        self._transport.expect(handoff, _source_of(session), grant.lease.stamps[::2], one.landing)
        self._do(handoff, session.leased(folds, grant.lease.stamps, now_s), now_s)

    def _proven(self, proof: Proof, now_s: float) -> None:
        """In our own memory, after the fence, every seal was compared once more, and every digest with the bytes that stand there."""
        one = self._in.get(proof.handoff)
        if one is None:
            return
        session = one.session
        if proof.fault is not None:
            self._do(proof.handoff, session.broken(Reason.SEAL, str(proof.fault)), now_s)
            return
        present = [self._kv.pool.digest(page) for page in _held(one.grant).pin.stamps[::2]]
        self._do(proof.handoff, session.proven([*present, *(move.fold for move in session.moves)]), now_s)

    def _commit(self, one: _In) -> None:
        """From the receipt on these pages are like pages that were computed here (L5, L7): the full ones sealed and published, one that is
        not full leased, to be gone on with."""
        grant, moves = _held(one.grant), one.session.moves
        one.landing.restamp(moves, one.session.granted_nonces)
        _ticket(one.ticket).release()
        end_tokens, size = one.session.valid_tokens, self._kv.geometry.page_tokens
        fresh = one.tokens.first(end_tokens)[grant.table.valid_tokens :]
        if fresh:
            self._kv.commit(grant, fresh, end_tokens, [move.fold for move in moves if move.filled == size])
        grant.cached_tokens = end_tokens

    # --- quiet, or not ---------------------------------------------------------------------------------------

    def _fence(self, handoff: str) -> bool:
        began_s = time.monotonic()
        read = not self._prover.let_go(handoff)
        quiet = self._transport.fence(handoff) and not read
        counters = self.counters
        counters.fences += 1
        counters.fence_waits += not quiet
        counters.fence_s += time.monotonic() - began_s
        return quiet

    def _settle(self, handoff: str, one: _In, quiet: bool) -> None:
        ticket = _ticket(one.ticket)
        if quiet:
            ticket.release()
            return
        ticket.expire()
        self._quarantine[handoff] = array("Q", ticket.stamps)
        self.counters.quarantined_pages += ticket.pages
        _log.error("hand-off %s: %d pages go to quarantine, the transport cannot say that it is quiet (L8)", handoff, ticket.pages)

    def _pages_in_doubt(self) -> int:
        """Aborted, and not proven quiet: draining still, or in quarantine."""
        draining = (one.ticket.pages for one in self._in.values() if one.session.state is ReceiveState.ABORTING and one.ticket is not None)
        return self.counters.quarantined_pages + sum(draining)

    def _seek_proof(self, now_s: float) -> None:
        """Asks the transport again, for each; past the cap, tears it down: nothing writes after that."""
        for handoff, stamps in list(self._quarantine.items()):
            if self._fence(handoff):
                self._readmit(handoff, stamps, "a later fence")
        held = self.counters.quarantined_pages
        if held <= self._cap_pages or now_s < self._next_reset_s:
            return
        self._next_reset_s = now_s + self._patience.stall_s
        self.counters.resets += 1
        _log.error("%d pages are in quarantine because of hand-offs, more than %d: the transport is torn down", held, self._cap_pages)
        if self._transport.reset():
            for handoff, stamps in list(self._quarantine.items()):
                self._readmit(handoff, stamps, "a reset")

    def _readmit(self, handoff: str, stamps: array[int], how: str) -> None:
        self._kv.pool.readmit(QuietProof(stamps, f"{how} of transport {self._transport.name}"))
        del self._quarantine[handoff]
        self.counters.quarantined_pages -= len(stamps) // 2
        self.counters.readmitted_pages += len(stamps) // 2


def _reason(lost: Lost) -> tuple[Reason, str]:
    return (Reason.TRANSPORT, lost.detail) if lost.fault is None else (Reason.SEAL, str(lost.fault))


def _source_of(session: ReceiveSession) -> Source:
    return Source(session.terms.sender, session.endpoint)


def _held(grant: Grant | None) -> Grant:
    if grant is None:
        raise LawBroken(Law.L2, "a hand-off without pages is told to use them")
    return grant


def _ticket(ticket: Ticket | None) -> Ticket:
    if ticket is None:
        raise LawBroken(Law.L8, "pages were in flight without a ticket")
    return ticket
