"""What the prefix cache costs where it finds nothing: figure 6 of the performance notes. ``kvseal bench noreuse``.

Owns a comparison of the control plane with itself on prompts that share nothing (code, and first turns of chats): with its prefix cache (A)
and with one that looks for nothing, keeps nothing and evicts nothing (B, which exists in this benchmark alone). Results are made up, so
both sides schedule the same steps and the difference of their CPU times is the cache's whole cost; it is held against the CPU time that
the same requests take on the real engine. A difference this small cannot be seen in the time of whole runs.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Sequence

from kvseal.bench.suite.board import Entry, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.null_model import NullModel
from kvseal.bench.suite.rig import Rig, RunFailed
from kvseal.bench.suite.workloads import Ask, workload
from kvseal.core.ids import Scope
from kvseal.kv.handles import Pin
from kvseal.kv.prefix_cache import PrefixCache
from kvseal.kv.prefix_key import PackedTokens
from kvseal.node.models import resolve_model
from kvseal.serve.tokenizer_files import load_tokenizer

REAL_REQUESTS, QUICK_REAL_REQUESTS = 24, 6
POOL_TOKENS = 65_536
MOST = Target(high=0.002)


class NoCache(PrefixCache):
    """Finds nothing and keeps nothing: pages are free as soon as their request has ended."""

    def probe(self, scope: Scope, tokens: PackedTokens) -> array[int]:
        return array("Q")

    def publish(self, pin: Pin, parent_page: int | None, run: bytes, stamps: array[int]) -> array[int]:
        return array("Q")

    def publish_one(self, pin: Pin, parent_page: int | None, run: bytes, page: int, nonce: int) -> bool:
        return True

    def unpinned(self, stamps: array[int]) -> None:
        pass

    def evict(self, pages: int) -> int:
        return 0

    def holds(self, page: int) -> bool:
        return False


def control_plane_s(asks: Sequence[Ask], *, cached: bool) -> float:
    """CPU seconds of everything but the model, for all requests at once."""
    longest = max(len(ask.prompt) + ask.output_tokens for ask in asks)
    model = NullModel(pool_tokens=POOL_TOKENS, context_tokens=longest)
    if not cached:
        model.kv.cache = NoCache(model.kv.pool)
    gc.collect()
    began_s = time.process_time()
    model.submit(asks)
    model.run()
    spent_s = time.process_time() - began_s
    if cached and model.cached_tokens > 0.01 * sum(len(ask.prompt) for ask in asks):
        raise RunFailed("these prompts share prefixes: they do not show what the cache costs where it finds nothing")
    return spent_s


def run(context: Context) -> Result:
    encode = load_tokenizer(resolve_model(context.model)).encode
    name = "cache's CPU time / CPU time of the run, no reuse"
    try:
        with Rig(context, pool_tokens=POOL_TOKENS) as rig:
            work = workload("unshared", context.traces, encode, rig.engine.report.vocab_size)
            asks = [ask for ask in work.asks if len(ask.prompt) + ask.output_tokens <= rig.engine.report.served_context_tokens]
            count = QUICK_REAL_REQUESTS if context.quick else REAL_REQUESTS
            part = asks[:: len(asks) // count][:count]
            context.say(f"{count} requests on the real engine")
            rig.run(part[:2])
            real = rig.run(part)
            settings = rig.settings
        with_cache, without = [], []
        control_plane_s(asks, cached=True)
        for pair in range(context.pairs):
            context.say(f"pair {pair + 1} of {context.pairs}: {len(asks)} requests, no model")
            with_cache.append(1e6 * control_plane_s(asks, cached=True) / len(asks))
            without.append(1e6 * control_plane_s(asks, cached=False) / len(asks))
        entries = entries_of(with_cache, without, 1e6 * real.cpu_seconds / count, work.label, name)
    except RunFailed as failed:
        entries, settings = [missing("6", name, str(failed), MOST)], {}
    return Result(name="noreuse", title="What the cache costs where it finds nothing", entries=entries, settings=settings)


def entries_of(with_cache: Sequence[float], without: Sequence[float], real_us: float, label: str, name: str) -> list[Entry]:
    """All in microseconds of CPU time per request."""
    unit = "us/request"
    extra = tuple(max(0.0, on - off) for on, off in zip(with_cache, without, strict=True))
    cost, whole = Side("cache on - off", unit, extra), Side("real engine, everything", unit, (real_us,) * len(extra))
    on, off = Side("control plane, cache on", unit, tuple(with_cache)), Side("cache off", unit, tuple(without))
    return [
        Entry(figure="6", name=name, a=cost, b=whole, target=MOST, note=label),
        Entry(figure="6", name="control plane alone, cache on / off", a=on, b=off, note=label),
    ]


def main() -> int:
    return benchmark_main("noreuse", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
