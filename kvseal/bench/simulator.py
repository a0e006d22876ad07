"""Whether the placement simulator tells the truth: figure 12 of the performance notes. ``kvseal bench simulator``.

Owns three comparisons. (a) The share of requests in time, predicted and measured, at four rates: the real engine runs the very requests
that are simulated, with a latency model fitted on the same engine just before. (b) DistServe's published optimum from its published
coefficients: 1.56 requests per second and GPU for OPT-13B on ShareGPT, with two GPUs for prefill and one for decode. (c) The time that a
search over 32 workers takes, on one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvseal.bench.fit import Stopwatch, fitted, measure
from kvseal.bench.place.latency import PUBLISHED, Knots, Latency, WorkerKind, load
from kvseal.bench.place.live import SkippingClock, StepTimer, run_live
from kvseal.bench.place.search import Answer, Found, Question, search
from kvseal.bench.place.simulate import Placement, simulate
from kvseal.bench.place.slo import SLO, Asked, attainment, parse_slo, quantile
from kvseal.bench.place.trace import Job, Trace, read_trace
from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.rig import Rig
from kvseal.core.config import EngineConfig
from kvseal.node.build import build_engine
from kvseal.node.engine import Engine
from kvseal.node.models import resolve_model

POINTS, RATE, SECONDS = Target(high=3.0), Target(low=0.9, high=1.1), Target(high=60.0)

SHRINK = 8
"""Lengths of the trace are divided by it: a small model on a CPU stands in for a large one on a GPU."""
LOADS = (0.7, 0.9, 1.1, 1.3)
"""Rates, as shares of the one that the simulator finds sustainable."""
REQUESTS, QUICK_REQUESTS = 120, 30
LIMIT_TTFT, LIMIT_TPOT = 5.0, 3.0
"""Limits, in multiples of what the median request takes alone."""
CHUNK_TOKENS = 256
CALIBRATING = 15
"""Requests before each rate that tell how fast the machine is just then."""

PUBLISHED_RATE = 1.5625
PUBLISHED_STEP = 0.15625
"""Its bisection of 0 to 5 requests per second and GPU ends with steps of this size; the figure is the last rate that passed."""
PUBLISHED_PLACEMENT = (("tp 2", 1), ("tp 1", 1))
STEADY_REQUESTS = 1_000


def run(context: Context) -> Result:
    attained, plot, settings = prediction(context)
    entries = [*attained, published_optimum(context), search_time(context)]
    return Result(name="simulator", title="The placement simulator", entries=entries, plots=[plot], settings=settings)


# --- (a) ----------------------------------------------------------------------------------------------------


def shrunk(trace: Trace, by: int, longest_tokens: int) -> Trace:
    """Lengths divided; requests that would still be too long left out."""
    jobs = [
        job._replace(prompt_tokens=-(-job.prompt_tokens // by), output_tokens=max(2, job.output_tokens // by), blocks=(), block_tokens=0)
        for job in trace.jobs
    ]
    return Trace(f"{trace.name} / {by}", tuple(job for job in jobs if job.prompt_tokens + job.output_tokens <= longest_tokens), trace.timed)


def load_trace(context: Context) -> Trace:
    if context.traces is not None:
        return read_trace(context.traces / "azure-2023-conv.csv", requests=4_000)
    return read_trace(PUBLISHED / "sharegpt-opt-lengths.csv")


def prediction(context: Context) -> tuple[list[Entry], Plot, dict[str, str]]:
    name = "predicted - measured share in time, worst of 4 rates"
    timer = time.process_time if context.threads_used == 1 else time.perf_counter
    with Rig(context, chunk_tokens=1_024, step_s=None) as rig:
        context.say("fitting")
        watch = Stopwatch(rig, timer)
        measure(watch, rounds=1 if context.quick else 2, longest_tokens=rig.engine.report.served_context_tokens)
        latency, _ = fitted(rig, watch.samples, link=4e9, timer="")
        settings = rig.settings
    kind = latency.kinds[0]
    trace = shrunk(load_trace(context), SHRINK, kind.context_tokens)
    place = Placement(shared=1, shared_kind=kind, chunk_tokens=CHUNK_TOKENS)
    slo, base = limits_and_rate(latency, kind, trace)
    requests = QUICK_REQUESTS if context.quick else REQUESTS
    steps, clock = StepTimer(timer), SkippingClock(timer)
    config = EngineConfig(
        model=resolve_model(context.model),
        threads=context.threads,
        chunk_tokens=CHUNK_TOKENS,
        max_running=kind.max_running,
        max_queued=10**6,
    )
    engine = build_engine(config, clock=clock, around=steps.around)
    try:
        warm(engine, clock)
        points = [compare(context, engine, clock, steps, latency, place, trace, slo, share * base, requests) for share in LOADS]
    finally:
        engine.close()
    worst = max(abs(predicted - measured) for _, predicted, measured in points) * 100
    shown = "; ".join(f"{rate:.3g} req/s: {predicted:.1%} against {measured:.1%}" for rate, predicted, measured in points)
    entry = Entry(
        figure="12", name=name, a=Side("difference", "points", (worst,)), target=POINTS, note=f"{requests} requests a rate, {slo}: {shown}"
    )
    plot = Plot(
        title="Share of requests in time, predicted and measured",
        x_label="requests per second",
        y_label="%",
        lines=(
            Line("predicted", tuple((rate, 100 * predicted) for rate, predicted, _ in points), dashed=True),
            Line("measured", tuple((rate, 100 * measured) for rate, _, measured in points)),
        ),
    )
    return [entry], plot, settings


def limits_and_rate(latency: Latency, kind: WorkerKind, trace: Trace) -> tuple[SLO, float]:
    """Limits that bind, and the rate that one worker sustains under them."""
    asked = Asked({"ttft": (LIMIT_TTFT, True), "tpot": (LIMIT_TPOT, True)})
    question = Question(latency=latency, trace=trace, asked=asked, workers=1, requests=100, poisson=True, chunk_tokens=(CHUNK_TOKENS,))
    answer = search(question)
    return answer.slo, answer.found[0].rate if answer.found else 1.0


def speed(engine: Engine, clock: SkippingClock, steps: StepTimer, place: Placement, jobs: Sequence[Job]) -> float:
    """Measured over fitted time of all steps of these requests."""
    cost = place.shared_kind.cost if place.shared_kind else None
    steps.steps.clear()
    run_live(engine, clock, jobs, seed=2)
    fitted_s = sum(cost.step_s(step) for step, _ in steps.steps) if cost else 0.0
    return sum(seconds for _, seconds in steps.steps) / fitted_s if fitted_s else 1.0


def slower(place: Placement, factor: float) -> Placement:
    kind = place.shared_kind
    if kind is None or not isinstance(kind.cost, Knots):
        return place
    return replace(place, shared_kind=replace(kind, cost=kind.cost.scaled(factor)))


def warm(engine: Engine, clock: SkippingClock) -> None:
    run_live(engine, clock, [Job(0.0, 200, 8), Job(0.0, 30, 8)], seed=99)


def compare(
    context: Context,
    engine: Engine,
    clock: SkippingClock,
    steps: StepTimer,
    latency: Latency,
    place: Placement,
    trace: Trace,
    slo: SLO,
    rate: float,
    requests: int,
) -> tuple[float, float, float]:
    """The rate, and the shares in time: predicted and measured. The machine is as fast as it is at that moment: other requests, run first
    and not counted, give one factor for all steps."""
    factor = speed(engine, clock, steps, place, trace.at_rate(rate, CALIBRATING, poisson=True, seed=2))
    jobs = trace.at_rate(rate, requests, poisson=True, seed=1)
    predicted = simulate(slower(place, factor), latency, jobs).records
    measured = run_live(engine, clock, jobs, seed=int(1000 * rate))
    shares = attainment(predicted, slo), attainment(measured, slo)
    ttft = [quantile([record.ttft_s for record in records], 0.9) for records in (predicted, measured)]
    tpot = [quantile([record.tpot_s for record in records], 0.9) for records in (predicted, measured)]
    context.say(f"{rate:.3g} req/s (speed {factor:.3f}): in time {shares[0]:.1%} predicted, {shares[1]:.1%} measured")
    context.say(f"  P90 TTFT {ttft[0]:.3g} and {ttft[1]:.3g} s, P90 TPOT {1000 * tpot[0]:.3g} and {1000 * tpot[1]:.3g} ms")
    return rate, *shares


# --- (b) and (c) --------------------------------------------------------------------------------------------


def published_optimum(context: Context) -> Entry:
    """Splits alone, as the source's search does; among those that its own step could not tell apart, the one with the fewest GPUs."""
    name = "DistServe's optimum, OPT-13B on ShareGPT, 4 A100: req/s/GPU, ours / published"
    question = Question(
        latency=load(Path("distserve-a100-opt-13b")),
        trace=read_trace(PUBLISHED / "sharegpt-opt-lengths.csv"),
        asked=parse_slo("ttft=200ms,tpot=100ms"),
        workers=4,
        requests=300 if context.quick else STEADY_REQUESTS,
        poisson=True,
    )
    context.say("searching DistServe's placement")
    answer = search(question)
    splits = [one for one in answer.found if one.placement.split and one.rate]
    if not splits:
        return missing("12", name, "no split meets its limits", RATE)
    top = max(one.per_worker for one in splits)
    best = min((one for one in splits if one.per_worker > top - PUBLISHED_STEP), key=lambda one: (one.placement.workers, -one.per_worker))
    same = "the same placement" if placed(best) == PUBLISHED_PLACEMENT else "ANOTHER PLACEMENT"
    return Entry(
        figure="12",
        name=name,
        a=Side("ours", "req/s/GPU", (best.per_worker,)),
        b=Side("published", "req/s/GPU", (PUBLISHED_RATE,)),
        target=RATE,
        checked=f"{same} ({best.placement.name})",
        note="; ".join(f"{one.placement.name} {one.per_worker:.3g}" for one in splits[:4]),
    )


def placed(found: Found) -> tuple[tuple[str, int], ...]:
    place = found.placement
    return (
        (place.prefill_kind.name if place.prefill_kind else "", place.prefill),
        (place.decode_kind.name if place.decode_kind else "", place.decode),
    )


def search_time(context: Context) -> Entry:
    """The whole search over 32 workers, as ``kvseal place`` does it."""
    name = "search over 32 workers, one core"
    context.say("searching over 32 workers")
    model, limits = "kvseal-cpu-smollm2-135m", "ttft=10x,tpot=5x"
    kind = load(Path(model))
    trace = load_trace(context)
    answer, seconds = timed(lambda: search(Question(latency=kind, trace=trace, asked=parse_slo(limits), workers=32, poisson=True)))
    best = answer.found[0].placement.name if answer.found else answer.impossible
    return Entry(
        figure="12",
        name=name,
        a=Side("CPU time", "s", (seconds,)),
        target=SECONDS,
        note=f"{trace.name}, {model}, {limits}; recommends {best}",
    )


def timed(work: Callable[[], Answer]) -> tuple[Answer, float]:
    began_s = time.process_time()
    answer = work()
    return answer, time.process_time() - began_s


def main() -> int:
    return benchmark_main("simulator", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
