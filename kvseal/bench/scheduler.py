"""What the control plane costs: CPU time of schedule + apply per running request and step, with no model. ``kvseal bench scheduler``.

Owns the null-model measurement of figure 7: real scheduler, real KV manager, results made up outside the measured time. All requests
decode; page ends, growth and sealing are inside. Also with 10,000 requests waiting, which must cost next to nothing. With
``--vllm-python`` vLLM's own scheduler does the same in its own Python, taking turns round by round. CPU time of one thread, so a busy
neighbour counts little.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.foreign import ForeignPython
from kvseal.core.batch import Batch, BatchResult, RowResult
from kvseal.core.clock import ManualClock
from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import Request, SamplingParams
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import KVManager
from kvseal.sched.scheduler import Scheduler

PAGE_TOKENS = 16
PROMPT_TOKENS = 64
STEPS_PER_ROUND = 64
ROUNDS = 9
SIZES = (16, 64, 256)
WAITING = 10_000


class Decoding:
    """A scheduler whose `running` requests decode and whose rounds are timed, one at a time."""

    def __init__(self, running: int, *, waiting: int = 0, rounds: int = ROUNDS) -> None:
        self._running = running
        self._times = max(1, SIZES[-1] // running)
        """Rounds of few requests are repeated, so that each visit takes as long."""
        self._scheduler = _decoding(running, waiting, tokens=PROMPT_TOKENS + (self._times * rounds + 2) * STEPS_PER_ROUND)
        _round(self._scheduler)

    def microseconds(self) -> float:
        """CPU microseconds per running request and step, of one visit."""
        spent = sum(_round(self._scheduler) for _ in range(self._times))
        return spent / self._times / self._running / STEPS_PER_ROUND / 1000


def turn(operations: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median of each over rounds in which they follow one another within tenths of a second, so that a change of the clock or a
    neighbour meets all of them."""
    taken: dict[str, list[float]] = {name: [] for name in operations}
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, operation in operations.items():
                taken[name].append(operation())
    finally:
        gc.enable()
        gc.unfreeze()
    return {name: median(values) for name, values in taken.items()}


def _decoding(running: int, waiting: int, *, tokens: int) -> Scheduler:
    """A scheduler whose `running` requests have all been prefilled."""
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=4, page_tokens=PAGE_TOKENS)
    pages = running * geometry.pages_for(tokens + PAGE_TOKENS)
    capacity = Capacity.derive(model_context_tokens=tokens, pool_pages=pages, page_tokens=PAGE_TOKENS)
    kv = KVManager(geometry, pool_pages=pages, capacity=capacity, secret=b"null model")
    scheduler = Scheduler(
        kv, ManualClock(), chunk_tokens=running * PROMPT_TOKENS, max_running=running, max_queued=waiting, page_tokens=PAGE_TOKENS
    )
    for index in range(running + waiting):
        prompt = tuple((index * 7919 + at) % 50_000 for at in range(PROMPT_TOKENS))
        sampling = SamplingParams(stop_token_ids=frozenset({50_001}))
        request = Request(
            request_id=RequestId(f"request-{index}"),
            prompt_tokens=prompt,
            max_output_tokens=tokens - PROMPT_TOKENS,
            scope=Scope(bytes(16)),
            sampling=sampling,
        )
        refused = scheduler.submit(request)
        if refused is not None:
            raise refused.error
    scheduler.apply(_computed(scheduler.schedule()))
    if scheduler.running != running:
        raise RuntimeError(f"{scheduler.running} of {running} requests run")
    return scheduler


def _round(scheduler: Scheduler) -> int:
    """CPU nanoseconds of `STEPS_PER_ROUND` steps."""
    spent = 0
    for _ in range(STEPS_PER_ROUND):
        began = time.thread_time_ns()
        batch = scheduler.schedule()
        spent += time.thread_time_ns() - began
        result = _computed(batch)
        began = time.thread_time_ns()
        scheduler.apply(result)
        spent += time.thread_time_ns() - began
    return spent


def _computed(batch: Batch) -> BatchResult:
    rows = []
    for row in batch.rows:
        pages = row.end // PAGE_TOKENS - row.start // PAGE_TOKENS
        rows.append(RowResult(row.request_id, token=row.end % 50_000, page_digests=(bytes(16),) * pages))
    return BatchResult(batch.step, tuple(rows))


def entries_of(context: Context) -> tuple[list[Entry], list[Plot]]:
    """One turn for each pair, everything made anew."""
    sizes = SIZES[:2] if context.quick else SIZES
    ours: dict[int, list[float]] = {running: [] for running in sizes}
    theirs: dict[int, list[float]] = {running: [] for running in sizes}
    waiting: list[float] = []
    with ForeignPython(context.vllm_python, "vllm_scheduler.py", "vLLM's scheduler") as vllm:
        for index in range(context.pairs):
            context.say(f"turn {index + 1} of {context.pairs}")
            operations: dict[str, Callable[[], float]] = {}
            for running in sizes:
                if vllm.version:
                    operations[f"vllm {running}"] = partial(vllm.ask, running)
                operations[f"ours {running}"] = Decoding(running).microseconds
            operations["waiting"] = Decoding(sizes[-1], waiting=WAITING).microseconds
            taken = turn(operations)
            waiting.append(taken["waiting"])
            for running in sizes:
                ours[running].append(taken[f"ours {running}"])
                theirs[running] += [taken[f"vllm {running}"]] if vllm.version else []
        version, absent = vllm.version, vllm.absent
    largest, smallest = sizes[-1], sizes[0]
    entries = []
    for running in sizes:
        mine = Side("schedule + apply", "us per request and step", tuple(ours[running]))
        entries.append(Entry(figure="7", name=f"control plane, {running} running", a=mine, target=Target(high=2.0)))
        if theirs[running]:
            b = Side("schedule + apply", "us", tuple(ours[running]))
            a = Side(f"vLLM {version}", "us", tuple(theirs[running]))
            entries.append(Entry(figure="7", name=f"vLLM / ours, {running} running", a=a, b=b, target=Target(low=10.0)))
        else:
            entries.append(missing("7", f"vLLM / ours, {running} running", absent, Target(low=10.0)))
    few, many = (Side(f"{running} running", "us", tuple(ours[running])) for running in (smallest, largest))
    entries.append(Entry(figure="7", name=f"per request, {largest} / {smallest} running", a=many, b=few, target=Target(high=1.2)))
    crowded = Side(f"{largest} running, {WAITING:,} waiting", "us", tuple(waiting))
    entries.append(Entry(figure="7", name=f"{WAITING:,} waiting / none", a=crowded, b=many, target=Target(high=1.05)))
    lines = [Line("KVSeal", tuple((running, median(ours[running])) for running in sizes))]
    if version:
        lines.append(Line(f"vLLM {version}", tuple((running, median(theirs[running])) for running in sizes)))
    return entries, [Plot("Control plane per running request and step", "requests running", "us of CPU time", tuple(lines))]


def run(context: Context) -> Result:
    entries, plots = entries_of(context)
    remarks = ["CPU time of one thread, null model, page ends and growth inside; prompts of 64 tokens, everybody decodes"]
    return Result(name="scheduler", title="The control plane", entries=entries, plots=plots, remarks=remarks)


def main() -> int:
    return benchmark_main("scheduler", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
