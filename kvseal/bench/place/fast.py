"""The same placements, hundreds of times faster: what the scheduler does, without the scheduler.

Owns a model of the policy for the search alone: first come first served, decoders first, chunks share what is left of a step, and nobody
is admitted whose growth would not fit (`sched.policy` says so, `sched.chunk` sizes the steps: both are the engine's own). Between two
arrivals a worker that only decodes does the same step again and again; such runs are counted in one piece. Prompts share nothing here and
nobody is preempted. What is promised is simulated with the real scheduler (`simulate`), and a test compares the two.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from kvseal.bench.place.instance import WHOLE_TOKENS, Role
from kvseal.bench.place.latency import Latency, Step, WorkerKind
from kvseal.bench.place.routing import Routing, answer_work
from kvseal.bench.place.simulate import Outcome, Placement
from kvseal.bench.place.slo import SLO
from kvseal.bench.place.tally import Stop, Tally
from kvseal.bench.place.trace import Job
from kvseal.sched.chunk import StepSize
from kvseal.sched.policy import peak_growth_tokens


class _Sequence:
    """`left_tokens` of its prompt are to be computed here, behind `start_tokens` that are there; then `outputs` tokens come. None left:
    it was handed over with the first token of its answer, and decodes from its first step on."""

    __slots__ = ("index", "left_tokens", "outputs", "start_tokens", "untold")

    def __init__(self, index: int, start_tokens: int, left_tokens: int, outputs: int) -> None:
        self.index = index
        self.start_tokens = start_tokens
        self.left_tokens = left_tokens
        self.outputs = outputs
        self.untold = not left_tokens
        """Handed over, and no token of it told here yet: the next one is the one that the hand-off delayed."""


class _Lane:
    """One scheduler's worth: a line, those that prefill, those that decode, and the step or run of steps under way."""

    def __init__(self, worker: _Worker, pool_tokens: int, chunk_tokens: int) -> None:
        kind = worker.kind
        self.worker = worker
        self.line: deque[_Sequence] = deque()
        self.prefills: list[_Sequence] = []
        self.decoders: list[_Sequence] = []
        self.chunks: list[tuple[_Sequence, int]] = []
        self.began_s = 0.0
        self.ends_s = math.inf
        """Of what is under way; infinite when idle."""
        self.run = 0
        """Decode steps under way in one piece; 0: a step with chunks."""
        self.first_s = self.slope_s = 0.0
        """Of a run: the time of its first step, and what each step takes more than the one before."""
        self.version = 0
        self._pool_tokens = pool_tokens
        self._most = min(kind.max_running, chunk_tokens)
        self._size = StepSize(chunk_tokens, None if worker.role is Role.DECODE else kind.step_s)
        self._blocked = False

    def start(self, now_s: float, longest_run: int) -> bool:
        """Begins the next step or run of an idle lane."""
        self._choose()
        if self.chunks:
            self.run = 0
            self.began_s, self.ends_s = now_s, now_s + self._mixed_s()
            return True
        if self.decoders:
            self.run = min(longest_run, min(one.outputs for one in self.decoders))
            rows = len(self.decoders)
            context = sum(one.start_tokens for one in self.decoders) + rows
            cost = self.worker.kind.cost
            self.first_s = cost.step_s(Step(0, 0, 0.0, rows, context, rows))
            self.slope_s = cost.step_s(Step(0, 0, 0.0, rows, context + rows, rows)) - self.first_s
            self.began_s, self.ends_s = now_s, now_s + self.run_s(self.run)
            return True
        return False

    def run_s(self, steps: int) -> float:
        return steps * self.first_s + 0.5 * steps * (steps - 1) * self.slope_s

    def cut(self, now_s: float) -> bool:
        """A run ends with the step that is under way at `now_s`; whether that is earlier than planned."""
        if self.run < 2:
            return False
        passed_s = now_s - self.began_s
        low, high = 1, self.run
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.run_s(middle) >= passed_s else (middle + 1, high)
        if low == self.run:
            return False
        self.run, self.ends_s = low, self.began_s + self.run_s(low)
        return True

    def ended(self) -> None:
        self._blocked = False

    def took(self, seconds: float) -> None:
        if not self.run:
            self._size.took(sum(count for _, count in self.chunks) + len(self.decoders), seconds)

    def _choose(self) -> None:
        rows = len(self.decoders)
        running = rows + len(self.prefills)
        left = self._size.tokens(running, rows) - rows
        self.chunks = chunks = []
        for one in self.prefills:
            if left <= 0:
                return
            count = min(left, one.left_tokens)
            chunks.append((one, count))
            left -= count
        while left > 0 and self.line and running < self._most and not self._blocked:
            one = self.line[0]
            if running and not self._fits(one):
                self._blocked = True
                return
            self.line.popleft()
            running += 1
            if not one.left_tokens:
                self.decoders.append(one)
                left -= 1
                continue
            self.prefills.append(one)
            count = min(left, one.left_tokens)
            chunks.append((one, count))
            left -= count

    def _fits(self, new: _Sequence) -> bool:
        running = (*self.decoders, *self.prefills, new)
        if sum(one.start_tokens + one.left_tokens + one.outputs for one in running) <= self._pool_tokens:
            return True
        held = sum(one.start_tokens for one in running)
        known = sum(one.left_tokens for one in running)
        growth = peak_growth_tokens((one.outputs, one.start_tokens + one.left_tokens) for one in running)
        return held + known + growth <= self._pool_tokens

    def _mixed_s(self) -> float:
        rows = len(self.decoders)
        tokens = sampled = 0
        pairs = 0.0
        for one, count in self.chunks:
            tokens += count
            pairs += (one.start_tokens + 0.5 * (count + 1)) * count
            sampled += count == one.left_tokens
        context = sum(one.start_tokens for one in self.decoders) + rows
        return self.worker.kind.cost.step_s(Step(len(self.chunks), tokens, pairs, rows, context, sampled + rows))


class _Worker:
    def __init__(self, kind: WorkerKind, role: Role, chunk_tokens: int, name: str) -> None:
        self.kind = kind
        self.role = role
        self.name = name
        self.outstanding_tokens = 0
        chunk = WHOLE_TOKENS if role is Role.DECODE else chunk_tokens
        self.lanes = [_Lane(self, kind.pool_tokens // kind.stages, chunk) for _ in range(kind.stages)]
        self.stage_free_s = [0.0] * kind.stages

    def start(self, lane: _Lane, now_s: float) -> bool:
        if lane.ends_s < math.inf or (len(self.stage_free_s) > 1 and self.stage_free_s[0] > now_s):
            return False
        if len(self.lanes) == 1:
            return lane.start(now_s, WHOLE_TOKENS)
        if not lane.start(now_s, 1):
            return False
        each_s, ends_s = (lane.ends_s - now_s) / len(self.stage_free_s), now_s
        for stage, free_s in enumerate(self.stage_free_s):
            ends_s = max(ends_s, free_s) + each_s
            self.stage_free_s[stage] = ends_s
        lane.ends_s = ends_s
        return True


def simulate_fast(
    placement: Placement, latency: Latency, jobs: Sequence[Job], *, slo: SLO | None = None, missed_allowed: int | None = None
) -> Outcome:
    """As `simulate.simulate`, without the scheduler."""
    return _Run(placement, latency, jobs, Tally(jobs, slo, missed_allowed)).run()


_ARRIVES, _ENDS, _HANDED_OVER, _STAGE_FREE = range(4)


class _Run:
    def __init__(self, placement: Placement, latency: Latency, jobs: Sequence[Job], tally: Tally) -> None:
        self._jobs = jobs
        self._latency = latency
        self._tally = tally
        self._events: list[tuple[float, int, int, object, int]] = []
        self._made = 0
        self._now_s = 0.0
        self._steps = 0
        groups = placement.groups()
        self._workers = {
            f"{role.value} {number}": _Worker(kind, role, placement.chunk_tokens, f"{role.value} {number}")
            for role, count, kind in groups
            for number in range(count)
        }
        front = [worker for worker in self._workers.values() if worker.role is Role.PREFILL]
        back = [worker for worker in self._workers.values() if worker.role is not Role.PREFILL]
        self._only_back = placement.decode > 0 and not placement.prefill
        self._only_front = placement.prefill > 0 and not placement.decode
        self._routing = Routing(front, back, direct_tokens=latency.direct_tokens)
        self._back_of: dict[int, _Worker] = {}

    def run(self) -> Outcome:
        for index, job in enumerate(self._jobs):
            self._push(job.at_s, _ARRIVES, index)
        stopped = False
        try:
            while self._events:
                self._now_s, _, what, thing, version = heappop(self._events)
                if what == _ENDS and isinstance(thing, _Lane):
                    if thing.version == version:
                        self._ends(thing)
                elif what == _ARRIVES and isinstance(thing, int):
                    self._arrives(thing)
                elif what == _HANDED_OVER and isinstance(thing, int):
                    self._handed_over(thing)
                elif isinstance(thing, _Worker):
                    self._wake(thing)
        except Stop:
            stopped = True
        return Outcome(self._tally.records, stopped, self._now_s, self._steps, 0)

    def _push(self, at_s: float, what: int, thing: object, version: int = 0) -> None:
        self._made += 1
        heappush(self._events, (at_s, self._made, what, thing, version))

    def _arrives(self, index: int) -> None:
        job = self._jobs[index]
        front, back = self._routing.choose(job)
        front_worker = self._workers[front.name] if front else None
        back_worker = self._workers[back.name] if back else None
        if self._tally.refuses(index, [one.kind for one in (front_worker, back_worker) if one]):
            return
        if back_worker is not None:
            back_worker.outstanding_tokens += answer_work(job)
            self._back_of[index] = back_worker
        if self._only_back:
            self._tally.token(index, self._now_s)
            self._push(self._now_s + self._latency.handoff_s(job.prompt_tokens), _HANDED_OVER, index)
        elif front_worker is not None:
            front_worker.outstanding_tokens += job.prompt_tokens
            self._submit(front_worker, _Sequence(index, 0, job.prompt_tokens, 1))
        elif back_worker is not None:
            self._submit(back_worker, _Sequence(index, 0, job.prompt_tokens, job.output_tokens))

    def _handed_over(self, index: int) -> None:
        job, worker = self._jobs[index], self._back_of[index]
        if job.output_tokens > 1:
            self._submit(worker, _Sequence(index, job.prompt_tokens, 0, job.output_tokens - 1))
        else:
            self._left(worker, index)

    def _submit(self, worker: _Worker, one: _Sequence) -> None:
        lane = worker.lanes[0]
        if len(worker.lanes) > 1:
            lane = min(worker.lanes, key=lambda lane: len(lane.line) + len(lane.prefills) + len(lane.decoders))
        lane.line.append(one)
        if lane.ends_s < math.inf and lane.cut(self._now_s):
            lane.version += 1
            self._push(lane.ends_s, _ENDS, lane, lane.version)
        self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        for lane in worker.lanes:
            if worker.start(lane, self._now_s):
                lane.version += 1
                self._push(lane.ends_s, _ENDS, lane, lane.version)
                if len(worker.lanes) > 1:
                    self._push(worker.stage_free_s[0], _STAGE_FREE, worker)

    def _ends(self, lane: _Lane) -> None:
        steps = max(1, lane.run)
        self._steps += steps
        lane.took(lane.ends_s - lane.began_s)
        lane.ends_s = math.inf
        done = False
        for one in lane.decoders:
            one.start_tokens += steps
            one.outputs -= steps
            if one.untold and steps > 1:  # apart from those after it
                self._tally.token(one.index, lane.began_s + lane.first_s)
                self._tally.tokens(one.index, self._now_s, steps - 1)
            else:
                self._tally.tokens(one.index, self._now_s, steps)
            one.untold = False
            if not one.outputs:
                done = True
                self._left(lane.worker, one.index)
        if done:
            lane.decoders = [one for one in lane.decoders if one.outputs]
        for one, count in () if lane.run else lane.chunks:
            one.start_tokens += count
            one.left_tokens -= count
            if not one.left_tokens:
                done |= self._prefilled(lane, one)
        if done:
            lane.ended()
        self._wake(lane.worker)

    def _prefilled(self, lane: _Lane, one: _Sequence) -> bool:
        """Its prompt is computed, and its first token with it; whether it has ended here."""
        lane.prefills.remove(one)
        one.outputs -= 1
        self._tally.token(one.index, self._now_s)
        if one.outputs:
            lane.decoders.append(one)
            return False
        self._left(lane.worker, one.index)
        return True

    def _left(self, worker: _Worker, index: int) -> None:
        job = self._jobs[index]
        if worker.role is Role.PREFILL:
            worker.outstanding_tokens -= job.prompt_tokens
            if job.output_tokens > 1 and not self._only_front:
                self._push(self._now_s + self._latency.handoff_s(job.prompt_tokens), _HANDED_OVER, index)
                return
            if index in self._back_of:
                self._back_of[index].outstanding_tokens -= answer_work(job)
        else:
            worker.outstanding_tokens -= answer_work(job)
        self._tally.ended(index)
