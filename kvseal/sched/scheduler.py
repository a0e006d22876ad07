"""The scheduler: which tokens are computed next, for whom, and what became of them.

Owns every sequence from submission to its one end (L11), the order among them and the decisions to admit and to preempt. Its only door to
pages is `KVManager`; it sees neither pool nor tree nor array, does no I/O and asks no clock but the one handed in.

There are no phases. A sequence has tokens and computed tokens, and each step brings the second closer to the first: one token for those
that decode, a chunk for those that do not yet. Decoders have the first claim on the step (`chunk`), running prefills share what is left,
admissions what is left of that. Pages are taken chunk by chunk; an admission leaves enough for the rest of all prompts and for the
forecast growth of everybody (`policy`), so that preemption is rare. When pages run short all the same, the last in order gives way: its
sealed pages stay in the prefix cache, the rest it computes again, to the same bits (L13).

Progress. The first in order is never preempted and gets every page that others can give; a request that fits the pool alone (L1, checked
at `submit`) therefore always ends. If even that fails, because pages were quarantined meanwhile, it fails with an error; it never hangs.

Sharing. A request whose prompt begins like one that is being prefilled waits for those pages instead of computing them twice: for one
prefill at most, and at most `policy.MAX_OVERTAKEN` may pass it meanwhile. When pages are too few for all who wait, those who begin alike
go together (`Admission.next`), bounded by `policy.COMPANY_ARRIVALS`.

Laws: L1 (closed admission), L5 (lengths move by commit, after evidence), L6 (each result row carries the id of its batch row), L8 (what a
step in flight touches is ticketed before it is dropped), L11, L12 (a broken seal ends its own request, before its token leaves).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Several
from operator import attrgetter

from kvseal.core.batch import Batch, BatchResult, Row, RowResult
from kvseal.core.clock import Clock
from kvseal.core.errors import BrokenSeal, DeadlineExceeded, LawBroken, RequestError, Unavailable
from kvseal.core.events import EndedEvent, Event
from kvseal.core.ids import RequestId
from kvseal.core.laws import Law
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused
from kvseal.core.request import Request
from kvseal.kv.capacity import NeverFits
from kvseal.kv.handles import Ticket
from kvseal.kv.manager import KVManager
from kvseal.sched import policy
from kvseal.sched.admission import Admission
from kvseal.sched.chunk import StepSize
from kvseal.sched.counters import SchedulerCounters
from kvseal.sched.deadlines import Deadlines
from kvseal.sched.decoders import Decoders
from kvseal.sched.line import Pace, WaitingLine
from kvseal.sched.rows import chunk_row, completion, full_event, rows_of
from kvseal.sched.sequence import Decoding, Ended, Prefilling, Sequence, Waiting

_ASIDE_PER_STEP = 16
"""How many waiting sequences may be set aside in one step to share a prefill; bounds the work of a step."""

_KEY = attrgetter("key")


class Scheduler:
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
        self.counters = SchedulerCounters()
        self._kv = kv
        self._clock = clock
        self._step_size = StepSize(chunk_tokens, step_s)
        self._max_running = min(max_running, chunk_tokens)  # each that runs gets at least one token a step
        self._max_queued = max_queued
        self._page_tokens = page_tokens
        self._open: dict[RequestId, Sequence] = {}
        self._line = WaitingLine(page_tokens)
        self._leader: Sequence | None = None
        """The last one that was admitted; see `Admission.next`."""
        self._running: list[Sequence] = []
        """In fair order: the last one is the victim."""
        self._prefilling = 0
        self._decoders: Decoders | None = None
        """Those of them that decode; None when who does has changed."""
        self._blocked = False
        """The head of the line did not fit beside those that run, and none of them has given anything back since."""
        self._deadlines = Deadlines()
        self._admission = Admission(kv, page_tokens)
        self._arrivals = 0
        self._pace = Pace()
        self._batch: Batch | None = None
        self._began_s = 0.0
        self._step_tokens = 0
        self._flight: list[Sequence] = []
        """Whose rows the batch has, in its order: `_flown`, then those with chunks."""
        self._flown: Decoders | None = None
        self._tickets: list[Ticket] = []
        self._events: list[Event] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def output_tokens(self) -> int:
        """Sampled since the start. O(open requests)."""
        return self.counters.output_tokens + sum(sequence.output_tokens for sequence in self._open.values())

    @property
    def has_work(self) -> bool:
        """Whether a request is open or an event has not been taken."""
        return bool(self._open or self._events)

    # --- requests come and go ---

    def submit(self, request: Request, answer: Several[int] = ()) -> Refused | None:
        """None: it waits in line, behind it what is known of its `answer`. `Refused`: nothing was reserved (L1). Raises `LawBroken` (L11)
        for an id that is open."""
        if request.request_id in self._open:
            raise LawBroken(Law.L11, f"request {request.request_id} is submitted twice")
        verdict = self._kv.capacity.verdict(
            len(request.prompt_tokens), request.max_output_tokens, quarantined_pages=self._kv.usage().quarantined
        )
        if isinstance(verdict, NeverFits):
            return self.refuse(verdict.error())
        now_s = self._clock.now_s()
        if len(self._line) >= self._max_queued + max(0, self._max_running - len(self._running)):
            return self.refuse(self._pace.overloaded(len(self._line), self._max_queued))
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, policy.order_key(self._arrivals, request.priority), answer)
        self._open[request.request_id] = sequence
        self._line.push(sequence)
        if self._line.first() is sequence:
            self._blocked = False
        if request.deadline_s is not None:
            self._deadlines.add(now_s + request.deadline_s, sequence)
        return None

    def refuse(self, error: RequestError | Unavailable) -> Refused:
        """Counts it; nothing else has happened."""
        self.counters.outcomes["refused"] += 1
        return Refused(error)

    def cancel(self, request_id: RequestId) -> None:
        """Gives its pages back at once (those of a step in flight drain until `apply`). An id that is not open has ended: no effect."""
        sequence = self._open.get(request_id)
        if sequence is not None:
            self._end(sequence, Cancelled(sequence.usage))

    def finish(self, request_id: RequestId) -> None:
        """`cancel` for one that its reader calls complete, by a stop string in its text."""
        sequence = self._open.get(request_id)
        if sequence is not None:
            self._end(sequence, Completed(FinishReason.STOP, sequence.usage))

    def take_events(self) -> list[Event]:
        """Events that no `apply` has returned: ends by cancellation or deadline while nothing was computed."""
        events, self._events = self._events, []
        return events

    # --- one step ---

    def schedule(self) -> Batch:
        """The next step. Empty: there is nothing to compute now, and `apply` is not called. Raises `LawBroken` (L8) in flight."""
        if self._batch is not None:
            raise LawBroken(Law.L8, "a step is scheduled while another is in flight")
        if self._deadlines:
            for sequence in self._deadlines.passed(self._clock.now_s(), len(self._open)):
                self._end(sequence, Failed(DeadlineExceeded("the request's deadline passed before it was complete")))
        preemptions = self.counters.preemptions
        rows: list[Row] = []
        self._flight = []
        self._step_tokens = 0
        left = self._continue(rows)
        if not self._blocked and self.counters.preemptions == preemptions:
            self._admit(rows, left)
        batch = Batch(self.counters.steps + 1, tuple(rows))
        if rows:
            self._batch = batch
            self._step_tokens += len(rows)
            self._began_s = self._clock.now_s()
        return batch

    def apply(self, result: BatchResult) -> list[Event]:
        """Moves every sequence by what was really computed; returns all events since the last call. Raises `LawBroken` (L6)."""
        rows = rows_of(self._batch, result)
        self._batch = None
        self._step_size.took(self._step_tokens, self._clock.now_s() - self._began_s)
        self.counters.steps += 1
        if self._tickets:
            self._kv.settle(self._tickets, [out.broken for out in result.rows if out.broken is not None])
            self._tickets.clear()
        done = self._apply_decoders(result.rows)
        for index in range(done, len(rows)):
            self._advance(self._flight[index], rows[index], result.rows[index])
        self._flight, self._flown = [], None
        return self.take_events()

    # --- rows ---

    def _continue(self, rows: list[Row]) -> int:
        """Rows of all that run; returns the tokens left. Pages are claimed in fair order, so that a victim (the last) has claimed none."""
        decoding = len(self._running) - self._prefilling
        left = self._step_size.tokens(len(self._running), decoding) - decoding
        claims = self._current_decoders().due()
        if claims and self._kv.grow_each([sequence.grant for sequence in claims]):
            claims = []
        if self._prefilling:
            claims = sorted((*claims, *(one for one in self._running if type(one.state) is Prefilling)), key=_KEY)
        chunks: list[tuple[Sequence, int]] = []
        starving = False
        for sequence in claims:
            state = type(sequence.state)
            if state is Decoding:
                end = sequence.computed_tokens + 1
                starving = not (end <= sequence.room_tokens or self._grow(sequence, end)) and type(sequence.state) is Decoding
            elif left and state is Prefilling:
                end = self._chunk_end(sequence, left)
                if end <= sequence.room_tokens or self._grow(sequence, end):
                    chunks.append((sequence, end))
                    left -= end - sequence.computed_tokens
        if not starving:
            self._flown = decoders = self._current_decoders()
            rows += decoders.rows()
            self._flight += decoders.sequences
        for sequence, end in chunks:
            self._chunk(sequence, rows, end)
        return left

    def _current_decoders(self) -> Decoders:
        if self._decoders is None:
            self._decoders = Decoders([one for one in self._running if type(one.state) is Decoding], self._page_tokens)
        return self._decoders

    def _chunk_end(self, sequence: Sequence, left: int) -> int:
        """As far as budget and tokens reach; no further than pages are there, before any is taken from another."""
        end = min(len(sequence.tokens), sequence.computed_tokens + left)
        if end > sequence.room_tokens:
            there = sequence.room_tokens + self._kv.available_pages * self._page_tokens
            end = min(end, max(there, sequence.computed_tokens + 1))
        return end

    def _chunk(self, sequence: Sequence, rows: list[Row], end: int) -> int:
        rows.append(chunk_row(sequence, end))
        self._flight.append(sequence)
        self._step_tokens += end - sequence.computed_tokens - 1  # and one for each row
        return end - sequence.computed_tokens

    def _grow(self, sequence: Sequence, end_tokens: int) -> bool:
        """Room up to `end_tokens`, taken from those last in order if need be; False when the sequence has no row this step."""
        while not self._kv.grow(sequence.grant, end_tokens):
            victim = self._running[-1]
            if len(self._running) == 1:  # Alone: either some are draining and come back, or they are out of use.
                if not self._pages_come_back():
                    why = "cache pages were put out of use while the request ran, and what is left cannot hold it"
                    self._end(sequence, Failed(Unavailable(why)))
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._leave_running(victim)
        self._kv.drop(victim.preempt())
        self._line.push(victim)
        self._blocked = False
        self.counters.preemptions += 1

    def _pages_come_back(self) -> bool:
        return self._kv.usage().draining > 0

    # --- admission ---

    def _admit(self, rows: list[Row], left: int) -> None:
        """From the head of the line, as long as budget and pages last. Those that wait to share a prefill are set aside and keep their
        places; others may pass them, but each at most `policy.MAX_OVERTAKEN` times. Nobody passes a head that waits for pages."""
        aside: list[Sequence] = []
        while left and len(self._running) < self._max_running and len(aside) < _ASIDE_PER_STEP:
            sequence = self._admission.next(self._line, self._leader)
            if sequence is None or any(passed.overtaken >= policy.MAX_OVERTAKEN for passed in aside):
                break
            if self._prefilling and self._admission.shares_prefill(sequence, self._running):
                aside.append(sequence)
                self._line.take(sequence)
            elif self._try_admit(sequence, left):
                self._line.take(sequence)
                self._leader = sequence
                for passed in aside:
                    passed.overtaken += 1
                left -= self._chunk(sequence, rows, min(len(sequence.tokens), sequence.computed_tokens + left))
            else:
                self._blocked = not sequence.ended and bool(self._running)
                break
        for sequence in aside:
            self._line.push(sequence)

    def _try_admit(self, sequence: Sequence, left: int) -> bool:
        grant = self._admission.ask(sequence, self._running, self._prefilling, left)
        if grant is None:
            if not self._running and not self._pages_come_back():
                self._end(sequence, Failed(Unavailable("cache pages were put out of use, and what is left cannot hold the request")))
            return False
        reuse = self._admission.reuses(sequence)
        sequence.admit(grant)
        insort(self._running, sequence, key=_KEY)
        self._prefilling += 1
        if sequence.cached_tokens is None:
            sequence.cached_tokens = grant.cached_tokens
            self.counters.admitted(sequence.prompt_tokens, grant.cached_tokens, queried=reuse)
        else:
            self.counters.recomputed_tokens += max(0, sequence.lost_tokens - grant.cached_tokens)
        return True

    # --- results ---

    def _apply_decoders(self, results: tuple[RowResult, ...]) -> int:
        """How many rows are done: those of all decoders, unless one of them has ended meanwhile or has more to tell than a token."""
        decoders = self._flown
        if decoders is None or decoders is not self._decoders:
            return 0
        last = decoders.apply(self._kv, results[: len(decoders)], self._events)
        if last is None:
            self._decoders = None
            return 0
        if decoders.may_end():
            for sequence, token in zip(decoders.sequences, last, strict=True):
                self._complete(sequence, token)
        return len(decoders)

    def _advance(self, sequence: Sequence, row: Row, out: RowResult) -> None:
        """One row by itself."""
        if out.broken is not None:
            self._break(sequence, out.broken)
        elif out.failed is not None and not sequence.ended:
            self._end(sequence, Failed(out.failed))
        elif not sequence.ended:
            self._kv.commit(sequence.grant, row.tokens, row.end, out.page_digests)
            sequence.collect_prompt_logprobs(row.start, out.prompt_logprobs)
            if type(sequence.state) is Prefilling and row.samples:
                sequence.decode()
                self._prefilling -= 1
                self._decoders = None
            if row.samples:
                self._emit(sequence, out)

    def _emit(self, sequence: Sequence, out: RowResult) -> None:
        token = out.token
        if token is None:
            raise LawBroken(Law.L6, f"the row of request {sequence.request_id} should have sampled and has no token")
        tokens = sequence.tokens
        tokens.append(token)
        self._events.append(full_event(sequence, token, out))
        self._complete(sequence, token)

    def _complete(self, sequence: Sequence, token: int) -> None:
        """Ends it if this last token does."""
        completed = completion(sequence, token)
        if completed is not None:
            self._end(sequence, completed)

    def _break(self, sequence: Sequence, broken: BrokenSeal) -> None:
        """L12: counted and quarantined even when the request has ended meanwhile; fails that request alone."""
        self.counters.broken(broken.law)
        if not isinstance(sequence.state, Ended):
            self._end(sequence, Failed(broken))

    # --- ends ---

    def _end(self, sequence: Sequence, outcome: Outcome) -> None:
        if isinstance(sequence.state, Waiting):
            sequence.end(outcome)
            self._line.take(sequence)
        else:
            self._leave_running(sequence)
            grant = sequence.grant
            if self._batch is not None and sequence in self._flight:
                self._tickets.append(self._kv.ticket(grant))
            sequence.end(outcome)
            self._kv.drop(grant, broken=outcome.error if isinstance(outcome, Failed) and isinstance(outcome.error, BrokenSeal) else None)
        self._blocked = False
        del self._open[sequence.request_id]
        self.counters.output_tokens += sequence.output_tokens
        if sequence.output_tokens and not isinstance(outcome, Failed):
            self._admission.lengths.add(sequence.output_tokens)
        self.counters.outcomes[type(outcome).__name__.lower()] += 1
        self._pace.ended(self._clock.now_s())
        self._events.append(EndedEvent(sequence.request_id, outcome))

    def _leave_running(self, sequence: Sequence) -> None:
        if type(sequence.state) is Prefilling:
            self._prefilling -= 1
        else:
            self._decoders = None
        del self._running[bisect_left(self._running, sequence.key, key=_KEY)]
