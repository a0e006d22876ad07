"""The latency model of this machine's engine, for `kvseal place`: ``kvseal bench fit``.

Owns the experiments and the fit. The real engine runs chosen loads (prompts of many lengths, one chunk after another of long ones, decoders
few and many with short and long contexts, prompts that join decoders); every step is timed whole, scheduling included, and what was in it
is noted. Times are then fitted with coefficients that are never negative (`place.latency.Knots`), each step weighted by one over its time,
so that short steps count as much as long ones. Prints how far the fit is from what was measured; writes JSON. Never judges.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvseal.bench.place.command import fitted_path
from kvseal.bench.place.instance import step_of
from kvseal.bench.place.latency import Knots, Latency, Step, WorkerKind, save
from kvseal.bench.place.least_squares import Vector, nonnegative
from kvseal.bench.suite.command import Context, facts, thread_count
from kvseal.bench.suite.reports import check_files
from kvseal.bench.suite.rig import Rig
from kvseal.bench.suite.workloads import Ask
from kvseal.core.batch import Batch
from kvseal.core.errors import KVSealError
from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import Request, SamplingParams
from kvseal.node.build import STEP_TARGET_S

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CHUNK_TOKENS = 1_024
LONG_TOKENS = 3_072
DECODERS = (1, 2, 4, 8, 16, 32)
DECODED = 12
"""Steps of each set of decoders that are timed."""
CHUNKS_TO_TRY = (64, 128, 256, 512)
LINK_BYTES_PER_S = 4e9
"""What a hand-off moves at least, see docs/placement.md."""
HANDOFF_STEP_S = 0.003


@dataclass(frozen=True, slots=True)
class Sample:
    step: Step
    seconds: float


class Stopwatch:
    """Runs requests on the engine and keeps the time of every step."""

    def __init__(self, rig: Rig, timer: Callable[[], float]) -> None:
        self.samples: list[Sample] = []
        self._rig = rig
        self._timer = timer
        self._step: Step | None = None
        self._asked = 0
        self._chance = random.Random(12)
        rig.watcher.on_step = self._saw

    def _saw(self, batch: Batch, _: float) -> None:
        self._step = step_of(batch)

    def prompt(self, tokens: int, prefix: Sequence[int] = ()) -> tuple[int, ...]:
        """Random tokens after `prefix`."""
        return (*prefix, *(self._chance.randrange(100, 40_000) for _ in range(tokens - len(prefix))))

    def run(self, asks: Sequence[Ask], *, later: Sequence[Ask] = (), keep: bool = True) -> None:
        """All `asks` at once; `later` ones join when every one of them decodes."""
        engine, scope = self._rig.engine, Scope(bytes(16))
        for ask in asks:
            self._submit(ask, scope)
        waiting = list(later)
        while engine.has_work:
            self._step = None
            began_s = self._timer()
            engine.step()
            seconds = self._timer() - began_s
            step = self._step
            if step is None:
                continue
            if keep:
                self.samples.append(Sample(step, seconds))
            if waiting and not step.prefill_tokens:
                self._submit(waiting.pop(0), scope)

    def _submit(self, ask: Ask, scope: Scope) -> None:
        self._asked += 1
        request = Request(
            request_id=RequestId(f"fit-{self._asked}"),
            prompt_tokens=ask.prompt,
            max_output_tokens=ask.output_tokens,
            scope=scope,
            sampling=SamplingParams(temperature=0.0),
        )
        refused = self._rig.engine.submit(request)
        if refused is not None:
            raise refused.error


def measure(watch: Stopwatch, *, rounds: int, longest_tokens: int) -> None:
    """The experiments. Each round is the same loads with other tokens, so nothing is found in the cache."""
    watch.run([Ask(watch.prompt(64), 4)], keep=False)
    for _ in range(rounds):
        for length in (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024):
            if length < longest_tokens:
                watch.run([Ask(watch.prompt(length), 1)])
        long = watch.prompt(min(LONG_TOKENS, longest_tokens - 64))
        for count in DECODERS:
            watch.run([Ask(watch.prompt(24), DECODED) for _ in range(count)])
        watch.run([Ask(long, 2)])
        for count in (1, 4, 16):  # the long prompt is cached now: long contexts for little work
            watch.run([Ask(watch.prompt(len(long) + 16, long), DECODED) for _ in range(count)])
        for length in (32, 128, 512):
            watch.run([Ask(watch.prompt(24), DECODED) for _ in range(8)], later=[Ask(watch.prompt(length), 1)])


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """One for each shape of step, decode contexts taken together roughly: the median of their times."""
    groups: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        step = sample.step
        key = (
            step.prefill_rows,
            step.prefill_tokens,
            round(step.pairs) // 50_000,
            step.decode_rows,
            step.decode_context // 512,
            step.sampled,
        )
        groups.setdefault(key, []).append(sample)
    return [Sample(_middle([one.step for one in group]), statistics.median(one.seconds for one in group)) for group in groups.values()]


def _middle(steps: Sequence[Step]) -> Step:
    return steps[len(steps) // 2]._replace(
        pairs=statistics.fmean(step.pairs for step in steps), decode_context=round(statistics.fmean(step.decode_context for step in steps))
    )


def fit(samples: Sequence[Sample], knots: Sequence[int] = KNOTS) -> Knots:
    """Non-negative least squares of relative errors. Raises `ValueError` with fewer samples than coefficients."""
    used = [knot for knot in knots if knot <= max(sample.step.prefill_tokens + sample.step.decode_rows for sample in samples)]
    if len(samples) < len(used) + 4:
        raise ValueError(f"{len(samples)} kinds of step are too few for {len(used) + 4} coefficients")
    rows = [_features(sample.step, used) for sample in samples]
    weights = np.array([1.0 / sample.seconds for sample in samples])
    features: Vector = np.array(rows) * weights[:, None]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    found = nonnegative(features / scale, np.ones(len(samples))) / scale
    curve, (logits_s, sampled_s, pair_s, context_s) = found[: len(used)], found[len(used) :]
    return Knots(
        tuple(used),
        tuple(map(float, curve)),
        logits_s=float(logits_s),
        sampled_s=float(sampled_s),
        pair_s=float(pair_s),
        context_s=float(context_s),
    )


def _features(step: Step, knots: Sequence[int]) -> list[float]:
    """Weights of the knots (two neighbours share a step between them), then the terms of `Knots`."""
    count = step.prefill_tokens + step.decode_rows
    hats = [0.0] * len(knots)
    if count <= knots[0]:
        hats[0] = 1.0
    else:
        at = min(next((place for place, knot in enumerate(knots) if knot > count), len(knots) - 1), len(knots) - 1)
        share = (count - knots[at - 1]) / (knots[at] - knots[at - 1])
        hats[at - 1], hats[at] = 1.0 - share, share
    return [*hats, float(step.sampled > 0), float(step.sampled), step.pairs, float(step.decode_context)]


def errors(cost: Knots, samples: Sequence[Sample]) -> list[float]:
    """Of each sample, (fitted - measured) / measured."""
    return [cost.step_s(sample.step) / sample.seconds - 1 for sample in samples]


def residuals(cost: Knots, samples: Sequence[Sample]) -> dict[str, float]:
    sizes = sorted(abs(error) for error in errors(cost, samples))
    return {
        "kinds_of_step": float(len(samples)),
        "median": round(statistics.median(sizes), 4),
        "p90": round(sizes[int(0.9 * (len(sizes) - 1))], 4),
        "most": round(sizes[-1], 4),
    }


def fitted(rig: Rig, samples: Sequence[Sample], *, link: float, timer: str) -> tuple[Latency, list[Sample]]:
    report, shapes = rig.engine.report, merged(samples)
    cost = fit(shapes)
    machine = facts()
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    kind = WorkerKind(
        name=f"{report.model_name}, {threads}",
        cost=cost,
        pool_tokens=report.pool_tokens,
        context_tokens=report.served_context_tokens,
        max_running=report.max_running,
        page_tokens=report.page_tokens,
        chunk_tokens=(*(chunk for chunk in CHUNKS_TO_TRY if chunk < report.served_context_tokens), report.served_context_tokens),
        step_s=STEP_TARGET_S,
    )
    latency = Latency(
        model=report.model_name,
        source=f"kvseal bench fit: {threads}, {report.instruction_set}, weights {report.weights_format}, {machine.get('date', '')}",
        kv_token_bytes=report.kv_token_bytes,
        handoff_bytes_per_s=link,
        handoff_step_s=HANDOFF_STEP_S,
        kinds=(kind,),
        notes={"residuals": residuals(cost, shapes), "timer": timer, "steps": len(samples), "machine": machine},
    )
    return latency, shapes


def table(latency: Latency, shapes: Sequence[Sample]) -> str:
    cost = latency.kinds[0].cost
    lines = [f"{'prefill tokens':>14}{'pairs':>11}{'decode rows':>12}{'context':>9}{'measured':>12}{'fitted':>12}{'error':>8}"]
    for sample in sorted(shapes, key=lambda one: (one.step.decode_rows, one.step.prefill_tokens, one.step.pairs, one.step.decode_context)):
        step, guess = sample.step, cost.step_s(sample.step)
        lines.append(
            f"{step.prefill_tokens:14}{step.pairs:11.0f}{step.decode_rows:12}{step.decode_context:9}"
            f"{1000 * sample.seconds:9.2f} ms{1000 * guess:9.2f} ms{guess / sample.seconds - 1:8.1%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvseal bench fit", description="Fits the latency model of this machine, for kvseal place.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory, .gguf file, or hub id (default: the demo model)")
    parser.add_argument("--threads", type=thread_count, default=0, metavar="N", help="compute threads (default: one per core)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="repetitions of all experiments (default: %(default)s)")
    parser.add_argument("--link", type=float, default=LINK_BYTES_PER_S, metavar="BYTES/S", help="what a hand-off moves (default: 4e9)")
    parser.add_argument("--cpu-time", action="store_true", help="time steps in CPU time: for one thread on a busy machine")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: where kvseal place looks)")
    options = parser.parse_args(arguments)
    out = options.out or fitted_path()
    try:
        if options.rounds < 1 or not 0 < options.link < math.inf:
            parser.error("--rounds must be at least 1 and --link a number of bytes above 0")
        if options.cpu_time and options.threads != 1:
            parser.error("--cpu-time counts the time of all threads together: give --threads 1")
        check_files({"--out": options.out})
        context = Context(name="fit", model=options.model, threads=options.threads)
        with Rig(context, chunk_tokens=CHUNK_TOKENS, step_s=None) as rig:
            watch = Stopwatch(rig, time.process_time if options.cpu_time else time.perf_counter)
            measure(watch, rounds=options.rounds, longest_tokens=rig.engine.report.served_context_tokens)
            latency, shapes = fitted(rig, watch.samples, link=options.link, timer="CPU" if options.cpu_time else "wall")
    except KVSealError as error:
        print(f"kvseal bench fit: {error}", file=sys.stderr)
        return 2
    save(latency, out)
    found = latency.notes["residuals"]
    print(table(latency, shapes))
    print(f"{latency.kinds[0].name}: {len(watch.samples)} steps of {len(shapes)} kinds; relative errors of the fit: {found}")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
