"""How full the pool is kept, and at what price: figures 1 and 2 of the performance notes, by an event model. ``kvseal bench admission``.

Owns a model of time alone: the scheduler and the KV manager are the real ones, only the computing is replaced by its cost. A step that
computes N tokens takes max(1, N / `CROSSOVER_TOKENS`) units: below the crossover it is bound by reading the weights, above by arithmetic.
Compared are: reservation of the longest request for each (the classic contiguous cache), reservation of each request's true length by an
oracle, a pool without limit, and the paged pool: output tokens per unit of time, waste (1 - live / allocated slots), preemptions. Each pair
is another window of 300 requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvseal.bench.suite.board import Entry, Result, Side, Target
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.workloads import lengths
from kvseal.core.batch import BatchResult, Row, RowResult
from kvseal.core.clock import ManualClock
from kvseal.core.events import EndedEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import Request, SamplingParams
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import KVManager
from kvseal.sched.scheduler import Scheduler

CROSSOVER_TOKENS = 8
LONGEST_TOKENS = 2_048
SLOTS = 6_144
AT_ONCE = 300
PAGE_TOKENS = 16
CHUNK_TOKENS = 512
STOP_TOKEN = 1


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run: totals over all requests."""

    output_tokens: int
    units: float
    waste: float
    preemptions: int
    recomputed_tokens: int

    @property
    def rate(self) -> float:
        """Output tokens per unit of time."""
        return self.output_tokens / self.units


def first_turns(path: Path, *, requests: int = AT_ONCE, skip: int = 0) -> list[Lengths]:
    """Lengths of the first turn of conversations whose prompt and answer fit `LONGEST_TOKENS` (JSON lines with "turns")."""
    found: list[Lengths] = []
    with path.open() as lines:
        for line in lines:
            turns = json.loads(line)["turns"]
            prompt, output = turns[0][1], turns[1][1]
            if turns[0][0] == "h" and turns[1][0] == "g" and prompt and output and prompt + output <= LONGEST_TOKENS:
                found.append(Lengths(prompt, output))
            if len(found) == skip + requests:
                break
    return found[skip:]


def paged(load: Sequence[Lengths], slots: int, *, max_running: int = AT_ONCE, forced: bool = False) -> Outcome:
    """The real scheduler. `forced`: lengths are the requests' own limits; else they end by a stop token that nobody foresees."""
    kv = _manager(slots)
    clock = ManualClock()
    scheduler = Scheduler(kv, clock, chunk_tokens=CHUNK_TOKENS, max_running=max_running, max_queued=len(load), page_tokens=PAGE_TOKENS)
    asked = {}
    for index, one in enumerate(load):
        request = _request(index, one, forced)
        asked[request.request_id] = one
        refused = scheduler.submit(request)
        if refused is not None:
            raise refused.error
    units = live = allocated = 0.0
    while scheduler.has_work:
        batch = scheduler.schedule()
        took = max(1.0, batch.total_tokens / CROSSOVER_TOKENS)
        units += took
        clock.advance(took)
        live += took * sum(row.end for row in batch.rows)
        usage = kv.usage()
        allocated += took * (usage.leased + usage.sealed - usage.evictable) * PAGE_TOKENS
        events = scheduler.apply(BatchResult(batch.step, tuple(_computed(row, asked[row.request_id]) for row in batch.rows)))
        for event in events:
            if isinstance(event, EndedEvent):
                del asked[event.request_id]
    counters = scheduler.counters
    return Outcome(sum(one.output_tokens for one in load), units, 1 - live / allocated, counters.preemptions, counters.recomputed_tokens)


def reserved(load: Sequence[Lengths], slots: int, *, longest_tokens: int | None) -> Outcome:
    """Contiguous reservation at admission: `longest_tokens` for each request, or (None) its true length, known by an oracle."""
    waiting = list(reversed(load))
    running: list[list[int]] = []  # computed, prompt, total, reserved
    units = live = allocated = 0.0
    while waiting or running:
        while waiting:
            need = longest_tokens or waiting[-1].total_tokens
            if sum(one[3] for one in running) + need > slots:
                break
            one = waiting.pop()
            running.append([0, one.prompt_tokens, one.total_tokens, need])
        left, tokens = CHUNK_TOKENS, 0
        for state in sorted(running, key=lambda state: state[0] < state[1]):
            take = 1 if state[0] >= state[1] else min(left, state[1] - state[0])
            state[0] += take
            left -= take
            tokens += take
        took = max(1.0, tokens / CROSSOVER_TOKENS)
        units += took
        live += took * sum(state[0] for state in running)
        allocated += took * sum(state[3] for state in running)
        running = [state for state in running if state[0] < state[2] - 1]  # the last token is sampled and never computed
    return Outcome(sum(one.output_tokens for one in load), units, 1 - live / allocated, 0, 0)


def _manager(slots: int) -> KVManager:
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=4, page_tokens=PAGE_TOKENS)
    pages = geometry.pages_for(slots)
    capacity = Capacity.derive(model_context_tokens=LONGEST_TOKENS, pool_pages=pages, page_tokens=PAGE_TOKENS)
    return KVManager(geometry, pool_pages=pages, capacity=capacity, secret=b"event model")


def _request(index: int, one: Lengths, forced: bool) -> Request:
    return Request(
        request_id=RequestId(str(index)),
        prompt_tokens=tuple(2 + (index * 7919 + at * 31) % 49_000 for at in range(one.prompt_tokens)),
        max_output_tokens=one.output_tokens if forced else LONGEST_TOKENS - one.prompt_tokens,
        scope=Scope(bytes(16)),
        sampling=SamplingParams(stop_token_ids=frozenset() if forced else frozenset({STOP_TOKEN})),
    )


def _computed(row: Row, one: Lengths) -> RowResult:
    pages = row.end // PAGE_TOKENS - row.start // PAGE_TOKENS
    digests = tuple(row.end.to_bytes(16, "little") for _ in range(pages))
    if not row.samples:
        return RowResult(row.request_id, page_digests=digests)
    last = row.end + 1 == one.total_tokens
    return RowResult(row.request_id, token=STOP_TOKEN if last else 2 + row.end % 49_000, page_digests=digests)


def entries_of(windows: Sequence[Sequence[Lengths]], slots: int) -> list[Entry]:
    """Each window of requests is a pair."""
    unlimited = [paged(load, len(load) * LONGEST_TOKENS) for load in windows]
    hidden = [paged(load, slots) for load in windows]
    forced = [paged(load, slots, forced=True) for load in windows]
    longest = [reserved(load, slots, longest_tokens=LONGEST_TOKENS) for load in windows]
    oracle = [reserved(load, slots, longest_tokens=None) for load in windows]

    def against(figure: str, name: str, some: Sequence[Outcome], other: str, others: Sequence[Outcome], target: Target, note: str) -> Entry:
        a = Side(f"paged, {slots} slots", "tokens/unit", tuple(one.rate for one in some))
        b = Side(other, "tokens/unit", tuple(one.rate for one in others))
        return Entry(figure=figure, name=f"{name}, event model", a=a, b=b, target=target, note=note)

    size = f"{len(windows[0])} at once"
    ceiling = median(one.rate / other.rate for one, other in zip(unlimited, longest, strict=True))
    unknown, known = f"{size}, output lengths unknown", f"{size}, output lengths known"
    bound = f"; slots without limit would give {ceiling:.2f}"
    lost = f"{sum(one.preemptions for one in hidden)} preempted, {sum(one.recomputed_tokens for one in hidden)} tokens computed again"
    waste = Side("1 - live / allocated slots", "%", tuple(100 * one.waste for one in hidden))
    return [
        against("1", "paged / longest reserved", hidden, f"{LONGEST_TOKENS} slots each", longest, Target(low=2.4), unknown + bound),
        against("1", "paged / oracle", hidden, "true length each", oracle, Target(low=1.0), unknown),
        against("1", "paged / longest reserved (known)", forced, f"{LONGEST_TOKENS} slots each", longest, Target(low=2.4), known + bound),
        against("1", "paged / oracle (known)", forced, "true length each", oracle, Target(low=1.0), known),
        Entry(figure="1", name="KV waste, event model", a=waste, target=Target(high=3.5), note=unknown),
        against("2", "no thrash: limited / unlimited slots", hidden, "slots for all", unlimited, Target(low=0.95), f"{unknown}; {lost}"),
        against("2", "no thrash (known)", forced, "slots for all", unlimited, Target(low=0.95), known),
    ]


def run(context: Context) -> Result:
    windows = []
    real = True
    for window in range(context.pairs):
        found, real = lengths(context.traces, longest_tokens=LONGEST_TOKENS, requests=AT_ONCE, skip=window * AT_ONCE)
        windows.append([Lengths(prompt, output) for prompt, output in found])
    remarks = [f"a step of N tokens takes max(1, N / {CROSSOVER_TOKENS}) units; chunks of {CHUNK_TOKENS}, all may run at once"]
    if not real:
        remarks.append("lengths are synthetic: ShareGPT's were not found (--traces)")
    return Result(
        name="admission", title="How full the pool is kept, by an event model", entries=entries_of(windows, SLOTS), remarks=remarks
    )


def main() -> int:
    return benchmark_main("admission", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
