"""How cost grows: the growth table of the performance notes. ``kvseal bench growth``.

Owns the comparisons of a small size with a large one, taking turns, in CPU time: cache operations without a model or an arena, the text of
a long answer, a scrape of the metrics. A slope is the logarithm of a ratio over the logarithm of how many times larger the large size is.
"""

from __future__ import annotations

import math
import tracemalloc
from functools import partial
from statistics import median

from prometheus_client import generate_latest

from kvseal.bench.suite.board import Entry, Result, Side, Target
from kvseal.bench.suite.cache_rig import GEOMETRY, PAGE_TOKENS, SCOPE, Cache, Operation, timed, turns
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.core.ids import RequestId
from kvseal.node.models import resolve_model
from kvseal.serve.detokenizer import Detokenizer
from kvseal.serve.metrics import Metrics
from kvseal.serve.tokenizer import Tokenizer
from kvseal.serve.tokenizer_files import load_tokenizer

PAGES, QUICK_PAGES = 1_000_000, 100_000
SMALL_PAGES = 1_024
SHORT_TOKENS, LONG_TOKENS = 512, 8_192
ANSWER_TOKENS, WINDOW_TOKENS, ANSWERS = 8_192, 100, 5
FORKS = 64
SCRAPED_REQUESTS = 10_000


def ratio(name: str, small: tuple[str, Operation], large: tuple[str, Operation], most: float, context: Context) -> Entry:
    """Large over small."""
    context.say(name)
    taken = turns({"small": small[1], "large": large[1]}, context.pairs)
    a, b = Side(large[0], "us", taken["large"]), Side(small[0], "us", taken["small"])
    return Entry(figure="growth", name=name, a=a, b=b, target=Target(high=most))


def slope(name: str, small: Operation, large: Operation, context: Context) -> Entry:
    """Of `LONG_TOKENS` over `SHORT_TOKENS`: 1 is O(n). Below 0.9 the small size feels a fixed cost; above 1.1 something is scanned."""
    context.say(name)
    taken = turns({"small": small, "large": large}, context.pairs)
    values = tuple(math.log(b / a) / math.log(LONG_TOKENS / SHORT_TOKENS) for a, b in zip(taken["small"], taken["large"], strict=True))
    small_us, large_us = min(taken["small"]), min(taken["large"])
    note = f"at best {small_us:.0f} us for {SHORT_TOKENS}, {large_us:.0f} us for {LONG_TOKENS} tokens"
    return Entry(figure="growth", name=name, a=Side("slope in log-log", "", values), target=Target(high=1.1), note=note)


def of_pool_size(context: Context, large_pages: int) -> list[Entry]:
    """The same operation beside few and beside many cached pages."""
    small, large = Cache(2 * SMALL_PAGES), Cache(large_pages + 2 * SMALL_PAGES)
    context.say(f"filling a tree of {large_pages:,} pages")

    def compared(name: str, small_one: Operation, large_one: Operation, most: float) -> Entry:
        return ratio(name, (f"{SMALL_PAGES:,} pages", small_one), (f"{large_pages:,} pages", large_one), most, context)

    entries = [compared("lease and free one page", small.one_page, large.one_page, 1.3)]
    small.fill(SMALL_PAGES)
    large.fill(large_pages)
    for name, operation in (("admit 512 tokens, none cached", Cache.admit_miss), ("admit 512 tokens, all cached", Cache.admit_hit)):
        entries.append(compared(name, partial(operation, small, SHORT_TOKENS), partial(operation, large, SHORT_TOKENS), 1.5))
    entries.append(compared("insert 512 tokens", partial(small.insert, SHORT_TOKENS), partial(large.insert, SHORT_TOKENS), 1.5))
    evicted = turns({"evict": large.evict_one}, context.pairs)["evict"]
    side = Side("evict one page", "us", evicted)
    entries.append(Entry(figure="growth", name=f"evict one page of {large_pages:,}", a=side, target=Target(high=20.0)))
    short, long = ((f"at {tokens:,} tokens", partial(large.decode, tokens)) for tokens in (SHORT_TOKENS, LONG_TOKENS))
    entries.append(ratio("decode bookkeeping for one token", short, long, 1.5, context))
    return entries


def of_prompt_length(context: Context) -> list[Entry]:
    cache = Cache(4 * SMALL_PAGES)
    operations = {"admit, none cached": cache.admit_miss, "insert": cache.insert}
    return [
        slope(f"{name}, n from {SHORT_TOKENS} to {LONG_TOKENS}", partial(call, SHORT_TOKENS), partial(call, LONG_TOKENS), context)
        for name, call in operations.items()
    ]


def memory_share(pages: int) -> Entry:
    """Percent of the K and V of a page that ledger, free list and tree take for it, in a cache full of runs."""
    tracemalloc.start()
    cache = Cache(pages)
    cache.fill(pages)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    side = Side("bytes for pages / bytes of K and V", "%", (100 * used / pages / (GEOMETRY.token_bytes * PAGE_TOKENS),))
    return Entry(figure="growth", name="ledger, free list and tree", a=side, target=Target(high=0.1), note=f"{pages:,} pages, tree full")


def forked() -> Entry:
    """Pages that a fork to `FORKS` sequences takes: a reference to each shared page and one page to write, none copied."""
    cache = Cache(4 * SMALL_PAGES)
    tokens = cache.prompt(LONG_TOKENS + 1, seed=9)
    first = cache.admit(tokens, LONG_TOKENS + 1)
    cache.compute(first, tokens)
    free = cache.kv.usage().free
    grants = [cache.kv.admit(RequestId(f"fork-{index}"), SCOPE, tokens, first_tokens=1) for index in range(FORKS)]
    taken = free - cache.kv.usage().free
    whole = all(grant is not None and grant.cached_tokens == LONG_TOKENS for grant in grants)
    side = Side("pages for each fork", "pages", (taken / FORKS if whole else math.inf,))
    note = f"{FORKS} forks of {LONG_TOKENS} tokens"
    return Entry(figure="growth", name="fork a sequence", a=side, target=Target(high=1.0), note=note)


def long_answer(tokenizer: Tokenizer, context: Context) -> Entry:
    """The text of the last tokens of a long answer against that of the first, with stop strings being looked for."""
    tokens = [(index * 7_919) % min(tokenizer.vocab_size, 40_000) for index in range(ANSWER_TOKENS)]

    def window(first: int) -> Operation:
        def once() -> float:
            detokenizer = Detokenizer(tokenizer, ("\n\nStop here",))
            for token in tokens[:first]:
                detokenizer.push(token)
            wanted = iter(tokens[first : first + WINDOW_TOKENS])
            return timed(lambda: detokenizer.push(next(wanted)), WINDOW_TOKENS)

        return lambda: median(once() for _ in range(ANSWERS))

    last = ANSWER_TOKENS - WINDOW_TOKENS
    early, late = (f"first {WINDOW_TOKENS}", window(0)), (f"last {WINDOW_TOKENS} of {ANSWER_TOKENS:,}", window(last))
    return ratio("text of one token", early, late, 1.2, context)


def scrape(context: Context) -> Entry:
    """Metrics after many requests against metrics after one."""

    def served(requests: int) -> Operation:
        metrics = Metrics()
        for index in range(requests):
            metrics.http_requests.labels("/v1/completions", "200").inc()
            metrics.http_outcomes.labels("completed").inc()
            metrics.first_token_s.observe(0.001 * (index % 1_000))
            metrics.end_to_end_s.observe(0.01 * (index % 1_000))
        return lambda: timed(lambda: generate_latest(metrics.registry), 20)

    few, many = ("after 1 request", served(1)), (f"after {SCRAPED_REQUESTS:,}", served(SCRAPED_REQUESTS))
    return ratio("scrape of the metrics", few, many, 1.2, context)


def run(context: Context) -> Result:
    pages = QUICK_PAGES if context.quick else PAGES
    entries = [*of_pool_size(context, pages), *of_prompt_length(context), memory_share(16 * SMALL_PAGES), forked()]
    entries += [long_answer(load_tokenizer(resolve_model(context.model)), context), scrape(context)]
    return Result(name="growth", title="How cost grows", entries=entries)


def main() -> int:
    return benchmark_main("growth", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
