"""Whether splitting prefill from decode pays on this machine: figure 11 of the performance notes. ``kvseal bench split``.

Owns two loads (256-token prompts with 128-token answers, 1,024 with 192) on three ways to use two workers of one thread each: one for
prompts and one for answers, two colocated with the best chunk size, two colocated that compute every prompt in one step. Limits: TTFT 10
times, and the longest tenth of the gaps between tokens 3 times what a request takes alone; goodput is the highest rate with 90 % in time.

Simulated, with a latency model fitted here just before, and measured over HTTP with real servers: the split and the way that the target
compares it with, all three and more requests with ``--full-size``. Each way's own goodput is looked for, from its predicted rate on: down
while requests are late, up while they are not, then between. Whatever is open `PATIENCE_S` after the last arrival counts as late, and no
rate is begun that `WAY_S` leaves no time for: the command ends in minutes, and says which rates a way without a goodput was tried at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvseal.bench.fit import Stopwatch, fitted, measure
from kvseal.bench.place.fast import simulate_fast
from kvseal.bench.place.latency import Latency
from kvseal.bench.place.search import Answer, Found, Question, search
from kvseal.bench.place.served import ServerFailed, run_served, servers
from kvseal.bench.place.slo import SLO, attainment, parse_slo
from kvseal.bench.place.trace import Trace, fixed
from kvseal.bench.place.unchunked import UNCHUNKED_TOKENS
from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.rig import Rig
from kvseal.node.models import resolve_model

LIMITS = "ttft=10x,tbt=3x"
CHUNKS = (64, 128, 256, 512)
IN_TIME = 0.9
SIMULATED_REQUESTS, QUICK_SIMULATED = 300, 60
SHARES = (0.1, 0.2, 0.6, 0.8, 1.0, 1.2, 1.6)
"""Simulated rates of a plot, as shares of the best one that was predicted."""
UP, DOWN, CLOSE = 1.4, 2.0, 1.15
"""From one measured rate to the next; and how near two may be with no other between."""
MOST_RATES = 7
WAY_S, QUICK_WAY_S = 150.0, 40.0
"""For all rates of one way (with ``--full-size`` ten times as long)."""
SPAN_S, QUICK_SPAN_S = 12.0, 3.0
"""For the arrivals of one rate."""
LEAST_REQUESTS, FULL_REQUESTS = 6, 40
"""Of one rate: what a few minutes allow at less than a request per second, and with ``--full-size``."""
PATIENCE_S = 15.0
SPLIT, CHUNKED, WHOLE = "split", "chunked", "unchunked"

Points = tuple[tuple[float, float], ...]
"""Requests per second, share in time."""


@dataclass(frozen=True, slots=True)
class Case:
    prompt_tokens: int
    output_tokens: int
    against: str
    """The way that the target compares with."""
    target: Target

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens}/{self.output_tokens}"

    @property
    def trace(self) -> Trace:
        return fixed(self.prompt_tokens, self.output_tokens)


CASES = (Case(256, 128, WHOLE, Target(low=8.0)), Case(1_024, 192, CHUNKED, Target(low=2.0)))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to use the two workers, and what is predicted of it."""

    name: str
    found: Found
    slo: SLO

    def commands(self, model: str) -> list[list[str]]:
        """Of its servers, as `servers` takes them."""
        chunk = str(min(self.found.placement.chunk_tokens, UNCHUNKED_TOKENS))
        serve = ["kvseal", "serve", model, "--threads", "1", "--chunk-tokens", chunk]
        if self.name == SPLIT:
            return [[*serve, "--prefill", "1", "--decode", "1"]]
        return [serve if self.name == CHUNKED else ["kvseal.bench.place.unchunked", model]] * 2


def run(context: Context) -> Result:
    one = replace(context, threads=1)
    latency, settings = fit_one_thread(one)
    entries: list[Entry] = []
    plots: list[Plot] = []
    remarks: list[str] = []
    for case in CASES:
        context.say(f"simulating {case.name}")
        ways, why = predicted(latency, case, QUICK_SIMULATED if context.quick else SIMULATED_REQUESTS)
        remarks += why
        found = measured(one, case, ways)
        entries += entries_of(case, ways, found)
        if ways:
            plots.append(plot_of(latency, case, ways, found))
    return Result(name="split", title="Prefill and decode apart", entries=entries, plots=plots, settings=settings, remarks=tuple(remarks))


def fit_one_thread(context: Context) -> tuple[Latency, dict[str, str]]:
    with Rig(context, chunk_tokens=1_024, step_s=None) as rig:
        context.say("fitting")
        watch = Stopwatch(rig, time.process_time)
        measure(watch, rounds=1 if context.quick else 2, longest_tokens=rig.engine.report.served_context_tokens)
        latency, _ = fitted(rig, watch.samples, link=4e9, timer="CPU")
        return latency, rig.settings


# --- predicted ----------------------------------------------------------------------------------------------


def predicted(latency: Latency, case: Case, requests: int) -> tuple[list[Way], list[str]]:
    """The ways that meet the limits at some rate, and why the others do not."""
    whole = _searched(latency, case, (UNCHUNKED_TOKENS,), requests)
    chunked = _searched(latency, case, CHUNKS, requests)
    splits = [one for one in (whole.best(split=True), chunked.best(split=True)) if one is not None]
    best = {
        SPLIT: max(splits, key=lambda one: one.rate, default=None),
        CHUNKED: chunked.best(split=False),
        WHOLE: whole.best(split=False),
    }
    ways = [Way(name, found, chunked.slo) for name, found in best.items() if found is not None]
    why = [f"{case.name}, {name}: {chunked.impossible or 'no such placement'}" for name, found in best.items() if found is None]
    return ways, why


def _searched(latency: Latency, case: Case, chunks: tuple[int, ...], requests: int) -> Answer:
    asked = parse_slo(LIMITS)
    return search(Question(latency=latency, trace=case.trace, asked=asked, workers=2, requests=requests, poisson=True, chunk_tokens=chunks))


# --- measured -----------------------------------------------------------------------------------------------


def measured(context: Context, case: Case, ways: Sequence[Way]) -> dict[str, Points]:
    """Shares in time by way. A way whose servers do not start has none."""
    model = str(resolve_model(context.model))
    found: dict[str, Points] = {}
    for way in ways:
        if way.name not in (SPLIT, case.against) and not context.full_size:
            continue
        try:
            with servers(way.commands(model)) as urls:
                found[way.name] = _shares(context, case, way, urls)
        except ServerFailed as failed:
            context.say(f"{way.name}: {failed}")
    return found


def _shares(context: Context, case: Case, way: Way, urls: Sequence[str]) -> Points:
    """Measured around the way's own goodput."""
    span_s = QUICK_SPAN_S if context.quick else SPAN_S
    least = FULL_REQUESTS if context.full_size else LEAST_REQUESTS
    run_served(urls, case.trace.at_rate(8.0, 2, poisson=False), patience_s=PATIENCE_S)  # whatever happens once happens here
    until_s = time.monotonic() + (QUICK_WAY_S if context.quick else WAY_S) * (10 if context.full_size else 1)

    def lowest() -> float:
        left_s = until_s - time.monotonic() - PATIENCE_S
        return math.inf if left_s < span_s else least / left_s

    def share(rate: float) -> float:
        requests, seed = max(least, round(rate * span_s)), round(1_000 * rate)
        records = run_served(urls, case.trace.at_rate(rate, requests, poisson=True, seed=seed), seed=seed, patience_s=PATIENCE_S)
        in_time = attainment(records, way.slo)
        context.say(f"{case.name}, {way.name} at {rate:.3g} req/s: {in_time:.0%} of {requests} in time")
        return in_time

    return looked_for(share, way.found.rate, lowest)


def looked_for(share: Callable[[float], float], first: float, lowest: Callable[[], float]) -> Points:
    """Rates around the highest that has `IN_TIME`, and their shares, in order. `share`: measures one; `lowest`: the lowest that there is
    time for now, infinite when there is for none."""
    found: dict[float, float] = {}
    rate, kept, missed = first, 0.0, math.inf
    while len(found) < MOST_RATES and missed > CLOSE * kept:
        at = max(rate, lowest())
        if at == math.inf or at >= missed or (kept and at > rate):
            break
        found[at] = share(at)
        missed = min((rate for rate, in_time in found.items() if in_time < IN_TIME), default=math.inf)
        kept = max((rate for rate in found if rate < missed), default=0.0)
        if not kept:
            rate = missed / DOWN
        elif missed == math.inf:
            rate = kept * UP
        else:
            rate = math.sqrt(kept * missed)
    return tuple(sorted(found.items()))


def goodput(points: Points) -> float:
    """The highest rate with `IN_TIME`, between two measured ones by a straight line; 0 where the lowest misses."""
    best = 0.0
    passed = 1.0
    for rate, share in points:
        if share < IN_TIME:
            return best + (rate - best) * (passed - IN_TIME) / (passed - share) if best else 0.0
        best, passed = rate, share
    return best


# --- shown --------------------------------------------------------------------------------------------------


def entries_of(case: Case, ways: Sequence[Way], found: dict[str, Points]) -> list[Entry]:
    by_name = {way.name: way for way in ways}
    entries: list[Entry] = []
    for other in (WHOLE, CHUNKED):
        rates = {name: way.found.rate for name, way in by_name.items()}
        held = "; ".join(f"{way.name}: {way.found.placement.name}, {way.found.held_by or 'nothing'} missed first" for way in ways)
        limits = str(ways[0].slo) if ways else LIMITS
        entries.append(_ratio(case, other, rates, "simulated", f"SIMULATED; {limits}; {held}"))
        shares = "; ".join(
            f"{name}: " + ", ".join(f"{share:.0%} at {rate:.3g}" for rate, share in points) for name, points in found.items()
        )
        rates = {name: goodput(points) for name, points in found.items()}
        if other not in found and other != case.against:
            continue
        entries.append(_ratio(case, other, rates, "measured", f"MEASURED over HTTP; {limits}; in time: {shares}", found))
    return entries


def _ratio(case: Case, other: str, rates: dict[str, float], how: str, note: str, found: dict[str, Points] | None = None) -> Entry:
    name = f"goodput {how}, {case.name}, split / {other}"
    target = case.target if other == case.against else None
    ours, theirs = rates.get(SPLIT, 0.0), rates.get(other, 0.0)
    if not ours or not theirs:
        said = "; ".join(_without(side, rates.get(side), (found or {}).get(side)) for side in (SPLIT, other))
        return missing("11", name, f"{said} ({note})", target)
    return Entry(figure="11", name=name, a=Side(SPLIT, "req/s", (ours,)), b=Side(other, "req/s", (theirs,)), target=target, note=note)


def _without(name: str, rate: float | None, points: Points | None) -> str:
    """What is known of one of two sides that have no ratio."""
    if rate:
        return f"{name} kept the limits up to {rate:.3g} req/s"
    if points:
        return f"{name} kept them at no rate from {points[0][0]:.3g} to {points[-1][0]:.3g} req/s"
    return f"{name}: no rate that was tried"


def plot_of(latency: Latency, case: Case, ways: Sequence[Way], found: dict[str, Points]) -> Plot:
    """Share in time over the rate: measured, and predicted by the fast model at the same requests' rates."""
    lines: list[Line] = []
    top = max((way.found.rate for way in ways), default=1.0) or 1.0
    for way in ways:
        if way.name in found:
            lines.append(Line(way.name, tuple((rate, 100 * share) for rate, share in found[way.name])))
        points = []
        for share in SHARES:
            jobs = case.trace.at_rate(share * top, SIMULATED_REQUESTS, poisson=True)
            outcome = simulate_fast(way.found.placement, latency, jobs)
            points.append((share * top, 100 * attainment(outcome.records, way.slo)))
        lines.append(Line(f"{way.name}, simul.", tuple(points), dashed=True))
    marks = ((100 * IN_TIME, f"{IN_TIME:.0%} in time"),)
    title = f"Requests in time, {case.prompt_tokens}-token prompts and {case.output_tokens}-token answers"
    return Plot(title=title, x_label="requests per second", y_label="% in time", lines=tuple(lines), marks=marks)


def main() -> int:
    return benchmark_main("split", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
