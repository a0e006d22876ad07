"""How full the pool is kept, and at what price: figures 1 and 2 of the performance notes, by an event model. ``kvseal bench admission``.

Owns a model of time alone: the scheduler and the KV manager are the real ones, only the computing is replaced by its cost. A step that
computes N tokens takes max(1, N / `CROSSOVER_TOKENS`) units: below the crossover it is bound by reading the weights, above by arithmetic.
Compared are: reservation of the longest request for each (the classic contiguous cache), reservation of each request's true length by an
oracle, a pool without limit, and the paged pool. Prints output tokens per unit of time, waste (1 - live / allocated slots), preemptions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    lengths = {}
    for index, one in enumerate(load):
        request = _request(index, one, forced)
        lengths[request.request_id] = one
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
        events = scheduler.apply(BatchResult(batch.step, tuple(_computed(row, lengths[row.request_id]) for row in batch.rows)))
        for event in events:
            if isinstance(event, EndedEvent):
                del lengths[event.request_id]
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Event model of admission: paged pool against reservation and against no limit.")
    parser.add_argument("trace", type=Path, help='JSON lines with "turns": [["h", tokens], ["g", tokens], ...]')
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--requests", type=int, default=AT_ONCE)
    parser.add_argument("--skip", type=int, default=0, help="requests to skip at the start of the trace")
    options = parser.parse_args()
    load = first_turns(options.trace, requests=options.requests, skip=options.skip)
    unlimited = paged(load, sum(one.total_tokens + PAGE_TOKENS for one in load))
    print(f"{len(load)} requests at once, {options.slots} slots; step = max(1, tokens / {CROSSOVER_TOKENS})")
    print(f"{'':28}{'tokens/unit':>12}{'/ unlimited':>12}{'waste':>8}{'preempted':>10}{'recomputed':>11}")
    rows = {
        "reserve the longest": reserved(load, options.slots, longest_tokens=LONGEST_TOKENS),
        "reserve by oracle": reserved(load, options.slots, longest_tokens=None),
        "paged, lengths unknown": paged(load, options.slots),
        "paged, lengths forced": paged(load, options.slots, forced=True),
        "unlimited slots": unlimited,
    }
    for name, got in rows.items():
        ratio = got.rate / unlimited.rate
        print(f"{name:28}{got.rate:12.2f}{ratio:12.3f}{got.waste:8.1%}{got.preemptions:10d}{got.recomputed_tokens:11d}")


if __name__ == "__main__":
    main()
