"""What the control plane costs: CPU time of schedule + apply per running request and step, with no model. ``kvseal bench scheduler``.

Owns the null-model measurement of figure 7: real scheduler, real KV manager, results made up outside the measured time. All requests
decode; page ends, growth and sealing are inside. Also with 10,000 requests waiting, which must cost next to nothing. CPU time of this
thread, median of rounds, so a busy neighbour does not count.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

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


def microseconds_per_request(running: int, *, waiting: int = 0, rounds: int = ROUNDS) -> float:
    """Median over rounds of CPU microseconds per running request and step."""
    scheduler = _decoding(running, waiting, tokens=PROMPT_TOKENS + (rounds + 2) * STEPS_PER_ROUND)
    _round(scheduler, running)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return statistics.median(_round(scheduler, running) for _ in range(rounds)) / running / STEPS_PER_ROUND / 1000
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


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of schedule + apply per running request and step, with no model.")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--waiting", type=int, default=10_000, help="waiting requests of the last line (default: %(default)s)")
    options = parser.parse_args()
    print(f"{'running':>8}{'waiting':>9}{'us per request and step':>26}")
    for running in options.running:
        print(f"{running:8d}{0:9d}{microseconds_per_request(running):26.2f}", flush=True)
    running = options.running[-1]
    print(f"{running:8d}{options.waiting:9d}{microseconds_per_request(running, waiting=options.waiting):26.2f}")


if __name__ == "__main__":
    main()
