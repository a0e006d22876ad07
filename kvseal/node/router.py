"""The router: several nodes that look like one engine.

Owns every open request's placement, the relaying between nodes, and what happens when one of them dies, freezes or refuses. Offers what
`EngineClient` offers, so that `serve` does not know the difference. Never reads what hand-offs say, and never believes that a page has
arrived: the receiver's own receipt decides that (L9).

Limits (L1): what is served is the smallest of what any node serves; a longer request is refused here, before anything is sent anywhere.

Health is progress, not a socket: a node that has made no step, has not said that it is idle and has computed nothing for `frozen_after_s`
(or has computed without a step until it counts as stalled) gets nothing new, what it was computing for others is computed elsewhere, and
what has emitted nothing is placed again. A request is placed `MAX_ATTEMPTS` times at most, and never again once a token of it was emitted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvseal.core.clock import Clock, MonotonicClock
from kvseal.core.errors import ContextLengthExceeded, DeadlineExceeded, Draining, EngineDied, Overloaded
from kvseal.core.events import EndedEvent, Event
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Cancelled, Failed, Outcome, Refused, Usage
from kvseal.core.request import Request
from kvseal.kv.feed import FEED_KEY_BYTES
from kvseal.node import messages as m
from kvseal.node import peer_messages as p
from kvseal.node.build_node import feed_keys
from kvseal.node.client import EngineState, drained
from kvseal.node.errands import bring_back, prove
from kvseal.node.fleet import FROZEN_AFTER_S, LOOK_EVERY_S, Fleet
from kvseal.node.node_client import Leg, NodeClient
from kvseal.node.placement import DIRECT_TOKENS, place
from kvseal.node.report import FleetStats, StartReport
from kvseal.node.router_line import RouterLine
from kvseal.node.split_request import Next, SplitRequest
from kvseal.node.stream import RequestStream

HANDOFF_TIMEOUT_S = 600.0
"""From the Intent to the receipt: the prompt is computed meanwhile, and a large model takes its time. What ends a hand-off that has stalled
is silence, much earlier."""
QUEUED_TIMEOUT_S = 600.0
"""For the Intent to come: the node that computes the prompt may have a waiting line. A node that is dead or frozen is not waited for."""
MAX_ATTEMPTS = 3
GRACE_S = 1.0
"""A node ends a request that is late itself; one that has not, this much later, is not waited for."""

_log = logging.getLogger("kvseal.router")


class Router:
    """`secret` is that of the nodes. All methods belong to the event loop."""

    def __init__(
        self,
        nodes: Sequence[NodeClient],
        *,
        secret: bytes,
        on_failure: str = "recompute",
        frozen_after_s: float = FROZEN_AFTER_S,
        handoff_timeout_s: float = HANDOFF_TIMEOUT_S,
        direct_tokens: int = DIRECT_TOKENS,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self.fleet = Fleet(nodes, frozen_after_s=frozen_after_s, recomputes=on_failure == "recompute")
        self.counters: Counter[str] = Counter()
        self._early = on_failure == "recompute"
        self._handoff_timeout_s = handoff_timeout_s
        self._direct_tokens = direct_tokens
        self._keys = feed_keys(secret, self.fleet.report)
        self._requests: dict[RequestId, SplitRequest] = {}
        self._line = RouterLine()
        self._late_at_s: dict[RequestId, float] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._phase = EngineState.READY
        self._asked: asyncio.Task[None] | None = None
        for node in nodes:
            node.on_relay, node.on_lost = self._relay, self._gone
        self._watcher = asyncio.create_task(self._watch())

    # --- what an engine client offers ---

    @property
    def report(self) -> StartReport:
        return self.fleet.report

    @property
    def state(self) -> EngineState:
        return self.fleet.state if self._phase is EngineState.READY else self._phase

    @property
    def last_progress_age_s(self) -> float:
        return self.fleet.last_progress_age_s

    @property
    def restarts(self) -> int:
        return sum(node.restarts for node in self.fleet.nodes)

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    def submit(self, request: Request) -> RequestStream:
        """Never raises for the state of the nodes: what cannot be served now is a stream whose only event is its end."""
        if request.request_id in self._requests:
            raise ValueError("a request with this id is open; ids are made by the server and never reused")
        stream = RequestStream(self, request.request_id)
        refused = self._refusal(request)
        if refused is not None:
            stream.end(Refused(refused))
            return stream
        keys = [key[:FEED_KEY_BYTES] for key in self._keys.keys(request.scope, request.prompt_tokens)]
        one = SplitRequest(request, stream, keys, early=self._early)
        self._requests[request.request_id] = one
        self._idle.clear()
        if request.deadline_s is not None:
            self._late_at_s[request.request_id] = self._clock.now_s() + request.deadline_s + GRACE_S
        self._line.push(one)
        self._dispatch()
        return stream

    def cancel(self, request_id: RequestId) -> None:
        one = self._requests.get(request_id)
        if one is None:
            return
        one.cancelled = True
        if one.prefill is None and one.decode is None:
            self._finish(one, Cancelled(Usage(len(one.request.prompt_tokens), 0, 0)))
            return
        for leg in (one.prefill, one.decode):
            if leg is not None:
                leg.cancel()

    def finish(self, request_id: RequestId) -> None:
        """Its reader calls it complete: neither of its legs is needed any more."""
        one = self._requests.get(request_id)
        for leg in (one.prefill, one.decode) if one is not None else ():
            if leg is not None:
                leg.finish()

    async def stats(self) -> FleetStats:
        """Of all nodes that answer, added up, and of each. Raises `EngineDied` when none does."""
        stats = await self.fleet.stats()
        return replace(stats, waiting=stats.waiting + len(self._line), handoff={**stats.handoff, **self.counters})

    async def prove(self, scope: Scope) -> None:
        """Ready means ready: every node takes part in a hand-off before the first request. Raises `EngineDied`."""
        await prove(self.fleet, scope)

    async def drain(self, timeout_s: float) -> bool:
        """Takes nothing new and waits for what is open; True if all of it ended by itself, else the rest is cancelled."""
        self._phase = EngineState.DRAINING
        if await drained(self._idle, timeout_s, self._requests, self.cancel):
            return True
        for one in list(self._requests.values()):  # Their nodes do not even cancel.
            self._finish(one, Failed(Draining("the server is shutting down")))
        return False

    async def close(self) -> None:
        """Ends every node and every stream. Safe to call twice."""
        self._phase = EngineState.CLOSED
        self._watcher.cancel()
        await asyncio.gather(self._watcher, *(node.close() for node in self.fleet.nodes), return_exceptions=True)
        for one in list(self._requests.values()):
            self._finish(one, Failed(Draining("the server is shutting down")))

    # --- placing ---

    def _refusal(self, request: Request) -> ContextLengthExceeded | Draining | Overloaded | None:
        if self._phase is not EngineState.READY:
            return Draining("the server is shutting down")
        report = self.fleet.report
        if request.budget_tokens > report.served_context_tokens:
            return ContextLengthExceeded.of(
                prompt_tokens=len(request.prompt_tokens),
                max_output_tokens=request.max_output_tokens,
                max_servable_tokens=report.served_context_tokens,
                pool_tokens=report.pool_tokens,
            )
        if len(self._requests) >= report.max_queued + report.max_running:
            return Overloaded(f"{len(self._requests)} requests are open already; try again later", retry_after_s=5.0)
        return None

    def _dispatch(self) -> None:
        """Places those in line, as long as there is room for the first."""
        while (one := self._line.first()) is not None and self.fleet.has_room(one):
            self._line.pop()
            self._place(one)

    def _place(self, one: SplitRequest) -> None:
        """Opens the legs of a new attempt."""
        request = one.request
        prompt_tokens = len(request.prompt_tokens)
        prefills, decodes = self.fleet.candidates(one)
        placement = place(
            prompt_tokens,
            request.max_output_tokens,
            prefills,
            decodes,
            whole=request.sampling.prompt_logprobs is not None,
            direct_tokens=self._direct_tokens,
        )
        if placement is None or (placement.prefill is None and not prefills and not self._early):
            self._finish(one, Refused(EngineDied("no node can take the request now; try again in a moment")))
            return
        one.begin()
        request_id = request.request_id if one.attempt == 1 else RequestId(f"{request.request_id}-{one.attempt}")
        leg_request = request if one.attempt == 1 else replace(request, request_id=request_id)
        one.prefill_node = self.fleet.named(placement.prefill)
        one.decode_node = self.fleet.named(placement.decode)
        self.fleet.took(one)
        if one.prefill_node is not None and one.decode_node is not None:
            self._split(one, leg_request, one.prefill_node, one.decode_node)
        elif one.decode_node is not None:
            self.counters["direct"] += 1
            self._open(one, one.decode_node, m.Submit(leg_request), leg_request)
        elif one.prefill_node is not None:
            self._open(one, one.prefill_node, m.Submit(leg_request), leg_request)

    def _split(self, one: SplitRequest, request: Request, prefill: NodeClient, decode: NodeClient) -> None:
        sender, receiver = prefill.card, decode.card
        if sender is None or receiver is None:
            raise ValueError("a node without a card was chosen")
        self.counters["split"] += 1
        one.handoff = f"h-{secrets.token_hex(8)}"
        one.prefilling = True
        attempt, timeout_s = one.attempt, self._handoff_timeout_s
        # The receiver first: it must know the request when the Intent comes. Its events wait in `event` for nothing.
        self._open(one, decode, p.Receive(request, one.handoff, sender.incarnation, QUEUED_TIMEOUT_S), request)
        if one.attempt == attempt and not one.ended and one.decode is not None and not one.decode.ended:
            message = p.Prefill(request, one.handoff, receiver.incarnation, timeout_s)
            leg = prefill.open(request.request_id, message, lambda leg, event: self._event(one, attempt, leg, event, prefill=True))
            if one.attempt == attempt:
                one.prefill = leg

    def _open(self, one: SplitRequest, node: NodeClient, message: m.Submit | p.Receive, request: Request) -> None:
        attempt = one.attempt
        leg = node.open(request.request_id, message, lambda leg, event: self._event(one, attempt, leg, event, prefill=False))
        if one.attempt == attempt:
            one.decode = leg

    # --- events ---

    def _event(self, one: SplitRequest, attempt: int, leg: Leg, event: Event, *, prefill: bool) -> None:
        if attempt != one.attempt:
            return
        if prefill:  # A node may speak before `open` has returned.
            one.prefill = leg
        else:
            one.decode = leg
        match one.event(leg, event):
            case Next.DONE:
                self._forget(one)
            case Next.PREFILLED:
                self._prefilled(one)
            case Next.NOT_HANDED_OVER:
                self._prefilled(one)
                self._not_handed_over(one)
            case Next.PLACE_AGAIN:
                self._again(one, event)
            case Next.NOTHING:
                pass

    def _prefilled(self, one: SplitRequest) -> None:
        if one.prefilling:
            one.prefilling = False
            self.fleet.prefilled(one)

    def _not_handed_over(self, one: SplitRequest) -> None:
        if one.decode is not None and not one.decode.ended and one.decode_node is not None:
            self.counters["lost"] += 1
            one.decode_node.send(p.HandoffLost(one.decode.request_id))

    def _again(self, one: SplitRequest, event: Event) -> None:
        """The node cannot go on, and nothing of the request has been seen by anybody."""
        self._release(one)
        if one.attempt < MAX_ATTEMPTS and self._phase is EngineState.READY:
            self.counters["placed_again"] += 1
            self._place(one)
        elif isinstance(event, EndedEvent):
            self._finish(one, event.outcome)

    def _release(self, one: SplitRequest) -> None:
        """Cancels what runs of the present attempt; its events are nobody's any more."""
        self.fleet.left(one)
        one.attempt, attempt = -1, one.attempt
        for leg in (one.prefill, one.decode):
            if leg is not None:
                leg.cancel()
        one.attempt = attempt
        one.prefilling = False

    def _finish(self, one: SplitRequest, outcome: Outcome) -> None:
        if not one.ended:
            one.end(outcome)
        self._forget(one)

    def _forget(self, one: SplitRequest) -> None:
        if self._requests.pop(one.request.request_id, None) is None:
            return
        self._late_at_s.pop(one.request.request_id, None)
        if one.differed:
            self.counters["differed"] += 1
            _log.error("request %s: the tokens of two nodes differ (law L13)", one.request.request_id)
        if one.completed and bring_back(self.fleet, one, self.fleet.report.page_tokens):
            self.counters["brought_back"] += 1
        self._release(one)
        if not self._requests:
            self._idle.set()
        self._dispatch()

    # --- between nodes ---

    def _relay(self, node: NodeClient, message: p.Relay) -> None:
        if node.card is None:
            return
        target = self.fleet.by_incarnation(message.peer)
        if target is None:
            node.send(p.PeerGone(message.peer))
        else:
            target.send(p.Relay(message.handoff, node.card.incarnation, message.body))

    def _gone(self, node: NodeClient, incarnation: str) -> None:
        for other in self.fleet.nodes:
            if other is not node:
                other.send(p.PeerGone(incarnation))

    # --- health ---

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = self._clock.now_s()
            for request_id in [name for name, at_s in self._late_at_s.items() if now_s > at_s]:
                late = self._requests.get(request_id)
                if late is not None:
                    self._finish(late, Failed(DeadlineExceeded("the request's deadline passed before it was complete")))
            for node in self.fleet.look(now_s):
                _log.error("node %s has made no progress for %.1f s: nothing new goes there", node.name, node.still_s)
                self._frozen(node)
            self._dispatch()

    def _frozen(self, node: NodeClient) -> None:
        """What nobody has seen anything of goes elsewhere, if there is such a place, else it waits for the node to go on or to die; prompts
        of others that it has not handed over are computed there."""
        elsewhere = self.fleet.some("decode")
        for one in list(self._requests.values()):
            if one.prefill_node is node and one.prefill is not None and one.decode is not None and not one.answering:
                one.prefill.cancel()
                self._prefilled(one)
                self._not_handed_over(one)
            answers = one.decode_node or one.prefill_node
            if node is answers and elsewhere and not one.output and not one.cancelled:
                self._release(one)
                if one.attempt < MAX_ATTEMPTS:
                    self.counters["placed_again"] += 1
                    self._place(one)
                else:
                    self._finish(one, Failed(EngineDied("the node that had the request makes no progress")))
