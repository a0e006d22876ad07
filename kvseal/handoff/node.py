"""What a node uses: every hand-off that it sends, every hand-off that it receives.

Owns the join of sessions, pages and transport at the sending end; the receiving end is `receiving`. Never speaks to a socket itself:
messages come in by `message` and leave by `outbox`, wherever the node's control links are. Everything is called from the engine's thread,
between steps. Laws L2 (what a session holds is given back once), L8, L9, L11, L12 (counters).

Once per turn of its loop, a node does::

    for message in arrived: sending.message(message, now_s) or receiving.message(message, now_s), by message.role
    sending.turn(now_s); receiving.turn(now_s)                              # polls the transport, keeps deadlines
    for message in (*sending.outbox(), *receiving.outbox()): to message.receiver or message.sender
    for end in (*sending.ended(), *receiving.ended()): submit, recompute or fail the request
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.handoff.messages import AnyMessage, Reason, tokens_digest, unpacked_stamps
from kvseal.handoff.proof import Memory, PageFault, close_tail
from kvseal.handoff.receiving import Receiving
from kvseal.handoff.send_session import SendSession
from kvseal.handoff.session import Action, Actions, Ended, Offer, Patience, Say, Terms, Unpin, Withdraw
from kvseal.handoff.transport import Transport
from kvseal.handoff.words import Counters, End
from kvseal.kv.handles import Pin, Ticket
from kvseal.kv.manager import KVManager
from kvseal.kv.prefix_key import PackedTokens, pack_tokens

__all__ = ["Counters", "End", "Receiving", "Sending"]


@dataclass(frozen=True, slots=True)
class Tail:
    """The last page of a sequence, not full, closed by its holder. `ticket` keeps it until the hand-off has let go of it."""

    ticket: Ticket
    fold: bytes


@dataclass(slots=True)
class _Out:
    session: SendSession
    pin: Pin
    ticket: Ticket | None = None
    """Of the last page, if it is not full."""


class Sending:
    """All hand-offs that this process sends. `key` (at least 16 bytes) is shared by all nodes; `memory`: the arena, [pages, page_bytes]."""

    def __init__(self, kv: KVManager, transport: Transport, *, key: bytes, memory: Memory, patience: Patience | None = None) -> None:
        self.counters = Counters()
        self._kv = kv
        self._transport = transport
        self._key = key
        self._memory = memory
        self._patience = patience or Patience()
        self._out: dict[str, _Out] = {}
        self._outbox: list[AnyMessage] = []
        self._ended: list[End] = []

    def begin(
        self,
        handoff: str,
        *,
        receiver: str,
        scope: Scope,
        tokens: Sequence[int] | PackedTokens,
        valid_tokens: int,
        deadline_s: float,
        now_s: float,
    ) -> None:
        """Says the Intent. `tokens`: the whole sequence; `valid_tokens`: how many of them are handed over, at least one: all tokens of a
        prompt whose answer goes on elsewhere, or as many as whole pages hold."""
        packed, geometry = pack_tokens(tokens), self._kv.geometry
        if handoff in self._out or not 0 < valid_tokens <= len(packed):
            raise LawBroken(Law.L11, f"hand-off {handoff} of {valid_tokens} tokens is begun twice, or longer than its {len(packed)} tokens")
        terms = Terms(
            handoff=handoff,
            sender=self._transport.incarnation,
            receiver=receiver,
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
        session = SendSession(terms, key=self._key, endpoint=self._transport.endpoint, patience=self._patience, now_s=now_s)
        self._out[handoff] = _Out(session, self._kv.pool.pin(array("Q"), scope))
        self._do(handoff, session.start(now_s))

    def knows(self, handoff: str) -> bool:
        """Whether a hand-off with this id is open here."""
        return handoff in self._out

    def close_tail(self, scope: Scope, stamp: array[int], ordinal: int, filled: int) -> Tail | PageFault:
        """Closes a leased page (page, nonce) that has `filled` slots, not all, and will get no more, for `sealed`. Whoever calls this
        holds the page; it stays where it is, even when that lease ends, until the hand-off or `Tail.ticket` has been given back."""
        page, nonce = stamp
        fold = close_tail(self._memory, self._kv.geometry, scope, page, nonce, ordinal, filled)
        return fold if isinstance(fold, PageFault) else Tail(self._kv.pool.ticket(stamp), fold)

    def sealed(
        self, handoff: str, pin: Pin, stamps: Sequence[int], now_s: float, *, tail: Tail | None = None, next_token: int | None = None
    ) -> None:
        """The next pages of the sequence, in order of ordinal from 0, are sealed; `pin` holds them until this returns. `tail`: the last
        page, if it is not full, taken over; `next_token`: with the last page, what was sampled after it. No effect once the hand-off has
        ended, and for pages past those that are handed over."""
        out = self._out.get(handoff)
        if out is None or not out.session.open:
            if tail is not None:
                tail.ticket.release()
            return
        if not pin.open:
            raise LawBroken(Law.L3, "pages are handed over that nobody holds")
        room = out.session.pages - out.session.sealed_pages
        fresh = array("Q", stamps[: 2 * room])
        folds = [self._kv.pool.digest(page) for page in fresh[::2]]
        self._kv.pool.replace_pins(out.pin, out.pin.pages, fresh)
        if tail is not None:
            out.ticket = tail.ticket
            fresh.extend(tail.ticket.stamps)
            folds.append(tail.fold)
        if fresh:
            self._do(handoff, out.session.sealed(fresh, folds, now_s, next_token))

    def cancel(self, handoff: str, reason: Reason, now_s: float) -> None:
        """No effect when it has ended."""
        out = self._out.get(handoff)
        if out is not None:
            self._do(handoff, out.session.cancel(reason))

    def peer_gone(self, incarnation: str, now_s: float) -> None:
        """That process is no more, or is another one now: every hand-off to it fails."""
        for handoff, out in list(self._out.items()):
            if out.session.terms.receiver == incarnation:
                self._do(handoff, out.session.cancel(Reason.PEER_GONE))

    def message(self, message: AnyMessage, now_s: float) -> None:
        out = self._out.get(message.handoff)
        if out is None:
            self.counters.ignored_messages += 1
            return
        ignored = out.session.ignored
        self._do(message.handoff, out.session.receive(message, now_s))
        self.counters.ignored_messages += out.session.ignored - ignored

    def turn(self, now_s: float) -> None:
        for handoff, out in list(self._out.items()):
            self._do(handoff, out.session.tick(now_s))

    def outbox(self) -> list[AnyMessage]:
        """What is to be sent now, in order."""
        found, self._outbox = self._outbox, []
        return found

    def ended(self) -> list[End]:
        """Hand-offs whose outcome has been decided since the last call."""
        found, self._ended = self._ended, []
        return found

    @property
    def open_handoffs(self) -> int:
        """Those that hold pins: not ended, or still read by the transport."""
        return len(self._out)

    # --- inside ----------------------------------------------------------------------------------------------

    def _do(self, handoff: str, actions: Actions) -> None:
        out = self._out[handoff]
        for action in actions:
            self._act(handoff, out, action)

    def _act(self, handoff: str, out: _Out, action: Action) -> None:
        match action:
            case Say(message):
                self._outbox.append(message)
            case Offer(stamps):
                self._transport.send(handoff, out.session.terms.receiver, unpacked_stamps(stamps))
            case Withdraw():  # `turn` brings it again until it is quiet.
                self._do(handoff, out.session.withdrawn(self._transport.withdraw(handoff)))
            case Unpin():
                out.pin.release()
                self._kv.cache.unpinned(out.pin.stamps)
                if out.ticket is not None:
                    out.ticket.release()
                del self._out[handoff]
            case Ended(outcome):
                self.counters.count(outcome)
                self._ended.append(End(handoff, outcome))
            case _:
                raise LawBroken(Law.L9, f"{type(action).__name__} is no action of a sender")
