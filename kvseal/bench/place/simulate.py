"""A whole placement under a load, event by event.

Owns the order of events, the router's choice and the record of every request. The schedulers inside are the engine's own (`instance`).
Deterministic: events at one time run in the order in which they were made. The router gives a request to the worker with the fewest
outstanding tokens; where the trace knows shared prefixes, to the one that holds most of it, unless that one is far busier.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from kvseal.bench.place.instance import SCOPE, WHOLE_TOKENS, EventClock, Instance, Lane, Prompts, Role
from kvseal.bench.place.latency import Latency, WorkerKind
from kvseal.bench.place.slo import SLO, Record
from kvseal.bench.place.trace import Job
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.request import Request, SamplingParams

BUSIER_TOKENS = 4096
"""A known prefix draws a request to a worker that has at most so many outstanding tokens more than the least busy one."""

SAMPLING = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`shared` workers do both; else `prefill` workers hand over to `decode` workers. With one of the two alone, requests end with their
    first token, or arrive as their prefill ends."""

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
        groups = ((self.shared, self.shared_kind), (self.prefill, self.prefill_kind), (self.decode, self.decode_kind))
        return sum(count * kind.width for count, kind in groups if kind is not None)

    @property
    def split(self) -> bool:
        return self.prefill > 0

    @property
    def name(self) -> str:
        parts = [
            f"{count} {role}{_of(kind)}"
            for count, role, kind in (
                (self.shared, "colocated", self.shared_kind),
                (self.prefill, "prefill", self.prefill_kind),
                (self.decode, "decode", self.decode_kind),
            )
            if kind is not None
        ]
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
        return _Run(placement, latency, jobs, slo, missed_allowed).run()


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


class _Stop(Exception):
    pass


_ARRIVES, _STEP_ENDS, _HANDED_OVER, _STAGE_FREE = range(4)


class _Run:
    def __init__(self, placement: Placement, latency: Latency, jobs: Sequence[Job], slo: SLO | None, missed_allowed: int | None) -> None:
        self._latency = latency
        self._jobs = jobs
        self._slo = slo
        self._missed_left = missed_allowed
        self._clock = EventClock()
        self._events: list[tuple[float, int, int, object]] = []
        self._made = 0
        self._prompts = Prompts(max(job.prompt_tokens for job in jobs) + 1)
        self._records = [Record(job.at_s, job.output_tokens, job.prompt_tokens) for job in jobs]
        self._keep_times = slo is None or slo.tbt_s is not None
        self._steps = 0
        self._split = placement.split
        self._front = self._instances(placement.shared, placement.shared_kind, Role.BOTH, placement.chunk_tokens)
        self._front += self._instances(placement.prefill, placement.prefill_kind, Role.PREFILL, placement.chunk_tokens)
        self._back = self._instances(placement.decode, placement.decode_kind, Role.DECODE, WHOLE_TOKENS)
        self._holds: list[set[int]] = [set() for _ in self._front]
        self._twice: set[int] = set()
        """Requests whose decode worker has not computed its first token."""

    def _instances(self, count: int, kind: WorkerKind | None, role: Role, chunk_tokens: int) -> list[Instance]:
        if kind is None:
            return []
        return [Instance(kind, role, self._clock, chunk_tokens=chunk_tokens, number=number) for number in range(count)]

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
        except _Stop:
            stopped = True
        lanes = [lane for instance in (*self._front, *self._back) for lane in instance.lanes]
        preemptions = sum(lane.scheduler.counters.preemptions for lane in lanes)
        return Outcome(self._records, stopped, clock.at_s, self._steps, preemptions)

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
        if not self._front:
            self._token(index, self._clock.at_s)
            self._hand_over(index)
            return
        instance = self._choose(self._front, job)
        tokens = self._prompts.of(index, job.prompt_tokens, job.blocks, job.block_tokens)
        outputs = 1 if self._split else job.output_tokens
        self._submit(instance, index, tokens, outputs)

    def _hand_over(self, index: int) -> None:
        job = self._jobs[index]
        if job.output_tokens > 1 and self._back:
            self._push(self._clock.at_s + self._latency.handoff_s(job.prompt_tokens), _HANDED_OVER, index)

    def _handed_over(self, index: int) -> None:
        job = self._jobs[index]
        instance = min(self._back, key=_outstanding)
        tokens = self._prompts.of(index, job.prompt_tokens, job.blocks, job.block_tokens)
        self._twice.add(index)
        self._submit(instance, index, tokens, job.output_tokens)

    def _submit(self, instance: Instance, index: int, tokens: tuple[int, ...], outputs: int) -> None:
        request = Request(request_id=RequestId(str(index)), prompt_tokens=tokens, max_output_tokens=outputs, scope=SCOPE, sampling=SAMPLING)
        if instance.submit(request) is not None:
            self._records[index].refused = True
            self._missed()
            return
        instance.outstanding_tokens += len(tokens) + outputs
        self._wake(instance)

    def _choose(self, instances: list[Instance], job: Job) -> Instance:
        least = min(instances, key=_outstanding)
        if not job.blocks or len(instances) == 1:
            return least
        most = least.outstanding_tokens + BUSIER_TOKENS
        near = [one for one in instances if one.outstanding_tokens <= most]
        best = max(near, key=lambda one: (self._known(one, job), -one.outstanding_tokens))
        self._holds[best.number].update(job.blocks)
        return best

    def _known(self, instance: Instance, job: Job) -> int:
        holds = self._holds[instance.number]
        for count, block in enumerate(job.blocks):
            if block not in holds:
                return count
        return len(job.blocks)

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
        now_s = self._clock.at_s
        for event in instance.finish(lane):
            if type(event) is TokensEvent:
                self._token(int(event.request_id), now_s)
            else:
                self._ended(instance, int(event.request_id))
        self._wake(instance)

    def _token(self, index: int, now_s: float) -> None:
        if index in self._twice:  # the token after the prompt, which the prefill worker has sent already
            self._twice.discard(index)
            return
        record = self._records[index]
        record.produced += 1
        record.last_s = now_s
        if record.produced == 1:
            record.first_s = now_s
            if self._slo is not None and not self._slo.first_in_time(record):
                self._missed()
        if self._keep_times:
            record.times.append(now_s)

    def _ended(self, instance: Instance, index: int) -> None:
        record = self._records[index]
        job = self._jobs[index]
        on_prefill = instance.role is Role.PREFILL
        instance.outstanding_tokens -= job.prompt_tokens + (1 if on_prefill else job.output_tokens)
        if on_prefill:
            self._hand_over(index)
        elif self._slo is not None and self._slo.first_in_time(record) and not self._slo.met(record):
            self._missed()

    def _missed(self) -> None:
        if self._missed_left is not None:
            self._missed_left -= 1
            if self._missed_left < 0:
                raise _Stop


def _outstanding(instance: Instance) -> int:
    return instance.outstanding_tokens
