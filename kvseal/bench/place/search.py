"""The search: every placement of so many workers, by the highest rate at which enough requests meet their limits.

Owns the order of work. Candidates are judged with the fast model of the scheduler (`fast`). Of splits there may be too many even for that:
the pool of prefill workers and the pool of decode workers are simulated apart, in the way of DistServe (OSDI '24, section 4.1), which finds
the division where both sustain the same rate in a few runs; the divisions around it are then simulated whole. The best colocated placement
and the best split are sought once more with the engine's own scheduler (`simulate`): only those figures are promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvseal.bench.place.curves import Curve, highest
from kvseal.bench.place.fast import simulate_fast
from kvseal.bench.place.idle import MORE_JOBS, Idle, idle_times
from kvseal.bench.place.latency import Latency, WorkerKind
from kvseal.bench.place.simulate import Outcome, Placement, simulate
from kvseal.bench.place.slo import SLO, Asked, Record, attainment
from kvseal.bench.place.trace import Job, Trace

FINE = 1.02
"""Promised rates are powers of it."""
CURVE_MISSED = 0.25
"""A run for a curve stops when so many have missed: nothing below is of interest."""
NEARLY = 0.8
"""Kinds of worker that cannot reach this share of the best so far are not looked at more closely."""
PAIRS = 3
"""Pairs of kinds whose splits are looked at."""
NEAR, NEAR_AT_MOST = 0.9, 4
"""Placements that come so near the best of their kind are compared on the fine grid."""
CONFIRM_TIMES = 2
"""The engine's own scheduler confirms a rate with so many times the requests asked for."""
MORE_AT_MOST = 120
"""Steps of the fine grid (a factor of ten) that shared prefixes may add to what the fast model found."""
LOWER_AT_MOST = 6
"""Times that a rate is lowered, by more each time, until the scheduler keeps what the fast model promised."""
WINDOW_TTFTS = 20
WINDOW_LIVES = 10
"""A run lasts at least so many times the limit of TTFT, and so many lifetimes of a request, so that a growing queue shows."""
RARE = 100
"""So many lifetimes of a request between two, where what fails for want of anything is looked at."""
MOST_TIMES = 5
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One placement and the rate that it sustains."""

    placement: Placement
    rate: float
    promised: bool = False
    """Simulated with the engine's own scheduler, and sought closely; the others with the fast model, to the grid of the curves."""
    attainment: float = 0.0
    """At `rate`, where it is promised."""
    held_by: str = ""
    """The limit that most requests miss just above `rate`."""

    @property
    def per_worker(self) -> float:
        """Of those that it uses."""
        return self.rate / self.placement.workers


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
        return next((one for one in self.found if one.placement.split is split), None)


Tell = Callable[[str, str], None]
"""Is told of each step of the search: the phase, and what is simulated now."""


def search(question: Question, tell: Tell = lambda phase, what: None) -> Answer:
    """All placements of at most `workers` workers, best first. Deterministic."""
    return _Search(question, tell).answer()


class _Pool:
    """Workers of one side of a split."""

    def __init__(self, kind: WorkerKind, count: int, chunk_tokens: int, curve: Curve, target: float, guess: float) -> None:
        self.kind = kind
        self.count = count
        self.chunk_tokens = chunk_tokens
        self._curve = curve
        self._target = target
        self._guess = guess
        self._rate: float | None = None

    @property
    def rate(self) -> float:
        """That they sustain. Sought when first asked for."""
        if self._rate is None:
            self._rate = self._curve.goodput(self._target, self._guess)
        return self._rate

    def reaches(self, rate: float) -> bool:
        return self._curve.reaches(self._target, rate)


class _Search:
    def __init__(self, question: Question, tell: Tell) -> None:
        self._q = question
        self._tell = tell
        tell("requests alone", "")
        self._latency = question.latency
        self._kinds = sorted((kind for kind in question.latency.kinds if kind.width <= question.workers), key=lambda kind: kind.width)
        self.idle = idle_times(question.latency, question.trace, question.chunk_tokens)
        self.slo = question.asked.resolved(self.idle.typical())
        self._guess = 1.0 / max(1e-9, self.idle.life_s)
        self._pools: dict[tuple[str, bool], dict[int, _Pool]] = {}

    def answer(self) -> Answer:
        impossible = self._impossible(self.idle)
        if impossible:
            return self._none(impossible)
        rough = sorted((*self._shared(), *self._splits()), key=_order)
        found: list[Found] = []
        for split in (False, True):
            some = [one for one in rough if one.placement.split is split]
            near = [one for one in some if one.rate and one.rate >= NEAR * some[0].rate][:NEAR_AT_MOST]
            closer = sorted(map(self._closer, near), key=_order)
            found += [self._promise(one) if not number and one.rate else one for number, one in enumerate(closer)]
            found += [one for one in some if one not in near]
        if not any(one.rate for one in found):
            more = idle_times(self._latency, self._q.trace, self._q.chunk_tokens, MORE_JOBS)
            return self._none(self._impossible(more) or self._held())
        return Answer(question=self._q, slo=self.slo, idle=self.idle, found=tuple(sorted(found, key=_order)))

    def _none(self, impossible: str) -> Answer:
        return Answer(question=self._q, slo=self.slo, idle=self.idle, found=(), impossible=impossible)

    def _held(self) -> str:
        """Which limit the search has failed at: what most requests miss where hardly any come."""
        kind, rate = self._kinds[0], self._guess / RARE
        place = Placement(shared=self._q.workers // kind.width, shared_kind=kind, chunk_tokens=self._chunks(kind)[0])
        jobs = self._jobs(rate)
        missed = most_missed(simulate_fast(place, self._latency, jobs, slo=self.slo, missed_allowed=len(jobs)).records, self.slo)
        why = f": {missed} is missed first, so ask less of it" if missed else ""
        return f"enough requests would meet the limits alone, and no placement keeps them at any rate that was tried{why}"

    def _impossible(self, idle: Idle) -> str:
        if not self._kinds:
            least = min(kind.width for kind in self._latency.kinds)
            return f"the smallest kind of worker takes {least} devices, and --workers is {self._q.workers}"
        count, target = len(idle.ttft_s) + idle.refused, self._q.target
        needed = max(1, math.ceil(target * count - 1e-9))
        if count - idle.refused < needed:
            most = max(self._kinds, key=lambda kind: kind.context_tokens)
            return (
                f"{idle.refused} of {count} requests fit no worker: at most {min(most.context_tokens, most.pool_tokens)} tokens of "
                "prompt and output are served together"
            )
        alone = {"ttft": idle.ttft_s, "tpot": idle.tpot_s, "tbt": idle.tbt_s}
        for name, limit in self.slo.limits():
            if limit is not None and sum(value <= limit for value in alone[name]) < needed:
                good = sum(value <= limit for value in alone[name]) / count
                need = sorted(alone[name])[needed - 1]
                return (
                    f"{name}={limit:.4g} s cannot be met: alone on an idle worker only {good:.0%} of the requests would meet it, and "
                    f"{target:.0%} must; {name}={need:.3g} is the least that could be asked"
                )
        met = idle.met(self.slo)
        if met < needed:
            return f"alone on an idle worker only {met / count:.0%} of the requests would meet all limits together, and {target:.0%} must"
        return ""

    # --- runs ---

    def _jobs(self, rate: float) -> list[Job]:
        least = max(WINDOW_TTFTS * (self.slo.ttft_s or 0.0), WINDOW_LIVES * self.idle.life_s)
        requests = min(MOST_TIMES * self._q.requests, max(self._q.requests, math.ceil(rate * least)))
        return self._q.trace.at_rate(rate, requests, poisson=self._q.poisson, seed=self._q.seed)

    def _most_rate(self) -> float:
        """Above it all requests of a run would come within one lifetime."""
        return MOST_TIMES * self._q.requests / max(1e-6, self.idle.life_s)

    def _curve(self, place: Placement, slo: SLO, load: Callable[[list[Job]], list[Job]] = list) -> Curve:
        """Of a pool, with what `load` makes of the jobs that come at a rate."""

        def at(rate: float) -> float:
            jobs = load(self._jobs(rate))
            outcome = simulate_fast(place, self._latency, jobs, slo=slo, missed_allowed=int(CURVE_MISSED * len(jobs)))
            return 0.0 if outcome.stopped else attainment(outcome.records, slo)

        return Curve(at, self._most_rate())

    def _chunks(self, kind: WorkerKind) -> tuple[int, ...]:
        return self._q.chunk_tokens or kind.chunk_tokens

    # --- shared workers ---

    def _shared(self) -> Iterator[Found]:
        best = guess = 0.0
        for kind in self._kinds:
            count = self._q.workers // kind.width
            for chunk in self._chunks(kind):
                place = Placement(shared=count, shared_kind=kind, chunk_tokens=chunk)
                self._tell("colocated workers", place.name)
                curve = self._curve(place, self.slo)
                if best and not curve.reaches(self._q.target, NEARLY * best):
                    continue
                rate = curve.goodput(self._q.target, guess or self._guess * count)
                best, guess = max(best, rate), rate or guess
                yield Found(placement=place, rate=rate)

    # --- splits: pools of each side ---

    def _pool(self, kind: WorkerKind, count: int, *, prefill: bool) -> _Pool:
        """So many workers of one side, with the chunk size that was best for the first such pool that was looked at; kept."""
        side = self._pools.setdefault((kind.name, prefill), {})
        if count not in side:
            known = next(iter(side.values()), None)
            guess = self._guess * count if known is None else known.rate / known.count * count
            chunks = self._chunks(kind) if known is None and prefill else (0 if known is None else known.chunk_tokens,)
            best: _Pool | None = None
            for chunk in chunks:
                made = self._one_side(kind, count, chunk, guess, prefill=prefill)
                if best is None or made.reaches(best.rate * FINE):
                    best, guess = made, made.rate if len(chunks) > 1 else guess
            if best is None:
                raise ValueError("a kind of worker has at least one chunk size")
            side[count] = best
        return side[count]

    def _one_side(self, kind: WorkerKind, count: int, chunk: int, guess: float, *, prefill: bool) -> _Pool:
        self._tell("each side of a split by itself", f"{count} {'prefill, chunks of ' + str(chunk) if prefill else 'decode'}")
        if prefill:
            place = Placement(prefill=count, prefill_kind=kind, chunk_tokens=chunk)
            curve = self._curve(place, SLO(ttft_s=self.slo.ttft_s), _first_tokens)
        else:
            place = Placement(decode=count, decode_kind=kind)
            curve = self._curve(place, SLO(tpot_s=self.slo.tpot_s, tbt_s=self.slo.tbt_s))
        return _Pool(kind, count, chunk, curve, self._q.target, guess or self._guess)

    def _pairs(self) -> list[tuple[WorkerKind, WorkerKind]]:
        """Kinds for prefill and decode, the most promising pairs first, judged by what one worker of each sustains per device."""
        if len(self._kinds) == 1:
            return [(self._kinds[0], self._kinds[0])]
        fronts = {kind.name: self._pool(kind, 1, prefill=True).rate / kind.width for kind in self._kinds}
        backs = {kind.name: self._pool(kind, 1, prefill=False).rate / kind.width for kind in self._kinds}

        def devices(pair: tuple[WorkerKind, WorkerKind]) -> float:
            """That one request per second takes."""
            front, back = fronts[pair[0].name], backs[pair[1].name]
            return 1 / front + 1 / back if front and back else math.inf

        pairs = [(one, other) for one in self._kinds for other in self._kinds if one.width + other.width <= self._q.workers]
        return [pair for pair in sorted(pairs, key=devices)[:PAIRS] if devices(pair) < math.inf]

    def _splits(self) -> Iterator[Found]:
        seen: set[Placement] = set()
        for pair in self._pairs():
            for front, back in self._balanced(*pair):
                place = Placement(
                    prefill=front.count,
                    prefill_kind=front.kind,
                    decode=back.count,
                    decode_kind=back.kind,
                    chunk_tokens=front.chunk_tokens,
                )
                if place not in seen and front.rate:
                    seen.add(place)
                    self._tell("whole splits", place.name)
                    yield Found(placement=place, rate=self._curve(place, self.slo).goodput(self._q.target, front.rate))

    def _balanced(self, kind: WorkerKind, other: WorkerKind) -> Iterator[tuple[_Pool, _Pool]]:
        """Divisions of the workers around the one where both sides sustain the same: with more for prefill, decode holds all back."""
        workers = self._q.workers
        low, high = 1, (workers - other.width) // kind.width
        while low < high:
            middle = (low + high) // 2
            front = self._pool(kind, middle, prefill=True)
            keeps_up = self._pool(other, (workers - middle * kind.width) // other.width, prefill=False).reaches(front.rate)
            low, high = (middle + 1, high) if keeps_up else (low, middle)
        for prefill in (low, low - 1, low + 1):
            decode = (workers - prefill * kind.width) // other.width
            if prefill < 1 or decode < 1:
                continue
            front = self._pool(kind, prefill, prefill=True)
            enough = self._enough(front, other, decode)
            for count in {decode, enough, max(1, enough - 1)}:  # one less than enough may still be more for each
                yield front, self._pool(other, count, prefill=False)

    def _enough(self, front: _Pool, kind: WorkerKind, most: int) -> int:
        """The fewest decode workers that sustain what these prefill workers do; `most` if none fewer does."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self._pool(kind, middle, prefill=False).reaches(front.rate):
                high = middle
            else:
                low = middle + 1
        return low

    # --- the promise ---

    def _run_at(self, run: Callable[..., Outcome], place: Placement, power: int, *, most_requests: int | None = None) -> Outcome:
        jobs = self._jobs(FINE**power)[:most_requests]
        allowed = int((1 - self._q.target) * len(jobs) + 1e-9)
        return run(place, self._latency, jobs, slo=self.slo, missed_allowed=allowed)

    def _confirm(self, place: Placement, power: int) -> Outcome:
        return self._run_at(simulate, place, power, most_requests=CONFIRM_TIMES * self._q.requests)

    def _closer(self, rough: Found) -> Found:
        """The rate to the fine grid, by the fast model."""

        def passes(power: int) -> bool:
            return not self._run_at(simulate_fast, rough.placement, power).stopped

        self._tell("the best of each sort, more finely", rough.placement.name)
        most = math.floor(math.log(self._most_rate(), FINE))
        power = highest(passes, round(math.log(rough.rate, FINE)), most, first=2)
        return replace(rough, rate=0.0 if power is None else FINE**power)

    def _promise(self, close: Found) -> Found:
        """The same, lowered until the engine's own scheduler keeps it."""
        place = close.placement
        power = round(math.log(close.rate, FINE))
        if any(job.blocks for job in self._q.trace.jobs):  # prefixes are shared, and the fast model knows nothing of that
            power = highest(lambda one: not self._confirm(place, one).stopped, power, power + MORE_AT_MOST, first=4) or power
        over = self._run_at(simulate_fast, place, power + 1)
        for lower in range(LOWER_AT_MOST):
            self._tell("confirmed with the scheduler itself", place.name)
            outcome = self._confirm(place, power - lower * lower)
            if not outcome.stopped:
                return replace(
                    close,
                    rate=FINE ** (power - lower * lower),
                    promised=True,
                    attainment=attainment(outcome.records, self.slo),
                    held_by=most_missed(over.records, self.slo),
                )
            over = outcome
        return replace(close, rate=0.0)


def _order(found: Found) -> tuple[float, int]:
    """The highest rate first: all placements have the same workers to use. Of equals on the fine grid, the one that takes fewer."""
    return (-round(math.log(found.rate, FINE)) if found.rate > 0 else math.inf, found.placement.workers)


def _first_tokens(jobs: list[Job]) -> list[Job]:
    return [job._replace(output_tokens=1) for job in jobs]


def most_missed(records: list[Record], slo: SLO) -> str:
    counts: dict[str, int] = {}
    for record in records:
        for name in slo.missed(record) if record.first_s < math.inf else ():
            counts[name] = counts.get(name, 0) + 1
    return max(counts, key=lambda name: counts[name]) if counts else ""


__all__ = ["Answer", "Found", "Idle", "Question", "search"]
