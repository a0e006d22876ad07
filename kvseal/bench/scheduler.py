"""What the control plane costs: CPU time of schedule + apply per running request and step, with no model. ``kvseal bench scheduler``.

Owns the null-model measurement of figure 7: real scheduler, real KV manager, results made up outside the measured time. All requests
decode; page ends, growth and sealing are inside. Also with 10,000 requests waiting, which must cost next to nothing. With
``--vllm-python`` vLLM's own scheduler does the same in its own Python, taking turns. CPU time of one thread, so a busy neighbour counts
little.
"""

from __future__ import annotations

import gc
import time
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


def microseconds_per_request(running: int, *, waiting: int = 0, rounds: int = ROUNDS) -> float:
    """Median over rounds of CPU microseconds per running request and step."""
    scheduler = _decoding(running, waiting, tokens=PROMPT_TOKENS + (rounds + 2) * STEPS_PER_ROUND)
    _round(scheduler, running)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return median(_round(scheduler, running) for _ in range(rounds)) / running / STEPS_PER_ROUND / 1000
    finally:
        gc.enable()
        gc.unfreeze()


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


def _round(scheduler: Scheduler, running: int) -> int:
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
    """Rounds of all sizes and of vLLM take turns, so that a busy neighbour slows all alike."""
    sizes = SIZES[:2] if context.quick else SIZES
    rounds = context.pairs
    ours: dict[int, list[float]] = {running: [] for running in sizes}
    theirs: dict[int, list[float]] = {running: [] for running in sizes}
    waiting: list[float] = []
    with ForeignPython(context.vllm_python, "vllm_scheduler.py", "vLLM's scheduler") as vllm:
        for turn in range(rounds):
            context.say(f"round {turn + 1} of {rounds}")
            for running in sizes:
                ours[running].append(microseconds_per_request(running, rounds=3))
                if vllm.version:
                    theirs[running].append(vllm.ask(running))
            waiting.append(microseconds_per_request(sizes[-1], waiting=WAITING, rounds=3))
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
