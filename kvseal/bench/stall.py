"""Whether a long prompt makes others wait: figure 10 of the performance notes. ``kvseal bench stall``.

Owns the comparison of one engine with itself: 8 requests decode, and prompts of 1,024 tokens join them one after the other; in one step
each, as large as it gets (unchunked), or in chunks beside the decoders. What counts is the 99th percentile of the time between two tokens
of a decoder, unchunked over chunked, and how much of the throughput (prompt and output tokens per second) is kept. Also as the server
runs when nobody says anything about chunks. Outputs must be equal, token for token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.rig import Ran, Rig, RunFailed, check_equal
from kvseal.bench.suite.workloads import Ask

DECODERS = 8
PROMPT_TOKENS = 1_024
CHUNK_TOKENS = 40
"""Of a step: 8 decode, the rest belongs to a prompt."""
UNCHUNKED_TOKENS = 8_192
POOL_TOKENS = 16_384
JOINERS, QUICK_JOINERS = 4, 2
TOKENS_BETWEEN = 24
"""Of each decoder, between two arrivals."""
SHORTER, KEPT = Target(low=20.0), Target(low=0.9)


def requests(joiners: int) -> list[Ask]:
    """The decoders, then those that join."""
    chance = random.Random(10)

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(chance.randrange(100, 40_000) for _ in range(tokens))

    decoding = [Ask(prompt(64), TOKENS_BETWEEN * (joiners + 2)) for _ in range(DECODERS)]
    return decoding + [Ask(prompt(PROMPT_TOKENS), 2) for _ in range(joiners)]


def gap_ms(ran: Ran, share: float) -> float:
    """Of the decoders, all gaps together: this share of them is not longer."""
    gaps = sorted(later - sooner for times in ran.token_times_s[:DECODERS] for sooner, later in pairwise(times))
    return 1_000 * gaps[min(len(gaps) - 1, int(share * len(gaps)))]


def p99_gap_ms(ran: Ran) -> float:
    return gap_ms(ran, 0.99)


def gaps_plot(runs: dict[str, list[Ran]]) -> Plot:
    """How long the longest gaps are."""
    one_in = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    lines = tuple(Line(name, tuple((n, median(gap_ms(ran, 1 - 1 / n) for ran in found)) for n in one_in)) for name, found in runs.items())
    title = f"Time between two tokens of {DECODERS} decoders while {PROMPT_TOKENS}-token prompts join them"
    return Plot(title=title, x_label="one gap in so many is longer", y_label="ms", lines=lines)


def token_rate(ran: Ran) -> float:
    return (ran.prompt_tokens + ran.output_tokens) / ran.seconds


def measure(context: Context, rigs: dict[str, Rig]) -> tuple[dict[str, list[Ran]], str]:
    asks = requests(QUICK_JOINERS if context.quick else JOINERS)
    runs: dict[str, list[Ran]] = {name: [] for name in rigs}
    checked = ""
    for rig in rigs.values():
        rig.run(asks[:2])
    for pair in range(context.pairs):
        context.say(f"pair {pair + 1} of {context.pairs}")
        for name, rig in rigs.items():
            runs[name].append(rig.run(asks, apart=True, may_start=Arrivals()))
        checked = check_equal("stall", *(found[-1] for found in runs.values()))
    return runs, checked


class Arrivals:
    """Each long prompt comes `TOKENS_BETWEEN` tokens of every decoder after the last one."""

    def __init__(self) -> None:
        self._come = 0

    def __call__(self, ask: Ask, running: Sequence[Ask], produced_tokens: int) -> bool:
        if len(ask.prompt) < PROMPT_TOKENS:
            return True
        if produced_tokens < DECODERS * TOKENS_BETWEEN * (self._come + 1):
            return False
        self._come += 1
        return True


def run(context: Context) -> Result:
    settings: dict[str, str] = {}
    plots: list[Plot] = []
    try:
        with (
            Rig(context, pool_tokens=POOL_TOKENS, chunk_tokens=UNCHUNKED_TOKENS, step_s=None) as whole,
            Rig(context, pool_tokens=POOL_TOKENS, chunk_tokens=CHUNK_TOKENS) as chunked,
            Rig(context, pool_tokens=POOL_TOKENS) as default,
        ):
            settings = chunked.settings
            runs, checked = measure(context, {"unchunked": whole, "chunked": chunked, "default": default})
        entries = entries_of(runs, checked)
        plots.append(gaps_plot(runs))
    except RunFailed as failed:
        entries = [missing("10", "P99 time between tokens, unchunked / chunked", str(failed), SHORTER)]
    return Result(name="stall", title="Long prompts beside decoders", entries=entries, plots=plots, settings=settings)


def entries_of(runs: dict[str, list[Ran]], checked: str) -> list[Entry]:
    def gaps(name: str, shown: str) -> Side:
        return Side(shown, "ms", tuple(map(p99_gap_ms, runs[name])))

    def rates(name: str, shown: str) -> Side:
        return Side(shown, "tok/s", tuple(map(token_rate, runs[name])))

    chunks = f"steps of {CHUNK_TOKENS}"
    note = f"{DECODERS} decoders, {PROMPT_TOKENS}-token prompts join"
    waits = "P99 time between tokens, unchunked /"
    return [
        Entry(
            figure="10", name=f"{waits} chunked", a=gaps("unchunked", "unchunked"), b=gaps("chunked", chunks), target=SHORTER,
            checked=checked, note=note,
        ),
        Entry(
            figure="10", name="throughput kept, chunked / unchunked", a=rates("chunked", chunks), b=rates("unchunked", "unchunked"),
            target=KEPT, checked=checked,
        ),
        Entry(figure="10", name=f"{waits} default settings", a=gaps("unchunked", "unchunked"), b=gaps("default", "default"), note=note),
        Entry(
            figure="10", name="throughput kept, default / unchunked", a=rates("default", "default"), b=rates("unchunked", "unchunked")
        ),
    ]  # fmt: skip


def main() -> int:
    return benchmark_main("stall", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
