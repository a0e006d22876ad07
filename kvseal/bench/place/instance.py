"""One simulated engine: the real scheduler, the real KV manager and no model; a step takes what the latency model says.

Owns the shape of a step, the clock of a simulation and the three roles of a worker. Never decides what runs (the scheduler does), never
routes and never judges a result. Where a worker has pipeline stages, each batch under way belongs to a scheduler of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

from kvseal.bench.place.latency import Step, WorkerKind
from kvseal.core.batch import Batch, BatchResult, Row, RowResult
from kvseal.core.events import Event
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Refused
from kvseal.core.request import Request
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import KVManager
from kvseal.sched.scheduler import Scheduler

SCOPE = Scope(bytes(16))
DIGEST = bytes(16)
"""Of every page: equal tokens have equal digests, and nothing is computed from them here."""
TOKEN = 1
WHOLE_TOKENS = 2**31
"""A chunk that no prompt fills: prompts are computed whole."""
MAX_QUEUED = 2**31


class Role(Enum):
    BOTH = "colocated"
    PREFILL = "prefill"
    """Computes prompts and the first token."""
    DECODE = "decode"
    """Receives prompts computed elsewhere, with the first token of the answer."""


class EventClock:
    """The time of the event that is being handled."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


class Lane:
    """One scheduler and its pages; at most one step under way."""

    __slots__ = ("batch", "number", "scheduler")

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        self.scheduler = scheduler
        self.number = number
        self.batch: Batch | None = None


class Instance:
    """A decode worker's prompts come whole, whatever the chunks of others."""

    def __init__(self, kind: WorkerKind, role: Role, clock: EventClock, *, chunk_tokens: int, name: str = "") -> None:
        self.kind = kind
        self.role = role
        self.name = name
        self.outstanding_tokens = 0
        """What the router balances; counted by `simulate`."""
        self.lanes = [Lane(_scheduler(kind, role, clock, chunk_tokens), number) for number in range(kind.stages)]
        self._stage_free_s = [0.0] * kind.stages
        self._arrived: set[RequestId] = set()
        self._results: dict[RequestId, RowResult] = {}
        """Of plain decode rows; frozen, so one for each request does."""

    def comes_computed(self, request_id: RequestId) -> None:
        """Its pages have been computed elsewhere, and were handed over."""
        self._arrived.add(request_id)

    def submit(self, request: Request) -> Refused | None:
        """To the lane with the fewest requests."""
        lane = self.lanes[0] if len(self.lanes) == 1 else min(self.lanes, key=_open_requests)
        return lane.scheduler.submit(request)

    def start(self, lane: Lane, now_s: float) -> float | None:
        """Begins a step of an idle lane; returns when it ends, None if there is nothing to do."""
        if lane.batch is not None or not lane.scheduler.has_work:
            return None
        if len(self._stage_free_s) > 1 and self._stage_free_s[0] > now_s:
            return None  # the first stage is taken; `simulate` asks again when it is free
        batch = lane.scheduler.schedule()
        if not batch.rows:
            return None
        lane.batch = batch
        seconds = self.kind.cost.step_s(self._shape(batch))
        if len(self._stage_free_s) == 1:
            return now_s + seconds
        each_s, ends_s = seconds / len(self._stage_free_s), now_s
        for stage, free_s in enumerate(self._stage_free_s):
            ends_s = max(ends_s, free_s) + each_s
            self._stage_free_s[stage] = ends_s
        return ends_s

    @property
    def first_stage_free_s(self) -> float:
        return self._stage_free_s[0]

    def finish(self, lane: Lane) -> list[Event]:
        """The step of this lane is over: what came of it."""
        batch = lane.batch
        if batch is None:
            return []
        lane.batch = None
        size, made = self.kind.page_tokens, self._results
        results = []
        for row in batch.rows:
            if len(row.tokens) == 1 and (row.start + 1) % size:  # nearly every row there is, and always the same answer
                result = made.get(row.request_id)
                if result is None:
                    result = made[row.request_id] = RowResult(row.request_id, token=TOKEN)
                results.append(result)
            else:
                results.append(_result(row, size))
        return lane.scheduler.apply(BatchResult(batch.step, tuple(results)))

    def _shape(self, batch: Batch) -> Step:
        step = step_of(batch)
        if self.role is not Role.DECODE:
            return step
        for row in batch.rows:  # pages come with a prompt, and the token after it: that one is computed here
            if len(row.tokens) > 1 and row.request_id in self._arrived:
                self._arrived.discard(row.request_id)  # after a preemption it is computed like any other
                length, end = len(row.tokens), row.start + len(row.tokens)
                step = step._replace(
                    prefill_rows=step.prefill_rows - 1,
                    prefill_tokens=step.prefill_tokens - length,
                    pairs=step.pairs - _pairs(row.start, length),
                    decode_rows=step.decode_rows + 1,
                    decode_context=step.decode_context + end,
                )
        return step


def step_of(batch: Batch) -> Step:
    """The shape of a step, as the latency model sees it: a row of one token behind others decodes, every other one prefills."""
    rows = tokens = sampled = context = decoding = 0
    pairs = 0.0
    for row in batch.rows:
        length, start = len(row.tokens), row.start
        if length == 1 and start:
            decoding += 1
            context += start + 1
        else:
            rows += 1
            tokens += length
            pairs += _pairs(start, length)
        sampled += row.samples
    return Step(rows, tokens, pairs, decoding, context, sampled)


def _pairs(start: int, length: int) -> float:
    """Positions that tokens at `start`, `start` + 1, ... attend to, added up."""
    return (start + 0.5 * (length + 1)) * length


def _open_requests(lane: Lane) -> int:
    return lane.scheduler.running + lane.scheduler.waiting


def _scheduler(kind: WorkerKind, role: Role, clock: EventClock, chunk_tokens: int) -> Scheduler:
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=4, page_tokens=kind.page_tokens)
    pages = max(1, kind.pool_tokens // kind.page_tokens // kind.stages)
    capacity = Capacity.derive(model_context_tokens=kind.context_tokens, pool_pages=pages, page_tokens=kind.page_tokens)
    return Scheduler(
        KVManager(geometry, pool_pages=pages, capacity=capacity, secret=b"placement"),
        clock,
        chunk_tokens=WHOLE_TOKENS if role is Role.DECODE else chunk_tokens,
        max_running=kind.max_running,
        max_queued=MAX_QUEUED,
        page_tokens=kind.page_tokens,
        step_s=None if role is Role.DECODE else kind.step_s,
    )


def _result(row: Row, page_tokens: int) -> RowResult:
    end = row.start + len(row.tokens)
    pages = end // page_tokens - row.start // page_tokens
    return RowResult(row.request_id, token=TOKEN if row.samples else None, page_digests=(DIGEST,) * pages if pages else ())


class Prompts:
    """Token ids for the prompts of a load, such that prompts share a prefix where the trace says so and nowhere else."""

    def __init__(self, longest_tokens: int) -> None:
        self._filler = array("I", range(2, longest_tokens + 3)).tolist()
        self._numbers: dict[int, int] = {}

    def of(self, index: int, prompt_tokens: int, blocks: Sequence[int], block_tokens: int) -> tuple[int, ...]:
        if not blocks:
            return (2**31 + index, *self._filler[: prompt_tokens - 1])
        tokens: list[int] = []
        for block in blocks:
            tokens.append(2**31 + self._numbers.setdefault(block, len(self._numbers)))
            tokens += self._filler[: block_tokens - 1]
        return tuple(tokens[:prompt_tokens])
