"""Whether splitting prefill from decode pays on this machine: figure 11 of the performance notes. ``kvseal bench split``.

Owns two comparisons, each of one prefill and one decode worker with one thread against two colocated ones: against unchunked ones with
256-token prompts and 128-token answers, and against the best chunk size with 1,024 and 192. Limits: TTFT 10 times, and the longest tenth of
the gaps between tokens 3 times what a request takes alone; goodput is the highest rate with 90 % in time. Goodput is simulated, with a
latency model fitted here just before; then real servers (``kvseal serve``, two processes a side) run the rate that the split is predicted
to hold, and the shares in time are shown as measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from kvseal.bench.fit import Stopwatch, fitted, measure
from kvseal.bench.place.fast import simulate_fast
from kvseal.bench.place.latency import Latency
from kvseal.bench.place.search import Answer, Found, Question, search
from kvseal.bench.place.served import ServerFailed, run_served, servers
from kvseal.bench.place.slo import attainment, parse_slo, quantile
from kvseal.bench.place.trace import fixed
from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.rig import Rig
from kvseal.node.models import resolve_model

LIMITS = "ttft=10x,tbt=3x"
UNCHUNKED_TOKENS = 8_192
REQUESTS = 300
MEASURED, QUICK_MEASURED = 60, 12
BELOW = 0.9
"""Of the predicted goodput: the rate that is measured."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt_tokens: int
    output_tokens: int
    chunks: tuple[int, ...]
    target: Target


CASES = (
    Case("2 unchunked, 256/128", 256, 128, (UNCHUNKED_TOKENS,), Target(low=8.0)),
    Case("best of 2 chunked, 1024/192", 1_024, 192, (32, 64, 128, 256, 512), Target(low=2.0)),
)


def run(context: Context) -> Result:
    one = replace(context, threads=1)
    latency, settings = fit_one_thread(one)
    entries: list[Entry] = []
    plots: list[Plot] = []
    for case in CASES:
        context.say(f"simulating 1 prefill + 1 decode against {case.name}")
        answer = predicted(latency, case)
        entries.append(goodput_entry(case, answer))
        plots.append(curve_plot(latency, case, answer))
        entries.append(measured_entry(one, case, answer))
    return Result(name="split", title="Prefill and decode apart", entries=entries, plots=plots, settings=settings)


def fit_one_thread(context: Context) -> tuple[Latency, dict[str, str]]:
    with Rig(context, chunk_tokens=1_024, step_s=None) as rig:
        context.say("fitting")
        watch = Stopwatch(rig, time.process_time)
        measure(watch, rounds=1 if context.quick else 3, longest_tokens=rig.engine.report.served_context_tokens)
        latency, _ = fitted(rig, watch.samples, link=4e9, timer="CPU")
        return latency, rig.settings


def predicted(latency: Latency, case: Case) -> Answer:
    trace = fixed(case.prompt_tokens, case.output_tokens)
    return search(
        Question(
            latency=latency, trace=trace, asked=parse_slo(LIMITS), workers=2, requests=REQUESTS, poisson=True, chunk_tokens=case.chunks
        )
    )


def goodput_entry(case: Case, answer: Answer) -> Entry:
    name = f"goodput simulated, 1 prefill + 1 decode / {case.name}"
    split, shared = answer.best(split=True), answer.best(split=False)
    if split is None or not split.rate:
        return missing("11", name, f"the split meets the limits at no rate ({answer.slo}) {answer.impossible}", case.target)
    if shared is None or not shared.rate:
        return missing("11", name, f"colocated workers meet the limits at no rate, the split at {split.rate:.3g} req/s", case.target)
    return Entry(
        figure="11",
        name=name,
        a=Side(split.placement.name, "req/s", (split.rate,)),
        b=Side(shared.placement.name, "req/s", (shared.rate,)),
        target=case.target,
        note=f"SIMULATED; {answer.slo}; first missed: split {split.held_by or '-'}, colocated {shared.held_by or '-'}",
    )


def curve_plot(latency: Latency, case: Case, answer: Answer) -> Plot:
    """Share in time over the rate, from the fast model."""
    trace = fixed(case.prompt_tokens, case.output_tokens)
    lines = []
    for found in (answer.best(split=True), answer.best(split=False)):
        if found is None:
            continue
        middle = max((one.rate for one in answer.found), default=1.0) or 1.0
        points = []
        for share in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6):
            outcome = simulate_fast(found.placement, latency, trace.at_rate(share * middle, REQUESTS, poisson=True))
            points.append((share * middle, 100 * attainment(outcome.records, answer.slo)))
        lines.append(Line(found.placement.name, tuple(points)))
    return Plot(title=f"Share in time against {case.name} (simulated)", x_label="requests per second", y_label="%", lines=tuple(lines))


def measured_entry(context: Context, case: Case, answer: Answer) -> Entry:
    name = f"share in time measured, 1 prefill + 1 decode / {case.name}"
    split, shared = answer.best(split=True), answer.best(split=False)
    if split is None or not split.rate:
        return missing("11", name, "nothing to measure: the split meets the limits at no rate")
    rate = BELOW * split.rate
    jobs = fixed(case.prompt_tokens, case.output_tokens).at_rate(rate, QUICK_MEASURED if context.quick else MEASURED, poisson=True, seed=4)
    chunk = case.chunks[0] if shared is None else min(shared.placement.chunk_tokens, UNCHUNKED_TOKENS)
    model = str(resolve_model(context.model))
    try:
        context.say(f"measuring 1 prefill + 1 decode at {rate:.3g} req/s")
        with servers([[model, "--prefill", "1", "--decode", "1", "--threads", "1", "--chunk-tokens", str(_chunk(split))]]) as urls:
            apart = run_served(urls, jobs)
        context.say(f"measuring 2 colocated at {rate:.3g} req/s")
        with servers([[model, "--threads", "1", "--chunk-tokens", str(chunk)]] * 2) as urls:
            together = run_served(urls, jobs)
    except ServerFailed as failed:
        return missing("11", name, str(failed))
    shares = [max(1e-9, 100 * attainment(records, answer.slo)) for records in (apart, together)]
    tbt = [quantile([record.tbt_s for record in records], 0.9) for records in (apart, together)]
    return Entry(
        figure="11",
        name=name,
        a=Side("1 prefill + 1 decode", "%", (shares[0],)),
        b=Side("2 colocated", "%", (shares[1],)),
        note=f"MEASURED over HTTP at {rate:.3g} req/s, {len(jobs)} requests; {answer.slo}; P90 TBT {tbt[0]:.3g} and {tbt[1]:.3g} s",
    )


def _chunk(found: Found) -> int:
    return min(found.placement.chunk_tokens, UNCHUNKED_TOKENS)


def main() -> int:
    return benchmark_main("split", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
