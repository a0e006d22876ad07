"""How much of what could be reused is reused: figure 4 of the performance notes. ``kvseal bench hits``.

Owns the comparison of the prompt tokens that the real scheduler and cache found with those that whole pages of 16 in a cache without limit
would find for the same requests in the same order. No model is computed, so whole workloads take seconds: all requests at once, with a
pool that holds everything, and MMLU's 1,140 prompts shuffled with a pool of a tenth of their distinct tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvseal.bench.suite.board import Entry, Result, Side, Target
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.null_model import PAGE_TOKENS, NullModel
from kvseal.bench.suite.workloads import Ask, Workload, distinct_tokens, ideal_hits, workload
from kvseal.node.models import resolve_model
from kvseal.serve.tokenizer_files import load_tokenizer

WORKLOADS = ("mmlu", "gsm8k", "react", "arc")
AMPLE, TIGHT = Target(low=99.5), Target(low=97.0)
TIGHT_SHARE = 0.1
VOCAB_TOKENS = 40_000


def hits(asks: Sequence[Ask], *, pool_tokens: int) -> int:
    """Prompt tokens found by the engine's own scheduler and cache, all requests at once."""
    longest = max(len(ask.prompt) + ask.output_tokens for ask in asks)
    model = NullModel(pool_tokens=max(pool_tokens, longest), context_tokens=longest)
    model.submit(asks)
    model.run()
    return model.cached_tokens


def ample(work: Workload, context: Context) -> Entry:
    """Waves one after the other, as agents send them."""
    context.say(f"{work.label}, ample pool")
    longest = max(len(ask.prompt) + ask.output_tokens for ask in work.asks)
    model = NullModel(pool_tokens=distinct_tokens(work.asks, PAGE_TOKENS) + 128 * longest, context_tokens=longest)
    sent = 0
    waves = work.groups if work.shared else (work.asks,)
    for wave in waves:
        model.submit(wave, first=sent)
        model.run()
        sent += len(wave)
    return _entry(work, work.asks, model.cached_tokens, "pool holds everything", AMPLE)


def tight(work: Workload, context: Context, *, rounds: int) -> Entry:
    """Shuffled, with room for a tenth."""
    pool_tokens = round(TIGHT_SHARE * distinct_tokens(work.asks, PAGE_TOKENS))
    found, ideal = [], []
    for seed in range(rounds):
        context.say(f"{work.label} shuffled, pool of {pool_tokens} tokens, order {seed + 1} of {rounds}")
        asks = work.asks
        random.Random(seed).shuffle(asks)
        found.append(hits(asks, pool_tokens=pool_tokens))
        ideal.append(ideal_hits(asks, PAGE_TOKENS))
    values = tuple(100 * one / most for one, most in zip(found, ideal, strict=True))
    note = f"{len(work.asks)} prompts at once, pool of {TIGHT_SHARE:.0%} of the distinct tokens; ideal {ideal[0]} tokens"
    return Entry(figure="4", name=f"hits / ideal, {work.label}, shuffled, tight pool", a=Side("hits", "%", values), target=TIGHT, note=note)


def _entry(work: Workload, asks: Sequence[Ask], found: int, how: str, target: Target) -> Entry:
    ideal = ideal_hits(asks, PAGE_TOKENS)
    total = sum(len(ask.prompt) for ask in asks)
    note = f"{how}; {found} of {ideal} tokens, {found / total:.1%} of {total} prompt tokens"
    return Entry(figure="4", name=f"hits / ideal, {work.label}", a=Side("hits", "%", (100 * found / ideal,)), target=target, note=note)


def run(context: Context) -> Result:
    encode = load_tokenizer(resolve_model(context.model)).encode
    entries = []
    for name in WORKLOADS:
        work = workload(name, context.traces, encode, VOCAB_TOKENS)
        entries.append(ample(work, context))
        if name == "mmlu":
            entries.append(tight(work, context, rounds=1 if context.quick else context.pairs))
    remarks = ["scheduler and cache are the real ones, results are made up; requests with their true lengths, 64 running, chunks of 512"]
    return Result(name="hits", title="Hit efficiency", entries=entries, remarks=remarks)


def main() -> int:
    return benchmark_main("hits", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
