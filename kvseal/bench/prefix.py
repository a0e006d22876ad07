"""What the prefix cache is worth on real work: figure 3 of the performance notes. ``kvseal bench prefix``.

Owns the comparison of one engine with itself: requests that may share their prefixes (A) against the same requests, each in a scope of its
own, so that nothing is ever found (B). Outputs must be equal, token for token. Work is taken in slices that keep its structure: MMLU by
subject, cold; the others after their common shots have been served once, as all but the first of hundreds of requests find it; agents with
all their steps, each asked when the one before has been answered (``--full-size``: every request, nothing served before). B computes a
share of A's requests, chosen to stand for all. Rates are requests per second, B's as if its prompts were as long as A's on average.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    """How a workload is cut: how many requests (or agents) a slice has, for how many of them it is computed without the cache too, and the
    target of its ratio. Without it each takes many times as long, and as long whatever the others are."""

    name: str
    requests: int
    apart: int
    target: Target
    quick: tuple[int, int] = (8, 2)
    """Requests and apart of a quick look."""


PLANS = (
    Plan("mmlu", 20, 8, Target(low=4.3), quick=(20, 4)),
    Plan("gsm8k", 24, 8, Target(low=5.2)),
    Plan("react", 8, 2, Target(low=7.0), quick=(4, 1)),
    Plan("arc", 64, 4, Target(low=35.0), quick=(32, 2)),
)

Waves = list[list[Ask]]
"""Requests that come at once, and what comes when they have been answered."""


def slices(work: Workload, requests: int, pairs: int) -> list[Waves]:
    """One for each pair: whole agents with all their steps; or whole groups, short, middling and long prompts evenly; or consecutive
    requests from evenly spread places. Those with the longest answers come first, so that few are alone at the end of a slice."""
    groups = work.groups
    if len(groups) > 1 and work.shared:
        starts = [at * len(groups[0]) // pairs for at in range(pairs)]
        return [[list(wave[start : start + requests]) for wave in groups] for start in starts]
    if len(groups) > 1:
        in_order = sorted(groups, key=lambda group: sum(len(ask.prompt) for ask in group))
        parts = [in_order[(2 * at + 1) * len(groups) // (2 * pairs) % len(groups)][:requests] for at in range(pairs)]
    else:
        asks = work.asks
        starts = [at * len(asks) // pairs for at in range(pairs)]
        parts = [tuple(asks[start : start + requests]) for start in starts]
    return [[sorted(part, key=lambda ask: -ask.output_tokens)] for part in parts]


def chosen(waves: Waves, apart: int) -> list[int]:
    """Places, in the waves one after another, of those that stand for all: agents with all their steps, or requests evenly from the longest
    to the shortest."""
    size = len(waves[0])
    apart = min(apart, size)
    places = sorted(range(size), key=lambda at: (waves[0][at].output_tokens, len(waves[0][at].prompt)), reverse=True)
    some = [places[(2 * at + 1) * size // (2 * apart)] for at in range(apart)]
    return [number * size + place for number in range(len(waves)) for place in some]


@dataclass(slots=True)
class Taken:
    """What the pairs of one workload gave."""

    on: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    compared: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ideal_tokens: int = 0


def pair(rig: Rig, work: Workload, waves: Waves, apart: int, *, cold: bool, taken: Taken) -> None:
    """Waves with the cache, one after another; then those of them that are chosen without it, all at once."""
    scope, page_tokens = Scope(os.urandom(16)), rig.engine.report.page_tokens
    warm = [] if cold or not work.shared else [Ask(work.shared, 1)]
    if warm:
        rig.run(warm, scope=scope)
    runs = [rig.run(wave, scope=scope) for wave in waves]
    asks, outputs = [ask for wave in waves for ask in wave], [output for ran in runs for output in ran.outputs]
    places = chosen(waves, apart)
    without = rig.run([asks[at] for at in places], apart=True)
    check_equal(work.label, replace(without, outputs=tuple(outputs[at] for at in places)), without)
    taken.on.append(len(asks) / sum(ran.seconds for ran in runs))
    # A share whose prompts are a little longer than those of all would look slower by as much.
    longer = (without.prompt_tokens / len(places)) / (sum(len(ask.prompt) for ask in asks) / len(asks))
    taken.off.append(without.request_rate * longer)
    taken.compared += len(places)
    taken.requests += len(asks)
    taken.prompt_tokens += sum(ran.prompt_tokens for ran in runs)
    taken.cached_tokens += sum(ran.cached_tokens for ran in runs)
    taken.ideal_tokens += ideal_hits([*warm, *asks], page_tokens) - ideal_hits(warm, page_tokens)


def compare(rig: Rig, work: Workload, parts: Sequence[Waves], plan: Plan, context: Context) -> Entry:
    """`parts`: one for each pair."""
    taken = Taken()
    for index, waves in enumerate(parts):
        context.say(f"{work.label}, pair {index + 1} of {len(parts)}: {sum(map(len, waves))} requests")
        pair(rig, work, waves, apart_of(plan, context, len(waves[0])), cold=context.full_size, taken=taken)
    prompts, ideal = taken.prompt_tokens, taken.ideal_tokens
    limit = f"{prompts / (prompts - ideal):.1f} if only what no cache can find is computed" if prompts > ideal else ""
    found = f"{taken.cached_tokens / prompts:.1%} of {prompts / taken.requests:.0f} prompt tokens found, {ideal / prompts:.1%} could be"
    return Entry(
        figure="3",
        name=f"prefix reuse, {work.label}",
        a=Side("cache on", "requests/s", tuple(taken.on)),
        b=Side("cache off", "requests/s", tuple(taken.off)),
        target=plan.target,
        checked=f"outputs of {taken.compared} requests equal, token for token",
        note=f"{found}; prefill bound {limit}; on: {taken.requests} requests, off: {taken.compared} of them",
    )


def apart_of(plan: Plan, context: Context, requests: int) -> int:
    if context.full_size:
        return requests
    return plan.quick[1] if context.quick else plan.apart


def run(context: Context) -> Result:
    encode = load_tokenizer(resolve_model(context.model)).encode
    entries: list[Entry] = []
    with Rig(context, pool_tokens=POOL_TOKENS) as rig:
        report = rig.engine.report
        for plan in PLANS:
            work = workload(plan.name, context.traces, encode, report.vocab_size)
            asks = [ask for ask in work.asks if len(ask.prompt) + ask.output_tokens <= report.served_context_tokens]
            requests = plan.quick[0] if context.quick else plan.requests
            whole: Waves = [list(group) for group in work.groups] if work.shared else [asks]
            parts = [whole] * context.pairs if context.full_size else slices(work, requests, context.pairs)
            if len(asks) < len(work.asks):
                entries.append(missing("3", f"prefix reuse, {work.label}", "prompts are longer than the context served", plan.target))
                continue
            try:
                if not entries:
                    rig.run(parts[0][0][:2], apart=True)  # Warm: memory is touched, clocks are up.
                entries.append(compare(rig, work, parts, plan, context))
            except RunFailed as failed:
                entries.append(missing("3", f"prefix reuse, {work.label}", str(failed), plan.target))
        settings = rig.settings
    remarks = ["A and B are the same engine; B gives each request a scope of its own"]
    return Result(name="prefix", title="Prefix reuse on real work", entries=entries, settings=settings, remarks=remarks)


def main() -> int:
    return benchmark_main("prefix", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
