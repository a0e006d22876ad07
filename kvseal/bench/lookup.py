"""What it costs to find and to enter a prefix: figure 8 of the performance notes. ``kvseal bench lookup``.

Owns the timing of `match` (all of a prompt cached, tokens compared exactly) and `insert` (pages sealed and published) in nanoseconds per
token, for prompts of 512 to 8,192 tokens. With ``--sglang-python`` SGLang's RadixCache does the same in its own Python, with pages of the
same size, taking turns. CPU time.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target, missing
from kvseal.bench.suite.cache_rig import PAGE_TOKENS, Cache
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.foreign import ForeignPython

PROMPTS = (512, 1_024, 2_048, 4_096, 8_192)
POOL_PAGES = 8_192
MATCH, TIMES_FASTER = Target(high=12.0), Target(low=5.0)
OURS = ("match", "match, first look", "insert")


def measure(context: Context, cache: Cache, sglang: ForeignPython) -> dict[str, dict[int, list[float]]]:
    """ns per token by operation and prompt length; SGLang's under "sglang match" and "sglang insert"."""
    operations = dict(zip(OURS, (cache.match, cache.match_from_list, cache.insert), strict=True))
    names = [*OURS, *(("sglang match", "sglang insert") if sglang.version else ())]
    found: dict[str, dict[int, list[float]]] = {name: {tokens: [] for tokens in PROMPTS} for name in names}
    for turn in range(-1, context.pairs):
        context.say("warm-up" if turn < 0 else f"round {turn + 1} of {context.pairs}")
        for tokens in PROMPTS:
            for name, operation in operations.items():
                once = partial(operation, tokens)()
                found[name][tokens] += [once * 1_000 / tokens] if turn >= 0 else []
            for name in names[len(OURS) :]:
                once = sglang.ask({"operation": name.split()[1], "tokens": tokens, "page_tokens": PAGE_TOKENS})
                found[name][tokens] += [once] if turn >= 0 else []
    return found


def entries_of(found: dict[str, dict[int, list[float]]], version: str, absent: str) -> list[Entry]:
    entries = []
    for name in OURS:
        for tokens in (PROMPTS[0], PROMPTS[-1]):
            side = Side(name, "ns/token", tuple(found[name][tokens]))
            entries.append(Entry(figure="8", name=f"{name}, {tokens:,} tokens", a=side, target=MATCH if name == "match" else None))
    for operation in ("match", "insert"):
        target = TIMES_FASTER if operation == "match" else None
        for tokens in (PROMPTS[0], PROMPTS[-1]):
            name = f"SGLang / ours, {operation}, {tokens:,} tokens"
            if not version:
                entries.append(missing("8", name, absent, target))
                continue
            a = Side(f"SGLang {version}", "ns/token", tuple(found[f"sglang {operation}"][tokens]))
            b = Side("ours", "ns/token", tuple(found[operation][tokens]))
            entries.append(Entry(figure="8", name=name, a=a, b=b, target=target))
    return entries


def run(context: Context) -> Result:
    with ForeignPython(context.sglang_python, "sglang_radix.py", "SGLang's RadixCache") as sglang:
        found = measure(context, Cache(POOL_PAGES), sglang)
        version, absent = sglang.version, sglang.absent
    lines = tuple(Line(name, tuple((tokens, median(values)) for tokens, values in by.items())) for name, by in found.items())
    plot = Plot("Finding and entering a prefix", "prompt tokens", "ns of CPU time per token", lines, ((12.0, "target of match"),))
    remarks = ['"first look" packs the prompt\'s list of ids first, as the scheduler does once for each request']
    entries = entries_of(found, version, absent)
    return Result(name="lookup", title="Prefix lookup", entries=entries, plots=[plot], remarks=remarks)


def main() -> int:
    return benchmark_main("lookup", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
