"""How the cost of the cache's operations grows: the growth table and figure 8 of the performance notes. ``kvseal bench growth``.

Owns measurements of `kv` alone: no model, no arena. Times are CPU time of this process. A ratio is the median of pairwise ratios of two
sizes that take turns after a warm-up, printed with its smallest and largest and with both sizes' medians; a slope is that ratio's logarithm
over the logarithm of the ratio of prompt lengths. Prints the allowed figure beside each and says which are missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from kvseal.core.ids import RequestId, Scope
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.prefix_key import PackedTokens

PAGE_TOKENS = 16
GEOMETRY = KVGeometry(layers=30, kv_heads=3, head_dim=64, page_tokens=PAGE_TOKENS)
SCOPE = Scope(b"growth benchmark")
DIGEST = bytes(16)
PROMPTS = (512, 1024, 2048, 4096, 8192)
RUN_PAGES = 16
"""Pages of each of the runs that fill a tree: a conversation of 256 tokens."""

Operation = Callable[[], float]
"""Does the thing once or many times and returns microseconds for one, in CPU time; setting up and tidying up not counted."""


@dataclass(frozen=True, slots=True)
class Ratio:
    small_us: float
    large_us: float
    middle: float
    low: float
    high: float


def compared(small: Operation, large: Operation, pairs: int) -> Ratio:
    """Large over small: they take turns, after one turn each that does not count."""
    small(), large()
    taken = [(small(), large()) for _ in range(pairs)]
    ratios = [b / a for a, b in taken]
    return Ratio(median(a for a, _ in taken), median(b for _, b in taken), median(ratios), min(ratios), max(ratios))


def median_us(operation: Operation, rounds: int) -> float:
    operation()
    return median(operation() for _ in range(rounds))


def timed(act: Callable[[], object], times: int) -> float:
    begin = time.process_time_ns()
    for _ in range(times):
        act()
    return (time.process_time_ns() - begin) / times / 1000


class Cache:
    """A manager and what the measurements do with it."""

    def __init__(self, pool_pages: int) -> None:
        context = pool_pages * PAGE_TOKENS
        capacity = Capacity.derive(model_context_tokens=context, pool_pages=pool_pages, page_tokens=PAGE_TOKENS)
        self.kv = KVManager(GEOMETRY, pool_pages=pool_pages, capacity=capacity, secret=b"growth benchmark")
        self._asked = 0

    def admit(self, tokens: PackedTokens, first_tokens: int, *, reuse: bool = True) -> Grant:
        self._asked += 1
        grant = self.kv.admit(RequestId(str(self._asked)), SCOPE, tokens, first_tokens=first_tokens, reuse=reuse)
        if grant is None:
            raise RuntimeError("the pool of this measurement is too small")
        return grant

    def compute(self, grant: Grant, tokens: PackedTokens) -> None:
        """Commits everything after the hit."""
        start = grant.table.valid_tokens
        pages = len(tokens) // PAGE_TOKENS - start // PAGE_TOKENS
        self.kv.commit(grant, tokens.first(len(tokens))[start:], len(tokens), [DIGEST] * pages)

    def fill(self, pages: int) -> None:
        """Caches so many pages in runs that all start differently."""
        for index in range(pages // RUN_PAGES):
            tokens = self.prompt(RUN_PAGES * PAGE_TOKENS, seed=1_000_000 + index)
            grant = self.admit(tokens, len(tokens))
            self.compute(grant, tokens)
            self.kv.drop(grant)

    def prompt(self, count: int, *, seed: int) -> PackedTokens:
        """The first word tells the seeds apart, so every prompt of a seed is a prefix of its longer ones."""
        return self.kv.pack([seed, *((index * 7919 + seed) % 49_152 for index in range(1, count))])

    # --- operations -----------------------------------------------------------------------------------------

    def one_page(self) -> float:
        """Lease one page and give it back."""

        def act() -> None:
            lease = self.kv.pool.reserve(1, SCOPE)
            if lease is not None:
                lease.release()

        return timed(act, 2000)

    def admit_miss(self, tokens: int) -> float:
        prompt = self.prompt(tokens, seed=1)
        return timed(lambda: self.kv.drop(self.admit(prompt, tokens, reuse=True)), max(4, 40_000 // tokens))

    def admit_hit(self, tokens: int) -> float:
        """All but the last page cached: match, pin, lease one page, and give everything back."""
        prompt = self._cached(tokens)
        return timed(lambda: self.kv.drop(self.admit(prompt, 1)), max(4, 100_000 // tokens))

    def match(self, tokens: int) -> float:
        prompt = self._cached(tokens)
        return timed(lambda: self.kv.probe(SCOPE, prompt), max(20, 1_000_000 // tokens))

    def match_from_list(self, tokens: int) -> float:
        """Packing included: what the first look at a prompt costs."""
        listed = tuple(self._cached(tokens).first(tokens + 1))
        return timed(lambda: self.kv.probe(SCOPE, listed), max(4, 200_000 // tokens))

    def insert(self, tokens: int) -> float:
        """Seal and publish every page of a prompt that is not cached."""
        rounds, spent = max(3, 20_000 // tokens), 0.0
        prompt = self.prompt(tokens, seed=2)
        for _ in range(rounds):
            grant = self.admit(prompt, tokens)
            spent += timed(partial(self.compute, grant, prompt), 1)
            self.kv.drop(grant)
            self.kv.cache.forget(grant.table.stamps[0])
        return spent / rounds

    def evict_one(self) -> float:
        return timed(lambda: self.kv.cache.evict(1), 500)

    def decode(self, context: int) -> float:
        """grow and commit of one token after another at this context, page seams included; one grant per call."""
        prompt = self.prompt(context, seed=context)
        grant = self.admit(prompt, context, reuse=False)
        self.compute(grant, prompt)
        steps = 50 * PAGE_TOKENS
        begin = time.process_time_ns()
        for end in range(context + 1, context + steps + 1):
            if end > grant.room_tokens:
                self.kv.grow(grant, end)
            self.kv.commit(grant, (7,), end, () if end % PAGE_TOKENS else (DIGEST,))
        spent = (time.process_time_ns() - begin) / steps / 1000
        first = grant.table.stamps[0]
        self.kv.drop(grant)
        self.kv.cache.forget(first)
        return spent

    def _cached(self, tokens: int) -> PackedTokens:
        """A prompt of one token more than `tokens`, all of whose whole pages are in the cache."""
        prompt = self.prompt(tokens + 1, seed=3)
        if self.kv.probe(SCOPE, prompt) < tokens:
            grant = self.admit(prompt, tokens + 1)
            self.compute(grant, prompt)
            self.kv.drop(grant)
        return prompt


class Report:
    """Prints lines as they come and remembers what was missed."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def ratio(self, name: str, got: Ratio, allowed: float) -> None:
        sizes = f"{got.small_us:10.2f} us{got.large_us:10.2f} us"
        self._line(name, f"{sizes}   x{got.middle:.2f} ({got.low:.2f} to {got.high:.2f})", f"x{allowed}", got.middle <= allowed)

    def slope(self, name: str, got: Ratio, growth: float, high: float) -> None:
        """`growth`: how many times larger the large size is. Below 1 is a fixed cost that the small size feels; above, a scan."""
        low_slope, slope, high_slope = (math.log(ratio) / math.log(growth) for ratio in (got.low, got.middle, got.high))
        sizes = f"{got.small_us:10.2f} us{got.large_us:10.2f} us"
        self._line(name, f"{sizes}   slope {slope:.2f} ({low_slope:.2f} to {high_slope:.2f})", f"0.9 to {high}", slope <= high)

    def value(self, name: str, value: float, unit: str, allowed: float | None = None) -> None:
        self._line(name, f"{value:10.2f} {unit}", "" if allowed is None else f"{allowed} {unit}", allowed is None or value <= allowed)

    def _line(self, name: str, got: str, allowed: str, held: bool) -> None:
        print(f"{name:52}{got:56}{allowed:>14}{'' if held else '   MISSED'}", flush=True)
        if not held:
            self.missed.append(name)


def memory_share(pages: int) -> float:
    """Percent of the K and V of a page that ledger, free list and tree take for it, in a cache full of runs."""
    tracemalloc.start()
    cache = Cache(pages)
    cache.fill(pages)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return 100 * used / pages / (GEOMETRY.token_bytes * PAGE_TOKENS)


def measure(report: Report, *, large_pages: int, pairs: int) -> None:
    small, large = Cache(2_048), Cache(large_pages + 2_048)
    sizes = f"{1024} and {large_pages} pages"
    report.ratio(f"lease and free one page, pools of {sizes}", compared(small.one_page, large.one_page, pairs), 1.3)
    small.fill(1_024)
    large.fill(large_pages)
    miss = compared(partial(small.admit_miss, 512), partial(large.admit_miss, 512), pairs)
    report.ratio(f"admit 512 tokens, none cached, trees of {sizes}", miss, 1.5)
    hit = compared(partial(small.admit_hit, 512), partial(large.admit_hit, 512), pairs)
    report.ratio(f"admit 512 tokens, all cached, trees of {sizes}", hit, 1.5)
    insert = compared(partial(small.insert, 512), partial(large.insert, 512), pairs)
    report.ratio(f"insert 512 tokens, trees of {sizes}", insert, 1.5)
    report.value(f"evict one page of {large_pages}", median_us(large.evict_one, pairs), "us", 20.0)
    decode = compared(partial(large.decode, 512), partial(large.decode, 8192), pairs)
    report.ratio("decode one token, contexts of 512 and 8192", decode, 1.5)

    cache = Cache(4_096)
    short, long = PROMPTS[0], PROMPTS[-1]
    admit = compared(partial(cache.admit_miss, short), partial(cache.admit_miss, long), pairs)
    report.slope(f"admit n tokens, none cached, n {short} to {long}", admit, long / short, 1.1)
    insert = compared(partial(cache.insert, short), partial(cache.insert, long), pairs)
    report.slope(f"insert n tokens, n {short} to {long}", insert, long / short, 1.1)
    for tokens in PROMPTS:
        once = median_us(partial(cache.match, tokens), pairs)
        report.value(f"match {tokens} tokens, packed", once * 1000 / tokens, "ns/token", 12.0)
    for tokens in PROMPTS:
        once = median_us(partial(cache.match_from_list, tokens), pairs)
        report.value(f"match {tokens} tokens, packing them first", once * 1000 / tokens, "ns/token")
    for tokens in PROMPTS:
        once = median_us(partial(cache.insert, tokens), pairs)
        report.value(f"insert {tokens} tokens (seal and publish)", once * 1000 / tokens, "ns/token")
    report.value("ledger, free list and tree, of the bytes of K and V", memory_share(16_384), "%", 0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description="How the cost of the cache's operations grows, in CPU time.")
    parser.add_argument("--pages", type=int, default=1_000_000, help="pages of the large tree (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="pairs for each ratio, at least 5 (default: %(default)s)")
    options = parser.parse_args()
    report = Report()
    print(f"Python {sys.version.split()[0]}, pages of {PAGE_TOKENS} tokens, {options.pairs} pairs; small size, large size, ratio")
    measure(report, large_pages=options.pages, pairs=max(5, options.pairs))
    print(f"missed: {', '.join(report.missed) or 'none'}")
    return 1 if report.missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
