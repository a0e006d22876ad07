"""What a step costs beyond its kernels: figure 9 of the performance notes. ``kvseal bench step``.

Owns the accounting of steps in which everybody decodes: from one token to the next (scheduler, ledger, page tables, native call, sampling,
events) against what of the same steps was spent in kernels, which is layers and logits. Both come of the same steps, so a noisy machine
cannot come between them. At batch 1 kernels are short, and whatever else a step does is felt most.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise

from kvseal.bench.suite.board import Entry, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.rig import Rig, RunFailed
from kvseal.bench.suite.workloads import Ask
from kvseal.core.batch import Batch
from kvseal.exec.backends.cpu_steady import SteadyRunner

PROMPT_TOKENS = 128
CHUNK_TOKENS = 1024
"""Of prompts in a step, whatever it takes: with chunks cut by time, a busy machine lets the first rows end before the last ones begin."""
STEPS, QUICK_STEPS = 128, 16
ROWS = (1, 8, 32)
LITTLE = Target(high=1.05)


def step_and_kernels_s(rig: Rig, rows: int, steps: int) -> tuple[float, float]:
    """Mean seconds from the end of one step to the end of the next, and of the kernels in between, while all `rows` decode."""
    runner = rig.watcher.inner
    if not isinstance(runner, SteadyRunner):
        raise RunFailed("this backend does not tell what its kernels take")
    ends: list[tuple[float, float, bool]] = []

    def note(batch: Batch, seconds: float) -> None:
        steady = len(batch.rows) == rows and all(len(row.tokens) == 1 for row in batch.rows)
        ends.append((time.perf_counter(), runner.kernel_seconds, steady))

    rig.watcher.on_step = note
    tokens = steps + 1 + lead_steps(rows, rig.engine.report.chunk_tokens)
    rig.run([Ask(tuple(100 + 7 * at + row for at in range(PROMPT_TOKENS)), tokens) for row in range(rows)], apart=True)
    rig.watcher.on_step = None
    spent = [(later[0] - sooner[0], later[1] - sooner[1]) for sooner, later in pairwise(ends) if sooner[2] and later[2]][:steps]
    if len(spent) < steps:
        raise RunFailed(f"in {len(spent)} steps and not in {steps} did all requests decode together")
    return sum(step_s for step_s, _ in spent) / len(spent), sum(kernel_s for _, kernel_s in spent) / len(spent)


def lead_steps(rows: int, chunk_tokens: int) -> int:
    """By how many steps the first row's first token may come before the last one's: decoding rows and the prompts share each step."""
    return math.ceil(rows * PROMPT_TOKENS / max(1, chunk_tokens - rows))


def measure(context: Context, rig: Rig) -> list[Entry]:
    steps = QUICK_STEPS if context.quick else STEPS
    engine: dict[int, list[float]] = {rows: [] for rows in ROWS}
    kernels: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for pair in range(-1, context.pairs):
        context.say(f"pair {pair + 1} of {context.pairs}" if pair >= 0 else "warm-up")
        for rows in ROWS:
            step_s, kernel_s = step_and_kernels_s(rig, rows, steps)
            if pair >= 0:
                engine[rows].append(1e3 * step_s)
                kernels[rows].append(1e3 * kernel_s)
    return [
        Entry(
            figure="9",
            name=f"whole step / its kernels, batch {rows}",
            a=Side("engine", "ms/step", tuple(engine[rows])),
            b=Side("of which in kernels", "ms/step", tuple(kernels[rows])),
            target=LITTLE if rows == 1 else None,
            note=f"{PROMPT_TOKENS} to {PROMPT_TOKENS + steps} tokens of context",
        )
        for rows in ROWS
    ]


def run(context: Context) -> Result:
    tokens = PROMPT_TOKENS + STEPS + 1 + lead_steps(max(ROWS), CHUNK_TOKENS)
    sizes = {"pool_tokens": 2 * max(ROWS) * tokens, "context_tokens": tokens, "max_running": max(ROWS), "chunk_tokens": CHUNK_TOKENS}
    settings: dict[str, str] = {}
    try:
        with Rig(context, step_s=None, **sizes) as rig:
            entries, settings = measure(context, rig), rig.settings
    except RunFailed as failed:
        entries = [missing("9", f"whole step / its kernels, batch {ROWS[0]}", str(failed), LITTLE)]
    return Result(name="step", title="What a step costs beyond its kernels", entries=entries, settings=settings)


def main() -> int:
    return benchmark_main("step", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
