"""The scheduler of a node that hands pages over or takes them: requests come with pages that another node has computed.

Owns those who wait with pages: a grant of proven ones, and the first token of the answer where the other node has sampled it. Such a
request waits in line like any other, since there must be a place for it in the step, but when its turn comes it goes on in the grant that
it has. A prompt whose pages are still on their way is not known here (`node.node_engine` keeps it, the hand-off its pages), so no sequence
ever holds pages that are not its own to write (L9, L11).

Pages of those who wait are the first to give way: what is full stays cached, first to be found and last to be evicted, and the rest is
computed here, to the same bits (L13). Laws: L1, L2 (each grant is dropped once), L5 (what is valid is what the receipt said), L11.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from kvseal.core.batch import Batch, Row
from kvseal.core.clock import Clock
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Outcome, Refused
from kvseal.core.request import Request
from kvseal.kv.manager import Grant, KVManager
from kvseal.sched.admission import Admission
from kvseal.sched.scheduler import Scheduler
from kvseal.sched.sequence import Received, Sequence


class _Admission(Admission):
    """Those who wait with pages go on in them, and give way to those who have a better right."""

    def __init__(self, kv: KVManager, page_tokens: int) -> None:
        super().__init__(kv, page_tokens)
        self.received: dict[RequestId, Sequence] = {}
        """Those who wait with pages, in order of arrival."""

    def ask(self, sequence: Sequence, running: Several[Sequence], prefilling: int, left: int) -> Grant | None:
        """With nobody running, the first in line gets what others wait with."""
        while True:
            grant = self._ask(sequence, running, prefilling, left)
            if grant is not None or running or not self.give_way(to=sequence):
                return grant

    def _ask(self, sequence: Sequence, running: Several[Sequence], prefilling: int, left: int) -> Grant | None:
        if sequence.request_id not in self.received:
            return super().ask(sequence, running, prefilling, left)
        if not self._extend(sequence, running, prefilling, left):
            return None
        del self.received[sequence.request_id]
        return sequence.grant

    def _extend(self, sequence: Sequence, running: Several[Sequence], prefilling: int, left: int) -> bool:
        """Room in its grant for what `left` tokens of budget can compute, if enough stays for all; False: nothing taken."""
        grant = sequence.grant
        new_tokens = len(sequence.tokens) - sequence.computed_tokens
        first_tokens = min(new_tokens, left)
        end_tokens = sequence.computed_tokens + first_tokens
        new_pages = max(0, self._kv.capacity.pages_for(end_tokens) - grant.table.pages)
        reserve_pages = self._reserve_pages(sequence, running, prefilling, new_tokens - first_tokens)
        return self._kv.available_pages - new_pages >= reserve_pages and self._kv.grow(grant, end_tokens)

    def shares_prefill(self, sequence: Sequence, running: Several[Sequence]) -> bool:
        return sequence.request_id not in self.received and super().shares_prefill(sequence, running)

    def give_way(self, to: Sequence | None = None) -> bool:
        """The last one that waits with pages, other than `to`, goes on waiting without. False: there is none."""
        for sequence in reversed(self.received.values()):
            if sequence is not to:
                self.let_go(sequence)
                return True
        return False

    def let_go(self, sequence: Sequence) -> None:
        del self.received[sequence.request_id]
        self._kv.drop(sequence.preempt())


class HandoffScheduler(Scheduler):
    """`Scheduler`, told of what has arrived and of what is held elsewhere."""

    def __init__(
        self,
        kv: KVManager,
        clock: Clock,
        *,
        chunk_tokens: int,
        max_running: int,
        max_queued: int,
        page_tokens: int,
        step_s: float | None = None,
    ) -> None:
        sizes = {"chunk_tokens": chunk_tokens, "max_running": max_running, "max_queued": max_queued, "page_tokens": page_tokens}
        super().__init__(kv, clock, step_s=step_s, **sizes)
        self._admission: _Admission = _Admission(kv, page_tokens)
        self.held_elsewhere = False
        """Whether a hand-off holds pages now. Then nobody fails for want of pages: they come back within the hand-off's deadline."""

    def arrived(self, request: Request, grant: Grant, answer: Several[int] = ()) -> Refused | None:
        """`submit` for a request that begins with the valid tokens of `grant`, which is taken over. `answer`: what has been sampled of its
        answer elsewhere, nothing or one token: it is told like one that is sampled here, and ends the request where that would."""
        refused = self.submit(request, answer)
        if refused is not None:
            self._kv.drop(grant)
            return refused
        sequence = self._open[request.request_id]
        sequence.receive(grant)
        self._admission.received[request.request_id] = sequence
        for token in answer:
            self._events.append(TokensEvent(request.request_id, (token,), (), (), grant.cached_tokens))
            self._complete(sequence, token)
        return None

    def schedule(self) -> Batch:
        while self._running and self._kv.available_pages <= len(self._running) and self._admission.give_way():
            pass  # those that run need a page each to go on
        return super().schedule()

    def _admit(self, rows: list[Row], left: int) -> None:
        """Those who come with pages want one token of the step, like those that decode: a prompt that is being computed does not keep them
        waiting."""
        super()._admit(rows, max(left, len(self._admission.received)))

    def _pages_come_back(self) -> bool:
        return self.held_elsewhere or super()._pages_come_back()

    def _end(self, sequence: Sequence, outcome: Outcome) -> None:
        if type(sequence.state) is Received:
            self._admission.let_go(sequence)
        super()._end(sequence, outcome)
