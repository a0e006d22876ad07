"""Whether splitting prefill from decode pays on this machine: figure 11 of the performance notes. ``kvseal bench split``.

Owns two loads (256-token prompts with 128-token answers, 1,024 with 192) on three ways to use two workers of one thread each: one for
prompts and one for answers, two colocated with the best chunk size, two colocated that compute every prompt in one step. Limits: TTFT 10
times, and the longest tenth of the gaps between tokens 3 times what a request takes alone; goodput is the highest rate with 90 % in time.

Simulated, with a latency model fitted here just before, and measured over HTTP with real servers at four rates: the split and the way that
the target compares it with, all three and more requests with ``--full-size``. A way that gets less than half of the requests done in time
is not measured at higher rates, and whatever is open `PATIENCE_S` after the last arrival counts as late: the command ends in minutes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
SHARES = (0.6, 0.8, 1.0, 1.2)
"""Measured rates, as shares of the best one that was predicted."""
SPAN_S, QUICK_SPAN_S = 12.0, 3.0
"""For the arrivals of one rate."""
LEAST_REQUESTS, FULL_REQUESTS = 6, 40
"""Of one rate: what a few minutes allow at less than a request per second, and with ``--full-size``."""
PATIENCE_S = 15.0
HOPELESS = 0.5
"""Of the requests in time: higher rates are not measured."""
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
    top = max((way.found.rate for way in ways), default=0.0)
    found: dict[str, Points] = {}
    for way in ways if top else ():
        if way.name not in (SPLIT, case.against) and not context.full_size:
            continue
        try:
            with servers(way.commands(model)) as urls:
                found[way.name] = _shares(context, case, way, urls, top)
        except ServerFailed as failed:
            context.say(f"{way.name}: {failed}")
    return found


def _shares(context: Context, case: Case, way: Way, urls: Sequence[str], top: float) -> Points:
    span_s = QUICK_SPAN_S if context.quick else SPAN_S
    least = FULL_REQUESTS if context.full_size else LEAST_REQUESTS
    run_served(urls, case.trace.at_rate(8.0, 2, poisson=False), patience_s=PATIENCE_S)  # whatever happens once happens here
    points: list[tuple[float, float]] = []
    for number, share in enumerate(SHARES):
        rate = share * top
        jobs = case.trace.at_rate(rate, max(least, round(rate * span_s)), poisson=True, seed=4 + number)
        records = run_served(urls, jobs, seed=number, patience_s=PATIENCE_S)
        points.append((rate, attainment(records, way.slo)))
        context.say(f"{case.name}, {way.name} at {rate:.3g} req/s: {points[-1][1]:.0%} of {len(jobs)} in time")
        if points[-1][1] < HOPELESS:
            break
    return tuple(points)


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
        entries.append(_ratio(case, other, rates, "measured", f"MEASURED over HTTP; {limits}; in time: {shares}"))
    return entries


def _ratio(case: Case, other: str, rates: dict[str, float], how: str, note: str) -> Entry:
    name = f"goodput {how}, {case.name}, split / {other}"
    target = case.target if other == case.against else None
    ours, theirs = rates.get(SPLIT, 0.0), rates.get(other, 0.0)
    if not ours or not theirs:
        what = f"{SPLIT} {ours:.3g} req/s, {other} {theirs:.3g}: one of them meets the limits at no rate that was tried"
        return missing("11", name, f"{what} ({note})", target)
    return Entry(figure="11", name=name, a=Side(SPLIT, "req/s", (ours,)), b=Side(other, "req/s", (theirs,)), target=target, note=note)


def plot_of(latency: Latency, case: Case, ways: Sequence[Way], found: dict[str, Points]) -> Plot:
    """Share in time over the rate: measured, and predicted by the fast model at the same requests' rates."""
    lines: list[Line] = []
    top = max((way.found.rate for way in ways), default=1.0) or 1.0
    for way in ways:
        if way.name in found:
            lines.append(Line(way.name, tuple((rate, 100 * share) for rate, share in found[way.name])))
        points = []
        for share in (0.1, 0.2, *SHARES, 1.6):
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
