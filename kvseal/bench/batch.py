"""How full the pool is kept on the real engine, and what it brings: figures 1 and 2 of the performance notes. ``kvseal bench batch``.

Owns the comparison of one engine with itself under four ways to give out the same 6,144 slots: pages as they are needed (ours, output
lengths unknown to the engine), the longest request's slots reserved for each, each request's true length reserved by an oracle, and no
limit at all. Reservations are kept by this benchmark, which holds requests back as such a server would. Outputs must be equal, token for
token. Lengths are those of ShareGPT's first turns; prompts are random tokens, so nothing is shared. A slice divides lengths and slots by
the same number, which keeps the batches as large as they were; ``kvseal bench admission`` has full size, by an event model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvseal.bench.suite.board import Entry, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.rig import MayStart, Ran, Rig, RunFailed, check_equal
from kvseal.bench.suite.workloads import Ask, lengths
from kvseal.core.batch import Batch

SLOTS = 6_144
LONGEST_TOKENS = 2_048
AT_ONCE = 300
SLICE_REQUESTS, QUICK_REQUESTS = 60, 16
SLICE_DIVISOR, QUICK_DIVISOR = 4, 8
WARM_REQUESTS = 4
TARGETS = {"longest": Target(low=2.4), "oracle": Target(low=1.0), "unlimited": Target(low=0.95)}


@dataclass(frozen=True, slots=True)
class Size:
    requests: int
    divisor: int

    @property
    def slots(self) -> int:
        return SLOTS // self.divisor

    @property
    def longest_tokens(self) -> int:
        return LONGEST_TOKENS // self.divisor


def size_of(context: Context) -> Size:
    if context.full_size:
        return Size(AT_ONCE, 1)
    return Size(QUICK_REQUESTS, QUICK_DIVISOR) if context.quick else Size(SLICE_REQUESTS, SLICE_DIVISOR)


def requests_of(context: Context, size: Size, part: int) -> tuple[list[Ask], bool]:
    """The requests of one pair: the next ones of the trace each time; and whether their lengths are real."""
    found, real = lengths(context.traces, longest_tokens=LONGEST_TOKENS, requests=size.requests, skip=part * size.requests)
    vocab_tokens, chance = 40_000, random.Random(part)
    asks = []
    for prompt, output in found:
        prompt, output = max(1, prompt // size.divisor), max(1, output // size.divisor)
        asks.append(Ask(tuple(chance.randrange(100, vocab_tokens) for _ in range(prompt)), output))
    return asks, real


def reserving(slots: int, reserved: Callable[[Ask], int]) -> MayStart:
    """Holds a request back while what is reserved for it does not fit beside the others'."""

    def may_start(ask: Ask, running: Sequence[Ask], _: int) -> bool:
        return sum(map(reserved, running)) + reserved(ask) <= slots

    return may_start


def total_tokens(ask: Ask) -> int:
    return len(ask.prompt) + ask.output_tokens


@dataclass(slots=True)
class Waste:
    """1 - live / allocated slots over time, as the steps go by."""

    rig: Rig
    live: float = 0.0
    allocated: float = 0.0
    values: list[float] = field(default_factory=list)

    def step(self, batch: Batch, seconds: float) -> None:
        usage = self.rig.engine.kv.usage()
        self.live += seconds * sum(row.end for row in batch.rows)
        self.allocated += seconds * (usage.leased + usage.sealed - usage.evictable) * self.rig.engine.report.page_tokens

    def end_of_run(self) -> None:
        self.values.append(100 * (1 - self.live / self.allocated))
        self.live = self.allocated = 0.0


@dataclass(slots=True)
class Runs:
    """One run of each way for each pair."""

    paged: list[Ran] = field(default_factory=list)
    longest: list[Ran] = field(default_factory=list)
    oracle: list[Ran] = field(default_factory=list)
    unlimited: list[Ran] = field(default_factory=list)


def measure(context: Context, rig: Rig, unlimited: Rig, size: Size) -> tuple[Runs, Waste, bool]:
    runs, waste, real = Runs(), Waste(rig), True
    warm, _ = requests_of(context, Size(WARM_REQUESTS, size.divisor), 0)
    rig.run(warm)
    unlimited.run(warm)
    for pair in range(context.pairs):
        asks, real = requests_of(context, size, pair)
        context.say(f"pair {pair + 1} of {context.pairs}: {size.requests} requests, {sum(map(total_tokens, asks))} tokens, four ways")
        rig.watcher.on_step = waste.step
        runs.paged.append(rig.run(asks, hidden=True))
        rig.watcher.on_step = None
        waste.end_of_run()
        runs.longest.append(rig.run(asks, hidden=True, may_start=reserving(size.slots, lambda _: size.longest_tokens)))
        runs.oracle.append(rig.run(asks, hidden=True, may_start=reserving(size.slots, total_tokens)))
        runs.unlimited.append(unlimited.run(asks, hidden=True))
        check_equal("batch", runs.paged[-1], runs.longest[-1], runs.oracle[-1], runs.unlimited[-1])
    return runs, waste, real


def entries_of(runs: Runs, waste: Waste, size: Size) -> list[Entry]:
    def rates(some: Sequence[Ran]) -> tuple[float, ...]:
        return tuple(ran.output_rate for ran in some)

    checked = f"outputs of {size.requests * len(runs.paged)} requests equal in all four, token for token"
    scaled = f"lengths and slots / {size.divisor}, {size.requests} at once" if size.divisor > 1 else f"{size.requests} at once"
    preempted = sum(ran.preemptions for ran in runs.paged)
    recomputed = sum(ran.recomputed_tokens for ran in runs.paged)
    paged = Side(f"paged, {size.slots} slots", "tok/s out", rates(runs.paged))

    def against(figure: str, what: str, name: str, some: Sequence[Ran], target: Target, note: str) -> Entry:
        other = Side(name, "tok/s out", rates(some))
        return Entry(figure=figure, name=f"{what}, real engine", a=paged, b=other, target=target, checked=checked, note=note)

    lost = f"{scaled}; {preempted} preempted, {recomputed} tokens computed again"
    return [
        against("1", "paged / longest reserved", f"{size.longest_tokens} slots each", runs.longest, TARGETS["longest"], scaled),
        against("1", "paged / oracle", "true length each", runs.oracle, TARGETS["oracle"], scaled),
        Entry(
            figure="1",
            name="KV waste, real engine",
            a=Side("1 - live / allocated slots", "%", tuple(waste.values)),
            target=Target(high=3.5) if size.divisor == 1 else None,
            note=f"{scaled}: half a page is more of a shorter request" if size.divisor > 1 else scaled,
        ),
        against("2", "no thrash: limited / unlimited slots", "slots for all", runs.unlimited, TARGETS["unlimited"], lost),
    ]


def run(context: Context) -> Result:
    size = size_of(context)
    settings: dict[str, str] = {}
    try:
        slots = size.requests * (size.longest_tokens + 64)
        with (
            Rig(context, pool_tokens=size.slots, context_tokens=size.longest_tokens, max_running=AT_ONCE) as rig,
            Rig(context, pool_tokens=slots, context_tokens=size.longest_tokens, max_running=AT_ONCE) as unlimited,
        ):
            settings = rig.settings
            runs, waste, real = measure(context, rig, unlimited, size)
        entries = entries_of(runs, waste, size)
        remarks = [] if real else ["lengths are synthetic: ShareGPT's were not found (--traces)"]
    except RunFailed as failed:
        entries, remarks = (
            [missing("1", "paged / reserved, real engine", str(failed)), missing("2", "no thrash, real engine", str(failed))],
            [],
        )
    return Result(name="batch", title="How full the pool is kept", entries=entries, settings=settings, remarks=remarks)


def main() -> int:
    return benchmark_main("batch", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
