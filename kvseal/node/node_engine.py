"""An engine that is one node of several: it hands prompts over, takes them, and answers what was handed to it.

Owns the joining of the engine's steps with `handoff.node`: what is admitted here is offered, what is sealed here is offered on, what
arrives is submitted, what fails is computed here or fails. Everything happens on the engine's thread, between two steps. Never speaks
to a socket: messages come by `take` and leave by `outbox`.

Order, on the side that computes the prompt: its own admission first, then the Intent (L1); pages go as soon as they are sealed, while later
chunks are computed (L7). The last one, mostly not full, is closed before the step that completes the prompt is applied, since the request
ends with that step, and goes with the first token of the answer. On the side that answers: nothing of the request is known to the scheduler
until the hand-off has ended. If the receipt is complete, the request is submitted with all its pages and its first token, and the second is
computed in the next step. If it failed, the request is submitted all the same and computed here, or it fails (`--on-handoff-failure`);
nothing that arrived of it is ever read (L9).

Laws: L1, L8 (pages in transit belong to the session until it says that they are quiet), L9, L11 (every request ends once), L12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvseal.core.batch import Batch, BatchResult, TableView
from kvseal.core.clock import Clock
from kvseal.core.config import NodeConfig
from kvseal.core.errors import DeadlineExceeded, InvalidRequest, KVTransferFailed
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Cancelled, Failed, Refused, Usage
from kvseal.core.request import Request
from kvseal.exec.backend import Backend
from kvseal.handoff.messages import Abort, AnyMessage, MessageInvalid, Reason, Role, decode, encode
from kvseal.handoff.node import End, Receiving, Sending, Tail
from kvseal.handoff.proof import PageFault
from kvseal.handoff.session import Delivered
from kvseal.handoff.transport import Transport
from kvseal.kv.capacity import NeverFits
from kvseal.kv.feed import CacheFeed
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.prefix_key import pack_tokens
from kvseal.kv.reading import reading
from kvseal.node import peer_messages as p
from kvseal.node.engine import Computes, Engine
from kvseal.node.report import EngineStats, StartReport, with_handoffs
from kvseal.sched.receiving import HandoffScheduler

POLL_MS = 1
"""With a hand-off open and nothing to compute, look at the transport after this."""


@dataclass(slots=True)
class _Outgoing:
    """A request whose prompt is computed here for another node."""

    order: p.Prefill
    begun: bool = False
    sent_pages: int = 0


@dataclass(slots=True)
class _Incoming:
    """A request whose prompt is computed elsewhere."""

    order: p.Receive
    ends_at_s: float | None


class NodeEngine(Engine):
    """Made by `build.assemble_node`."""

    def __init__(
        self,
        *,
        report: StartReport,
        kv: KVManager,
        scheduler: HandoffScheduler,
        runner: Computes,
        backend: Backend,
        clock: Clock,
        node: NodeConfig,
        card: p.NodeCard,
        sending: Sending,
        receiving: Receiving,
        transport: Transport,
        feed: CacheFeed,
    ) -> None:
        super().__init__(report=report, kv=kv, scheduler=scheduler, runner=runner, backend=backend, clock=clock)
        self.card, self.name, self.incarnation = card, card.name, card.incarnation
        self._node = node
        self._elsewhere = scheduler
        self._sending = sending
        self._receiving = receiving
        self._transport = transport
        self._feed = feed
        kv.cache.feed = feed
        self._outgoing: dict[RequestId, _Outgoing] = {}
        self._incoming: dict[RequestId, _Incoming] = {}
        self._request_of: dict[str, RequestId] = {}
        """By hand-off: the incoming request that waits for it."""
        self.before_step: Callable[[], None] | None = None
        """Called when something has been said that should not wait until the step is over; `outbox` has it."""
        self._happened: list[Event] = []
        self._said: list[AnyMessage] = []
        self._recomputed = 0

    # --- requests ---

    @property
    def has_work(self) -> bool:
        return bool(self._happened) or super().has_work

    @property
    def poll_ms(self) -> int | None:
        """How long the loop may sleep when there is nothing to compute; None: until a message comes."""
        return POLL_MS if self._in_transit else None

    @property
    def _in_transit(self) -> bool:
        return bool(self._sending.open_handoffs or self._receiving.open_handoffs)

    def take(self, message: p.ToNode) -> None:
        """What comes of it is told by `step` and `outbox`."""
        match message:
            case p.Prefill():
                self._prefill(message)
            case p.Receive():
                self._receive(message)
            case p.Give():
                self._give(message)
            case p.Take(handoff, scope, tokens, sender, timeout_s):
                self._expect(handoff, scope, tokens, sender, timeout_s, waits=False)
            case p.Relay(handoff, _, body):
                self._relayed(handoff, body)
            case p.PeerGone(incarnation):
                self._sending.peer_gone(incarnation, self._clock.now_s())
                self._receiving.peer_gone(incarnation, self._clock.now_s())
            case p.HandoffLost(request_id):
                if (incoming := self._incoming.get(request_id)) is not None:
                    self._receiving.cancel(incoming.order.handoff, Reason.PEER_GONE, self._clock.now_s())
                    self._failed(request_id)

    def cancel(self, request_id: RequestId) -> None:
        now_s = self._clock.now_s()
        if (outgoing := self._outgoing.pop(request_id, None)) is not None and outgoing.begun:
            self._sending.cancel(outgoing.order.handoff, Reason.CANCELLED, now_s)
        if (incoming := self._incoming.get(request_id)) is not None:
            self._receiving.cancel(incoming.order.handoff, Reason.CANCELLED, now_s)
            self._forget(request_id)
            self._end(request_id, Cancelled(Usage(len(incoming.order.request.prompt_tokens), 0, 0)))
        super().cancel(request_id)

    def finish(self, request_id: RequestId) -> None:
        self.cancel(request_id) if request_id in self._outgoing or request_id in self._incoming else super().finish(request_id)

    def step(self) -> list[Event]:
        scheduler = self._elsewhere
        scheduler.held_elsewhere = self._in_transit
        batch = scheduler.schedule()
        if batch.rows:
            self._begin(batch)
            if self._outgoing and self.before_step is not None:
                self.before_step()
            result = self._runner.run(batch, self.kv.ledger_nonces)
            tails = self._closed_tails(batch, result) if self._outgoing else {}
            events = scheduler.apply(result)
            self._stepped_at_s = self._clock.now_s()
            if self._outgoing:
                self._offer(batch, events, tails)
        else:
            events = scheduler.take_events()
        for event in events:
            if isinstance(event, EndedEvent):
                self._gave_up(event)
        happened, self._happened = self._happened, []
        return happened + events

    # --- between steps ---

    def turn(self) -> None:
        """Lets the transport and the sessions go on. Once per turn of the loop."""
        now_s = self._clock.now_s()
        self._sending.turn(now_s)
        self._receiving.turn(now_s)
        self._sending.ended()
        for end in self._receiving.ended():
            self._arrived(end)
        for request_id, incoming in list(self._incoming.items()):
            if incoming.ends_at_s is not None and now_s >= incoming.ends_at_s:
                self._receiving.cancel(incoming.order.handoff, Reason.DEADLINE, now_s)
                self._forget(request_id)
                self._end(request_id, Failed(DeadlineExceeded("the request's deadline passed before it was complete")))

    def outbox(self) -> list[p.FromNode]:
        """What is to be sent to the router."""
        found: list[p.FromNode] = []
        said, self._said = self._said, []
        for message in (*said, *self._sending.outbox(), *self._receiving.outbox()):
            peer = message.receiver if message.role is Role.SENDER else message.sender
            found.append(p.Relay(message.handoff, peer, encode(message)))
        came, went = self._feed.take()
        if came or went:
            found.append(p.CacheChanges(came, went))
        return found

    def stats(self) -> EngineStats:
        return with_handoffs(super().stats(), self._sending.counters, self._receiving.counters, self._recomputed)

    def close(self) -> None:
        self._transport.close()
        self._receiving.close()
        super().close()

    # --- the side that computes the prompt ---

    def _prefill(self, order: p.Prefill) -> None:
        request = order.request
        try:
            request.checked(self.report.vocab_size)
        except InvalidRequest as error:
            self._end(request.request_id, self._elsewhere.refuse(error))
            return
        if (refused := self._elsewhere.submit(replace(request, max_output_tokens=1))) is not None:
            self._end(request.request_id, refused)
            return
        self._outgoing[request.request_id] = _Outgoing(order)

    def _begin(self, batch: Batch) -> None:
        """Those that are admitted now say their Intent."""
        for row in batch.rows:
            outgoing = self._outgoing.get(row.request_id)
            if outgoing is not None and not outgoing.begun:
                order, request = outgoing.order, outgoing.order.request
                outgoing.begun = self._start(
                    order.handoff, order.receiver, request.scope, request.prompt_tokens, len(request.prompt_tokens), order.timeout_s
                )
                if not outgoing.begun:
                    del self._outgoing[row.request_id]

    def _start(self, handoff: str, receiver: str, scope: Scope, tokens: Sequence[int], valid_tokens: int, timeout_s: float) -> bool:
        """Says the Intent. False: the id is somebody else's, who is not disturbed."""
        if self._sending.knows(handoff):
            return False
        self._sending.begin(
            handoff,
            receiver=receiver,
            scope=scope,
            tokens=tokens,
            valid_tokens=valid_tokens,
            deadline_s=timeout_s,
            now_s=self._clock.now_s(),
        )
        return True

    def _closed_tails(self, batch: Batch, result: BatchResult) -> dict[RequestId, Tail | PageFault]:
        """Last pages, not full, of prompts that the step has completed: held from here on, whatever the requests give back."""
        size, tails = self.report.page_tokens, dict[RequestId, Tail | PageFault]()
        for row, out in zip(batch.rows, result.rows, strict=True):
            ordinal, filled = divmod(row.end, size)
            if row.request_id in self._outgoing and out.token is not None and filled:
                stamp = row.table.stamps[2 * ordinal : 2 * ordinal + 2]
                tails[row.request_id] = self._sending.close_tail(row.table.scope, stamp, ordinal, filled)
        return tails

    def _offer(self, batch: Batch, events: Sequence[Event], tails: Mapping[RequestId, Tail | PageFault]) -> None:
        """Offers what the step has completed: sealed pages; and of a whole prompt the last page too, with the token that follows."""
        first = {event.request_id: event.tokens[0] for event in events if isinstance(event, TokensEvent)}
        for row in batch.rows:
            outgoing, tail = self._outgoing.get(row.request_id), tails.get(row.request_id)
            if outgoing is None:
                continue
            pages, token = row.table.valid_tokens // self.report.page_tokens, first.get(row.request_id)
            if isinstance(tail, PageFault):
                self._sending.cancel(outgoing.order.handoff, Reason.SEAL, self._clock.now_s())
            elif pages > outgoing.sent_pages or token is not None:
                self._sealed(outgoing.order.handoff, row.table, outgoing.sent_pages, pages, tail, token)
                outgoing.sent_pages = pages
            if token is not None:
                del self._outgoing[row.request_id]

    def _sealed(self, handoff: str, table: TableView, first: int, end: int, tail: Tail | None, next_token: int | None) -> None:
        now_s = self._clock.now_s()
        with reading(self.kv, table.scope, table.stamps[: 2 * end]) as pin:
            if pin is None:  # Private pages went with the request: what they followed was found broken.
                self._sending.cancel(handoff, Reason.SEAL, now_s)
                if tail is not None:
                    tail.ticket.release()
            else:
                self._sending.sealed(handoff, pin, table.stamps[2 * first : 2 * end], now_s, tail=tail, next_token=next_token)

    def _gave_up(self, event: EndedEvent) -> None:
        """A request that ended before its whole prompt was computed hands nothing over."""
        outgoing = self._outgoing.pop(event.request_id, None)
        if outgoing is not None and outgoing.begun:
            self._sending.cancel(outgoing.order.handoff, Reason.CANCELLED, self._clock.now_s())

    # --- the side that answers ---

    def _receive(self, order: p.Receive) -> None:
        request = order.request
        refused = self._never_fits(request)
        if refused is not None:
            self._end(request.request_id, refused)
            return
        ends_at_s = None if request.deadline_s is None else self._clock.now_s() + request.deadline_s
        self._incoming[request.request_id] = _Incoming(order, ends_at_s)
        if self._expect(order.handoff, request.scope, request.prompt_tokens, order.sender, order.timeout_s):
            self._request_of[order.handoff] = request.request_id
        else:
            self._failed(request.request_id)

    def _never_fits(self, request: Request) -> Refused | None:
        try:
            request.checked(self.report.vocab_size)
        except InvalidRequest as error:
            return self._elsewhere.refuse(error)
        verdict = self.kv.verdict(len(request.prompt_tokens), request.max_output_tokens)
        return self._elsewhere.refuse(verdict.error()) if isinstance(verdict, NeverFits) else None

    def _expect(self, handoff: str, scope: Scope, tokens: tuple[int, ...], sender: str, timeout_s: float, *, waits: bool = True) -> bool:
        """False: the id has been used. Whoever uses it again gets no hand-off; the first is not disturbed."""
        now_s, known = self._clock.now_s(), self._receiving.knows(handoff)
        if not known:
            self._receiving.expect(handoff, sender=sender, scope=scope, tokens=tokens, deadline_s=timeout_s, now_s=now_s, waits=waits)
        return not known

    def _arrived(self, end: End) -> None:
        request_id = self._request_of.get(end.handoff)
        if request_id is None:  # Nobody waits for it (any more): what has arrived stays in the prefix cache.
            if end.grant is not None:
                self.kv.drop(end.grant)
        elif not isinstance(end.outcome, Delivered) or end.grant is None:
            self._failed(request_id)
        else:
            self._go_on(request_id, end.grant, end.outcome.next_token)

    def _go_on(self, request_id: RequestId, grant: Grant, token: int | None) -> None:
        """In the pages that have arrived; with all of the prompt and no token to go on with, by way of the prefix cache."""
        answer = () if token is None or token >= self.report.vocab_size else (token,)
        if answer or grant.table.valid_tokens < len(self._incoming[request_id].order.request.prompt_tokens):
            self._submit(request_id, grant, answer)
        else:
            self.kv.drop(grant)
            self._submit(request_id)

    def _failed(self, request_id: RequestId) -> None:
        if self._node.on_failure == "fail":
            self._forget(request_id)
            why = "the cache pages of this request did not arrive from the node that computed them; nothing of them was used"
            self._end(request_id, Failed(KVTransferFailed(why)))
        else:
            self._recomputed += 1
            self._submit(request_id)

    def _submit(self, request_id: RequestId, grant: Grant | None = None, answer: tuple[int, ...] = ()) -> None:
        """`grant`: with what has arrived, and what is known of its answer."""
        incoming = self._forget(request_id)
        request = incoming.order.request
        if incoming.ends_at_s is not None:
            request = replace(request, deadline_s=max(0.0, incoming.ends_at_s - self._clock.now_s()))
        refused = self._elsewhere.submit(request) if grant is None else self._elsewhere.arrived(request, grant, answer)
        if refused is not None:
            self._end(request_id, refused)

    def _forget(self, request_id: RequestId) -> _Incoming:
        incoming = self._incoming.pop(request_id)
        if self._request_of.get(incoming.order.handoff) == request_id:
            del self._request_of[incoming.order.handoff]
        return incoming

    def _end(self, request_id: RequestId, outcome: Cancelled | Failed | Refused) -> None:
        self._happened.append(EndedEvent(request_id, outcome))

    # --- copies without a request ---

    def _give(self, order: p.Give) -> None:
        """Hands over the whole run of pages, or nothing: what has been evicted meanwhile is not worth computing again."""
        stamps = self.kv.cache.probe(order.scope, pack_tokens(order.tokens))
        pages = len(stamps) // 2
        if pages < (len(order.tokens) - 1) // self.report.page_tokens or not pages:
            names = (order.handoff, self.incarnation, order.receiver)
            self._said.append(Abort(*names, Role.SENDER, 0, Reason.CANCELLED, f"{pages} pages of it are cached here"))
            return
        valid_tokens = pages * self.report.page_tokens
        begun = self._start(order.handoff, order.receiver, order.scope, order.tokens, valid_tokens, order.timeout_s)
        with reading(self.kv, order.scope, stamps) as pin:
            if pin is not None and begun:
                self._sending.sealed(order.handoff, pin, stamps, self._clock.now_s())

    # --- messages of the sessions ---

    def _relayed(self, handoff: str, body: bytes) -> None:
        now_s = self._clock.now_s()
        try:
            message = decode(body)
        except MessageInvalid as error:
            reason = Reason.PROTOCOL if error.version is None else Reason.VERSION
            self._sending.cancel(handoff, reason, now_s)
            self._receiving.cancel(handoff, reason, now_s)
            return
        end = self._receiving if message.role is Role.SENDER else self._sending
        end.message(message, now_s)
