"""The search: every placement of so many workers, by the highest rate at which enough requests meet their limits.

Owns the order of work. One shared worker, one prefill worker and one decode worker are simulated apart, at rates on a geometric grid, and
their attainments are kept; a split of P and D workers is judged by the product of the two curves (its limits are missed independently, as
if prefill and decode did not know of each other). That is the way of DistServe (OSDI '24, section 4.1), and it makes all splits of a pool
cost no more than two. The best few are then simulated whole, with the router, and only those figures are promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvseal.bench.place.curves import Curve, bisect, grains_of, highest, in_grains
from kvseal.bench.place.latency import Latency, WorkerKind
from kvseal.bench.place.simulate import Outcome, Placement, simulate
from kvseal.bench.place.slo import SLO, Asked, Record, attainment, quantile
from kvseal.bench.place.trace import Job, Trace

FINE = 1.02
"""Promised rates are powers of it."""
CURVE_MISSED = 0.25
"""A run for a curve stops when so many have missed: nothing below is of interest."""
NEARLY = 0.8
"""Kinds of worker that cannot reach this share of the best so far are not looked at more closely."""
GRAIN_TOKENS = 4
IDLE_JOBS = 48
IDLE_OUTPUTS = 12
"""Tokens of an idle request that are simulated; the rest takes as long."""
WINDOW_TTFTS = 10
WINDOW_LIVES = 4
"""A run lasts at least so many times the limit of TTFT, and so many lifetimes of a request, so that a growing queue shows."""
MOST_TIMES = 8
"""... but has at most so many times the requests asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be placed, and how closely to look."""

    latency: Latency
    trace: Trace
    asked: Asked
    workers: int
    target: float = 0.9
    requests: int = 300
    poisson: bool = False
    seed: int = 0
    chunk_tokens: tuple[int, ...] | None = None
    """Instead of those that the kinds name."""
    simulate_whole: int = 3
    """How many of the best splits, and of the best shared placements, are simulated whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One placement and the rate that it sustains."""

    placement: Placement
    rate: float
    whole: bool
    """Simulated whole; else combined from curves of single workers."""
    attainment: float = 0.0
    """At `rate`, where it was simulated whole."""
    held_by: str = ""
    """The limit that most requests miss just above `rate`."""

    @property
    def per_worker(self) -> float:
        return self.rate / self.placement.workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Times of requests alone on an idle worker of the fastest kind."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    tbt_s: tuple[float, ...]
    life_s: float
    refused: int

    def typical(self) -> SLO:
        return SLO(ttft_s=quantile(self.ttft_s, 0.5), tpot_s=quantile(self.tpot_s, 0.5), tbt_s=quantile(self.tbt_s, 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    question: Question
    slo: SLO
    idle: Idle
    found: tuple[Found, ...]
    """Best first; those simulated whole before all others."""
    impossible: str = ""
    """Why no placement can meet the limits; then nothing was found."""

    def best(self, *, split: bool) -> Found | None:
        return next((one for one in self.found if one.placement.split is split and one.whole), None)


def search(question: Question) -> Answer:
    """All placements of at most `workers` workers, best first. Deterministic."""
    return _Search(question).answer()


class _Half(NamedTuple):
    """One worker of a split, and the rate that it sustains alone."""

    kind: WorkerKind
    chunk_tokens: int
    curve: Curve
    rate: float


class _Search:
    def __init__(self, question: Question) -> None:
        self._q = question
        self._latency = question.latency
        self._kinds = sorted((kind for kind in question.latency.kinds if kind.width <= question.workers), key=lambda kind: kind.width)
        self.idle = idle_times(question)
        self.slo = question.asked.resolved(self.idle.typical())
        self._guess = 1.0 / max(1e-9, self.idle.life_s)

    def answer(self) -> Answer:
        impossible = self._impossible()
        if impossible:
            return Answer(question=self._q, slo=self.slo, idle=self.idle, found=(), impossible=impossible)
        rough = sorted((*self._shared(), *self._splits()), key=_order)
        whole: list[Found] = []
        for split, most in ((False, 1), (True, self._q.simulate_whole)):
            some = [one for one in rough if one.placement.split is split and one.rate > 0]
            whole += [self._whole(one) for one in some[:most]]
        done = {one.placement for one in whole}
        rest = [one for one in rough if one.placement not in done]
        return Answer(question=self._q, slo=self.slo, idle=self.idle, found=(*sorted(whole, key=_order), *rest))

    def _impossible(self) -> str:
        if not self._kinds:
            least = min(kind.width for kind in self._latency.kinds)
            return f"the smallest kind of worker takes {least} devices, and --workers is {self._q.workers}"
        count, target = len(self.idle.ttft_s) + self.idle.refused, self._q.target
        if self.idle.refused > (1 - target) * count:
            most = max(self._kinds, key=lambda kind: kind.context_tokens)
            return (
                f"{self.idle.refused} of {count} requests fit no worker: at most {min(most.context_tokens, most.pool_tokens)} tokens of "
                "prompt and output are served together"
            )
        idle = {"ttft": self.idle.ttft_s, "tpot": self.idle.tpot_s, "tbt": self.idle.tbt_s}
        for name, limit in self.slo.limits():
            if limit is None:
                continue
            good = sum(value <= limit for value in idle[name]) / count
            if good < target:
                need = quantile(idle[name], target)
                return (
                    f"{name}={limit:.4g} s cannot be met: alone on an idle worker only {good:.0%} of the requests would meet it, and "
                    f"{target:.0%} must; {name}={need:.3g} is the least that could be asked"
                )
        return ""

    # --- one worker at a time ---

    def _jobs(self, rate: float) -> list[Job]:
        least = max(WINDOW_TTFTS * (self.slo.ttft_s or 0.0), WINDOW_LIVES * self.idle.life_s)
        requests = min(MOST_TIMES * self._q.requests, max(self._q.requests, math.ceil(rate * least)))
        return self._q.trace.at_rate(rate, requests, poisson=self._q.poisson, seed=self._q.seed)

    @property
    def _most_rate(self) -> float:
        """Above it all requests of a run would come within one lifetime."""
        return MOST_TIMES * self._q.requests / max(1e-6, self.idle.life_s)

    def _curve(self, place: Placement, slo: SLO, load: Callable[[list[Job]], list[Job]] = list, latency: Latency | None = None) -> Curve:
        """Of one worker, with what `load` makes of the jobs that come at a rate."""
        times = latency or self._latency

        def at(rate: float) -> float:
            jobs = load(self._jobs(rate))
            outcome = simulate(place, times, jobs, slo=slo, missed_allowed=int(CURVE_MISSED * len(jobs)))
            return 0.0 if outcome.stopped else attainment(outcome.records, slo)

        return Curve(at, self._most_rate)

    def _chunks(self, kind: WorkerKind) -> tuple[int, ...]:
        return self._q.chunk_tokens or kind.chunk_tokens

    def _shared(self) -> Iterator[Found]:
        best = guess = 0.0
        for kind in self._kinds:
            for chunk in self._chunks(kind):
                place = Placement(shared=1, shared_kind=kind, chunk_tokens=chunk)
                curve = self._curve(place, self.slo)
                if best and not curve.reaches(self._q.target, NEARLY * best * kind.width):
                    continue
                rate = curve.goodput(self._q.target, guess * kind.width or self._guess)
                best, guess = max(best, rate / kind.width), rate / kind.width or guess
                count = self._q.workers // kind.width
                yield Found(placement=replace(place, shared=count), rate=rate * count, whole=False)

    def _splits(self) -> Iterator[Found]:
        fronts = [front for front in map(self._front, self._kinds) if front.rate]
        if not fronts:
            return
        front_best = max(front.rate / front.kind.width for front in fronts)
        best = 0.0
        for kind in self._kinds:
            back = self._decode_curve(kind)
            if best:  # with so little a device, not even the best prefill beside it could reach the best so far
                need = 1 / max(1e-9, 1 / (NEARLY * best) - 1 / front_best)
                if not back.reaches(self._q.target, need * kind.width):
                    continue
            rate = back.goodput(self._q.target, self._guess * kind.width)
            for front in fronts:
                for found in self._pairs(front, _Half(kind, 0, back, rate)):
                    best = max(best, found.per_worker)
                    yield found

    def _front(self, kind: WorkerKind) -> _Half:
        """A prefill worker, with the chunk size that is best for it."""
        slo = SLO(ttft_s=self.slo.ttft_s)
        halves = []
        for chunk in self._chunks(kind):
            curve = self._curve(Placement(prefill=1, prefill_kind=kind, chunk_tokens=chunk), slo, _first_tokens)
            halves.append(_Half(kind, chunk, curve, curve.goodput(self._q.target, self._guess * kind.width)))
        return max(halves, key=lambda half: half.rate)

    def _decode_curve(self, kind: WorkerKind) -> Curve:
        coarse, slo = in_grains(kind, SLO(tpot_s=self.slo.tpot_s, tbt_s=self.slo.tbt_s), GRAIN_TOKENS)
        latency = replace(self._latency, kv_token_bytes=GRAIN_TOKENS * self._latency.kv_token_bytes)
        return self._curve(Placement(decode=1, decode_kind=coarse), slo, lambda jobs: grains_of(jobs, GRAIN_TOKENS), latency)

    def _pairs(self, front: _Half, back: _Half) -> Iterator[Found]:
        if not front.rate or not back.rate:
            return
        workers, target = self._q.workers, self._q.target
        for prefill in range(1, workers // front.kind.width + 1):
            even = prefill * front.rate / back.rate
            for decode in {max(1, math.floor(even)), math.ceil(even), math.ceil(even) + 1}:
                if prefill * front.kind.width + decode * back.kind.width > workers:
                    continue
                most = min(prefill * front.rate, decode * back.rate)
                rate = bisect(_pair_passes(front.curve, prefill, back.curve, decode, target), most)
                place = Placement(
                    prefill=prefill,
                    prefill_kind=front.kind,
                    decode=decode,
                    decode_kind=back.kind,
                    chunk_tokens=front.chunk_tokens,
                )
                yield Found(placement=place, rate=rate, whole=False)

    # --- the whole ---

    def _whole(self, rough: Found) -> Found:
        target = self._q.target
        seen: dict[int, Outcome] = {}

        def passes(power: int) -> bool:
            jobs = self._jobs(FINE**power)
            allowed = int((1 - target) * len(jobs) + 1e-9)
            seen[power] = simulate(rough.placement, self._latency, jobs, slo=self.slo, missed_allowed=allowed)
            return not seen[power].stopped

        most = math.floor(math.log(self._most_rate * rough.placement.workers, FINE))
        power = highest(passes, round(math.log(rough.rate, FINE)), most, first=2)
        if power is None:
            return replace(rough, rate=0.0, whole=True)
        over = seen.get(power + 1)
        return replace(
            rough,
            rate=FINE**power,
            whole=True,
            attainment=attainment(seen[power].records, self.slo),
            held_by=most_missed(over.records, self.slo) if over else "",
        )


def _order(found: Found) -> tuple[float, int]:
    """Best rate per worker first; of equals (within the grid of the figures) the one that uses more workers."""
    return (-round(math.log(found.per_worker, FINE)) if found.rate > 0 else math.inf, -found.placement.workers)


def _pair_passes(front: Curve, prefill: int, back: Curve, decode: int, target: float) -> Callable[[float], bool]:
    return lambda rate: front.at(rate / prefill) * back.at(rate / decode) >= target


def _first_tokens(jobs: list[Job]) -> list[Job]:
    return [job._replace(output_tokens=1) for job in jobs]


def most_missed(records: list[Record], slo: SLO) -> str:
    counts: dict[str, int] = {}
    for record in records:
        for name in slo.missed(record) if record.first_s < math.inf else ():
            counts[name] = counts.get(name, 0) + 1
    return max(counts, key=lambda name: counts[name]) if counts else ""


def idle_times(question: Question) -> Idle:
    """Some requests of the trace, one at a time, on the kind of worker that is fastest with the first of them."""
    jobs = list(question.trace.jobs)
    step = max(1, len(jobs) // IDLE_JOBS)
    some = [job._replace(blocks=()) for job in jobs[::step][:IDLE_JOBS]]
    apart = [job._replace(at_s=1e6 * number, output_tokens=min(IDLE_OUTPUTS, job.output_tokens)) for number, job in enumerate(some)]
    best: Idle | None = None
    for kind in question.latency.kinds:
        place = Placement(shared=1, shared_kind=kind, chunk_tokens=max(question.chunk_tokens or kind.chunk_tokens))
        records = simulate(place, question.latency, apart).records
        lives = [record.ttft_s + (job.output_tokens - 1) * record.tpot_s for record, job in zip(records, some, strict=True) if record.done]
        records = [record for record in records if record.done]
        idle = Idle(
            ttft_s=tuple(record.ttft_s for record in records),
            tpot_s=tuple(record.tpot_s for record in records),
            tbt_s=tuple(record.tbt_s for record in records),
            life_s=sum(lives) / max(1, len(lives)),
            refused=len(some) - len(records),
        )
        if best is None or (-idle.refused, -idle.life_s) > (-best.refused, -best.life_s):
            best = idle
    if best is None:
        raise ValueError("a latency model has at least one kind")
    return best


__all__ = ["Answer", "Found", "Idle", "Question", "search"]
