"""The real scheduler and the real KV manager, with results made up instead of computed.

Owns the made-up results: any token, and for each full page a digest that is the same wherever the page's place is the same. What is
measured with it is the control plane alone. Time is a manual clock's: how long a step takes is for the benchmark to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvseal.bench.suite.workloads import Ask
from kvseal.core.batch import Batch, BatchResult, Row, RowResult
from kvseal.core.clock import ManualClock
from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import Request, SamplingParams
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import KVManager
from kvseal.sched.scheduler import Scheduler

PAGE_TOKENS = 16
SHARED = Scope(bytes(16))
STOP_TOKEN = 1


class NullModel:
    """Scheduler, manager and clock for one run."""

    def __init__(self, *, pool_tokens: int, context_tokens: int, chunk_tokens: int = 512, max_running: int = 64, max_queued: int = 100_000):
        geometry = KVGeometry(layers=1, kv_heads=1, head_dim=4, page_tokens=PAGE_TOKENS)
        pages = geometry.pages_for(pool_tokens)
        capacity = Capacity.derive(model_context_tokens=context_tokens, pool_pages=pages, page_tokens=PAGE_TOKENS)
        self.clock = ManualClock()
        self.kv = KVManager(geometry, pool_pages=pages, capacity=capacity, secret=b"a model of nothing")
        self.scheduler = Scheduler(
            self.kv, self.clock, chunk_tokens=chunk_tokens, max_running=max_running, max_queued=max_queued, page_tokens=PAGE_TOKENS
        )

    def submit(self, asks: Sequence[Ask], *, scope: Scope = SHARED, first: int = 0) -> None:
        """All at once, with lengths that the scheduler knows. Raises what it refuses them with."""
        for index, ask in enumerate(asks, first):
            request = Request(
                request_id=RequestId(str(index)),
                prompt_tokens=ask.prompt,
                max_output_tokens=ask.output_tokens,
                scope=scope,
                sampling=SamplingParams(temperature=0.0),
            )
            refused = self.scheduler.submit(request)
            if refused is not None:
                raise refused.error

    def run(self, computed: Callable[[Batch], BatchResult] | None = None) -> None:
        """Steps until nothing is left."""
        compute = computed or made_up
        while self.scheduler.has_work:
            batch = self.scheduler.schedule()
            if batch.rows:
                self.clock.advance(0.001 * batch.total_tokens)
                self.scheduler.apply(compute(batch))
            else:
                self.scheduler.take_events()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, first admissions only."""
        return self.scheduler.counters.cached_tokens


def made_up(batch: Batch) -> BatchResult:
    return BatchResult(batch.step, tuple(made_up_row(row) for row in batch.rows))


def made_up_row(row: Row, token: int | None = None) -> RowResult:
    first, last = row.start // PAGE_TOKENS, row.end // PAGE_TOKENS
    digests = tuple(page.to_bytes(16, "little") for page in range(first, last))
    if not row.samples:
        return RowResult(row.request_id, page_digests=digests)
    return RowResult(row.request_id, token=2 + row.end % 40_000 if token is None else token, page_digests=digests)
