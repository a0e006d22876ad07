"""What the prefix cache is worth on real work: figure 3 of the performance notes. ``kvseal bench prefix``.

Owns the comparison of one engine with itself: requests that may share their prefixes (A) against the same requests, each in a scope of its
own, so that nothing is ever found (B). Outputs must be equal, token for token. Work is taken in slices that keep its structure: MMLU by
subject, cold; the others after their common shots have been served once, as all but the first of hundreds of requests find it
(``--full-size``: every request, nothing served before). Rates are requests per second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvseal.bench.suite.board import Entry, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.rig import Rig, RunFailed, check_equal
from kvseal.bench.suite.workloads import Ask, Workload, ideal_hits, workload
from kvseal.core.ids import Scope
from kvseal.node.models import resolve_model
from kvseal.serve.tokenizer_files import load_tokenizer

POOL_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Plan:
    """How a workload is cut: requests of a slice, and the target of its ratio."""

    name: str
    requests: int
    quick_requests: int
    target: Target


PLANS = (
    Plan("mmlu", 20, 8, Target(low=4.3)),
    Plan("gsm8k", 12, 4, Target(low=5.2)),
    Plan("react", 12, 4, Target(low=7.0)),
    Plan("arc", 16, 8, Target(low=35.0)),
)


def slices(work: Workload, requests: int, pairs: int) -> list[list[Ask]]:
    """One for each pair: groups of short, middling and long prompts evenly, or waves in order, where there are several; else consecutive
    requests from evenly spread places."""
    groups = work.groups
    if len(groups) > 1:
        if not work.shared:
            groups = tuple(sorted(groups, key=lambda group: sum(len(ask.prompt) for ask in group)))
        chosen = [groups[(2 * at + 1) * len(groups) // (2 * pairs) % len(groups)] for at in range(pairs)]
        return [list(group[:requests]) for group in chosen]
    asks = work.asks
    starts = [at * len(asks) // pairs for at in range(pairs)]
    return [asks[start : start + requests] for start in starts]


def compare(rig: Rig, work: Workload, parts: Sequence[Sequence[Ask]], target: Target, context: Context, *, cold: bool) -> Entry:
    """`parts`: one for each pair."""
    on: list[float] = []
    off: list[float] = []
    checked, cached, ideal, prompts = "", 0, 0, 0
    page_tokens = rig.engine.report.page_tokens
    for index, part in enumerate(parts):
        context.say(f"{work.label}, pair {index + 1} of {len(parts)}: {len(part)} requests")
        scope = Scope(os.urandom(16))
        warm = [] if cold or not work.shared else [Ask(work.shared, 1)]
        if warm:
            rig.run(warm, scope=scope)
        with_cache = rig.run(part, scope=scope)
        without = rig.run(part, apart=True)
        checked = check_equal(work.label, with_cache, without)
        on.append(with_cache.request_rate)
        off.append(without.request_rate)
        cached += with_cache.cached_tokens
        ideal += ideal_hits([*warm, *part], page_tokens) - ideal_hits(warm, page_tokens)
        prompts += with_cache.prompt_tokens
    count = sum(map(len, parts))
    limit = f"{prompts / (prompts - ideal):.1f} if only what no cache can find is computed" if prompts > ideal else ""
    return Entry(
        figure="3",
        name=f"prefix reuse, {work.label}",
        a=Side("cache on", "requests/s", tuple(on)),
        b=Side("cache off", "requests/s", tuple(off)),
        target=target,
        checked=checked.replace(f"of {len(parts[-1])}", f"of {count}"),
        note=f"{cached / prompts:.1%} of {prompts / count:.0f} prompt tokens found, {ideal / prompts:.1%} could be; prefill bound {limit}",
    )


def run(context: Context) -> Result:
    encode = load_tokenizer(resolve_model(context.model)).encode
    entries: list[Entry] = []
    with Rig(context, pool_tokens=POOL_TOKENS) as rig:
        report = rig.engine.report
        for plan in PLANS:
            work = workload(plan.name, context.traces, encode, report.vocab_size)
            asks = [ask for ask in work.asks if len(ask.prompt) + ask.output_tokens <= report.served_context_tokens]
            requests = plan.quick_requests if context.quick else plan.requests
            parts = [asks] * context.pairs if context.full_size else slices(work, requests, context.pairs)
            if len(asks) < len(work.asks):
                entries.append(missing("3", f"prefix reuse, {work.label}", "prompts are longer than the context served", plan.target))
                continue
            try:
                if not entries:
                    rig.run(parts[0][:2], apart=True)  # Warm: memory is touched, clocks are up.
                entries.append(compare(rig, work, parts, plan.target, context, cold=context.full_size))
            except RunFailed as failed:
                entries.append(missing("3", f"prefix reuse, {work.label}", str(failed), plan.target))
        settings = rig.settings
    remarks = ["A and B are the same engine; B gives each request a scope of its own"]
    return Result(name="prefix", title="Prefix reuse on real work", entries=entries, settings=settings, remarks=remarks)


def main() -> int:
    return benchmark_main("prefix", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
