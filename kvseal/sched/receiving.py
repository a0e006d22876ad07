"""The scheduler of a decode node: sequences whose prompt another node computes and hands over.

Owns the Receiving state and its three ways out: the receipt is committed, the prompt is computed here after all, or the request ends.
Never talks to the other node: `node.decode_node` does, and holds a ticket on the pages for as long as the transfer may touch them (L8).

A sequence is known here only from its admission on. Before that the node keeps it, with the arrival number that `arrive` gave it, so that
its place among those who wait for pages is that of its arrival: neither the waiting line nor the hand-offs can starve the other.

Laws: L1 (admitted as a whole, or not at all), L5 and L9 (tokens become valid by a complete receipt alone), L11 (one end).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Several
from operator import attrgetter

from kvseal.core.batch import Row, RowResult
from kvseal.core.errors import LawBroken, Unavailable
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.laws import Law
from kvseal.core.outcome import Failed, Refused
from kvseal.core.request import Request
from kvseal.kv.capacity import NeverFits
from kvseal.kv.manager import Grant
from kvseal.sched import policy
from kvseal.sched.scheduler import Scheduler
from kvseal.sched.sequence import Receiving, Sequence

_KEY = attrgetter("key")


class ReceivingScheduler(Scheduler):
    """`Scheduler`, and what arrives from elsewhere. `oldest_arrival`: of those that the node keeps and that wait for pages only."""

    oldest_arrival: int | None = None

    def arrive(self) -> int:
        """A place in the order of arrivals, for a request that will be received."""
        self._arrivals += 1
        return self._arrivals

    @property
    def overloaded(self) -> bool:
        """Whether the waiting line is as long as it may be."""
        return len(self._line) >= self._max_queued + max(0, self._max_running - len(self._running))

    def receive(self, request: Request, arrival: int) -> Grant | Refused | None:
        """Pages for the whole prompt, those that are cached pinned among them; None: not now, and nothing has changed (L1).

        The caller takes its ticket before anything else happens. Raises `LawBroken` (L11) for an id that is open.
        """
        if request.request_id in self._open:
            raise LawBroken(Law.L11, f"request {request.request_id} is received while it is open")
        quarantined = self._kv.usage().quarantined
        verdict = self._kv.capacity.verdict(len(request.prompt_tokens), request.max_output_tokens, quarantined_pages=quarantined)
        if isinstance(verdict, NeverFits):
            return self.refuse(verdict.error())
        sequence = Sequence(request, arrival, policy.order_key(arrival, request.priority))
        first = self._line.first()
        if len(self._running) >= self._max_running or (first is not None and first.key < sequence.key):
            return None
        grant = self._admission.ask(sequence, self._running, self._prefilling, len(sequence.tokens))
        if grant is None:
            return None
        sequence.receive(grant)
        sequence.cached_tokens = grant.cached_tokens
        self._open[request.request_id] = sequence
        insort(self._running, sequence, key=_KEY)
        if request.deadline_s is not None:
            self._deadlines.add(self._clock.now_s() + request.deadline_s, sequence)
        counters = self.counters
        counters.prompt_tokens += sequence.prompt_tokens
        counters.cached_tokens += grant.cached_tokens
        counters.queried_tokens += sequence.prompt_tokens if self._admission.reuses(sequence) else 0
        return grant

    def received(self, request_id: RequestId, end_tokens: int, page_digests: Several[bytes], first: TokensEvent | None) -> None:
        """A complete receipt: the tokens below `end_tokens` stand in this node's own memory, verified (L9).

        `first` is the token that the other node sampled after the whole prompt; without it the rest of the prompt, at least one token,
        is computed here. Raises `LawBroken` (L5, L7, L11) on counts that cannot be.
        """
        sequence = self._receiving(request_id)
        tokens, prompt_tokens = sequence.tokens, sequence.prompt_tokens
        if end_tokens > prompt_tokens or (end_tokens == prompt_tokens) is not (first is not None):
            raise LawBroken(Law.L5, f"{end_tokens} of {prompt_tokens} tokens were received {'with' if first else 'without'} the next one")
        valid_tokens = sequence.grant.table.valid_tokens
        if end_tokens > valid_tokens:
            self._kv.commit(sequence.grant, tokens[valid_tokens:end_tokens], end_tokens, page_digests)
        sequence.received()
        if first is None:
            self._prefilling += 1
            return
        sequence.cached_tokens = first.cached_tokens
        sequence.prompt_logprobs = list(first.prompt_logprobs)
        sequence.decode()
        self._emit(sequence, RowResult(request_id, token=first.tokens[0], logprobs=first.logprobs[0] if first.logprobs else None))

    def recompute(self, request_id: RequestId) -> None:
        """Its pages are given up and it waits in line to be computed here. The caller's ticket makes the pages drain (L8)."""
        sequence = self._receiving(request_id)
        self._leave_running(sequence)
        self._kv.drop(sequence.preempt())
        self._line.push(sequence)
        self._blocked = False

    def fail(self, request_id: RequestId, error: Unavailable) -> None:
        """It ends with `error`; the pages as in `recompute`."""
        self._end(self._receiving(request_id), Failed(error))

    def is_receiving(self, request_id: RequestId) -> bool:
        """False once it has been received, preempted or ended: then no more of the transfer is wanted."""
        sequence = self._open.get(request_id)
        return sequence is not None and isinstance(sequence.state, Receiving)

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self._open

    # --- inside ---

    def _admit(self, rows: list[Row], left: int) -> None:
        first, oldest = self._line.first(), self.oldest_arrival
        if first is not None and oldest is not None and self._running and policy.order_key(oldest, 0) < first.key:
            return  # An older one waits for pages: nobody passes it.
        super()._admit(rows, left)

    def _receiving(self, request_id: RequestId) -> Sequence:
        sequence = self._open.get(request_id)
        if sequence is None or not isinstance(sequence.state, Receiving):
            raise LawBroken(Law.L11, f"request {request_id} is not being received")
        return sequence
