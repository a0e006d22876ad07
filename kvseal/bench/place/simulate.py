"""A whole placement under a load, event by event.

Owns the order of events. The schedulers inside are the engine's own (`instance`).
Deterministic: events at one time run in the order in which they were made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from kvseal.bench.place.instance import SCOPE, TOKEN, WHOLE_TOKENS, EventClock, Instance, Lane, Prompts, Role
from kvseal.bench.place.latency import Latency, WorkerKind
from kvseal.bench.place.routing import Routing, answer_work
from kvseal.bench.place.slo import SLO, Record
from kvseal.bench.place.tally import Stop, Tally
from kvseal.bench.place.trace import Job
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.request import Request, SamplingParams

SAMPLING = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`shared` workers do both; else `prefill` workers hand over to `decode` workers. With one of the two alone, requests end with their
    first token, or arrive as their prefill ends (`fast` alone knows those)."""

    shared: int = 0
    shared_kind: WorkerKind | None = None
    chunk_tokens: int = WHOLE_TOKENS
    prefill: int = 0
    prefill_kind: WorkerKind | None = None
    decode: int = 0
    decode_kind: WorkerKind | None = None

    @property
    def workers(self) -> int:
        """Devices that it takes."""
        return sum(count * kind.width for _, count, kind in self.groups())

    def groups(self) -> list[tuple[Role, int, WorkerKind]]:
        """Roles with how many workers of which kind."""
        all_three = (
            (Role.BOTH, self.shared, self.shared_kind),
            (Role.PREFILL, self.prefill, self.prefill_kind),
            (Role.DECODE, self.decode, self.decode_kind),
        )
        return [(role, count, kind) for role, count, kind in all_three if kind is not None]

    @property
    def split(self) -> bool:
        return self.prefill > 0

    @property
    def name(self) -> str:
        parts = [f"{count} {role.value}{_of(kind)}" for role, count, kind in self.groups()]
        kind = self.shared_kind or self.prefill_kind
        whole = kind is None or self.chunk_tokens >= min(kind.context_tokens, kind.pool_tokens)
        return f"{' + '.join(parts)}, {'whole prompts' if whole else f'chunks of {self.chunk_tokens}'}"


def _of(kind: WorkerKind) -> str:
    return f" ({kind.name})" if kind.width > 1 or kind.stages > 1 else ""


class Outcome(NamedTuple):
    records: list[Record]
    """One for each job, in order. Unfinished ones where the run was stopped early."""
    stopped: bool
    """More requests than allowed had missed their limits: the rest was not simulated."""
    ended_s: float
    steps: int
    preemptions: int


def simulate(
    placement: Placement, latency: Latency, jobs: Sequence[Job], *, slo: SLO | None = None, missed_allowed: int | None = None
) -> Outcome:
    """Runs all jobs to their ends; or, with `slo`, until more than `missed_allowed` have missed a limit."""
    with _no_collection():
        return _Run(placement, latency, jobs, Tally(jobs, slo, missed_allowed)).run()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing here makes cycles, and the collector would walk millions of tokens again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


_ARRIVES, _STEP_ENDS, _HANDED_OVER, _STAGE_FREE = range(4)


class _Run:
    def __init__(self, placement: Placement, latency: Latency, jobs: Sequence[Job], tally: Tally) -> None:
        self._latency = latency
        self._jobs = jobs
        self._tally = tally
        self._clock = EventClock()
        self._events: list[tuple[float, int, int, object]] = []
        self._made = 0
        self._prompts = Prompts(max(job.prompt_tokens for job in jobs) + 1)
        self._steps = 0
        self._instances = {
            name: Instance(kind, role, self._clock, chunk_tokens=placement.chunk_tokens, name=name)
            for role, count, kind in placement.groups()
            for name in (f"{role.value} {number}" for number in range(count))
        }
        front = [one for one in self._instances.values() if one.role is Role.PREFILL]
        back = [one for one in self._instances.values() if one.role is not Role.PREFILL]
        self._routing = Routing(front, back, direct_tokens=latency.direct_tokens)
        self._back_of: dict[int, Instance] = {}

    def run(self) -> Outcome:
        for index, job in enumerate(self._jobs):
            self._push(job.at_s, _ARRIVES, index)
        stopped = False
        events, clock = self._events, self._clock
        try:
            while events:
                at_s, _, what, thing = heappop(events)
                clock.at_s = at_s
                self._handle(what, thing)
        except Stop:
            stopped = True
        lanes = [lane for instance in self._instances.values() for lane in instance.lanes]
        preemptions = sum(lane.scheduler.counters.preemptions for lane in lanes)
        return Outcome(self._tally.records, stopped, clock.at_s, self._steps, preemptions)

    def _push(self, at_s: float, what: int, thing: object) -> None:
        self._made += 1
        heappush(self._events, (at_s, self._made, what, thing))

    def _handle(self, what: int, thing: object) -> None:
        if what == _STEP_ENDS and isinstance(thing, tuple):
            self._step_ends(*thing)
        elif what == _ARRIVES and isinstance(thing, int):
            self._arrives(thing)
        elif what == _HANDED_OVER and isinstance(thing, int):
            self._handed_over(thing)
        elif isinstance(thing, Instance):
            self._wake(thing)

    # --- requests ---

    def _arrives(self, index: int) -> None:
        job = self._jobs[index]
        chosen = self._routing.choose(job)
        front, back = (self._instances[one.name] if one else None for one in chosen)
        if self._tally.refuses(index, [one.kind for one in (front, back) if one]):
            return
        if back is not None:
            back.outstanding_tokens += answer_work(job)
            self._back_of[index] = back
        if front is not None:
            front.outstanding_tokens += job.prompt_tokens
            self._submit(front, index, 1)
            self._wake(front)
        elif back is not None:
            self._submit(back, index, job.output_tokens)
            self._wake(back)

    def _handed_over(self, index: int) -> None:
        """All pages of the prompt have come, and the token after it: the decode worker goes on with that."""
        instance = self._back_of[index]
        request_id = self._submit(instance, index, self._jobs[index].output_tokens - 1, (TOKEN,))
        instance.comes_computed(request_id)
        self._wake(instance)

    def _submit(self, instance: Instance, index: int, outputs: int, answer: tuple[int, ...] = ()) -> RequestId:
        job = self._jobs[index]
        request = Request(
            request_id=RequestId(str(index)),
            prompt_tokens=(*self._prompts.of(index, job.prompt_tokens, job.blocks, job.block_tokens), *answer),
            max_output_tokens=outputs,
            scope=SCOPE,
            sampling=SAMPLING,
        )
        refused = instance.submit(request)
        if refused is not None:
            raise refused.error
        return request.request_id

    # --- steps ---

    def _wake(self, instance: Instance) -> None:
        now_s = self._clock.at_s
        for lane in instance.lanes:
            ends_s = instance.start(lane, now_s)
            if ends_s is not None:
                self._push(ends_s, _STEP_ENDS, (instance, lane))
                if len(instance.lanes) > 1:
                    self._push(instance.first_stage_free_s, _STAGE_FREE, instance)

    def _step_ends(self, instance: Instance, lane: Lane) -> None:
        self._steps += 1
        now_s, tally = self._clock.at_s, self._tally
        for event in instance.finish(lane):
            index = int(event.request_id)
            if type(event) is not TokensEvent:
                self._ended(instance, index)
            else:
                tally.tokens(index, now_s, 1)
        self._wake(instance)

    def _ended(self, instance: Instance, index: int) -> None:
        job = self._jobs[index]
        if instance.role is Role.PREFILL:
            instance.outstanding_tokens -= job.prompt_tokens
            if index in self._back_of and job.output_tokens > 1:
                self._push(self._clock.at_s + self._latency.handoff_s(job.prompt_tokens), _HANDED_OVER, index)
                return
            if index in self._back_of:
                self._back_of[index].outstanding_tokens -= answer_work(job)
        else:
            instance.outstanding_tokens -= answer_work(job)
        self._tally.ended(index)
