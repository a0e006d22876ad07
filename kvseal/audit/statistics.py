"""The statistics of the timing test, with its power stated: pure arithmetic on lists of seconds.

Owns a one-sided paired test (Wilcoxon's signed ranks, exact for few pairs) and its power for the effect that the server's own positive
control shows. Pairs, because a busy machine is slow for minutes and quick for minutes: what two requests of one moment differ by is not
blurred by that. A test that could not have seen the effect proves nothing, and says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.001
"""How often one timing test may call an isolated server not isolated."""
WANTED_POWER = 0.9
_EXACT_PAIRS = 20


@dataclass(frozen=True, slots=True)
class PairedTest:
    """`p` is the chance of so low a `low` if the order in each pair were a coin's; `ratio` is the median of high / low, 1 is no effect."""

    p: float
    ratio: float


def paired_test(low: Sequence[float], high: Sequence[float]) -> PairedTest:
    """Is `low[i]` really below `high[i]`? Both in seconds, of equal length. Wilcoxon 1945 on logarithms of the quotients: the sum of the
    ranks for which `high` won, exact over all signs up to 20 pairs, else by the normal approximation with continuity correction. Raises
    ValueError when the lengths differ."""
    logs = [math.log(max(y, 1e-9) / max(x, 1e-9)) for x, y in zip(low, high, strict=True)]
    if not logs:
        return PairedTest(1.0, 1.0)
    ratio = math.exp(median(logs))
    signed = [value for value in logs if value]
    ranks = _doubled_ranks([abs(value) for value in signed])
    won = sum(rank for rank, value in zip(ranks, signed, strict=True) if value > 0)
    if not ranks:
        return PairedTest(1.0, ratio)
    if len(ranks) <= _EXACT_PAIRS:
        return PairedTest(_chance_of_sum(ranks, won), ratio)
    mean, deviation = sum(ranks) / 2.0, math.sqrt(sum(rank * rank for rank in ranks)) / 2.0
    return PairedTest(0.5 * math.erfc((won - 1.0 - mean) / deviation / math.sqrt(2.0)), ratio)


def power(low: Sequence[float], high: Sequence[float], pairs: int, *, alpha: float = ALPHA, seed: int = 1, rounds: int = 200) -> float:
    """How often `paired_test` with `pairs` pairs would see at `alpha` the difference that `low` and `high` show (bootstrap of pairs).

    `low` and `high` are the positive control: what the owner of a prefix measures warm and cold, pair by pair.
    """
    both = list(zip(low, high, strict=True))
    if not both or pairs < 2:
        return 0.0
    draw = random.Random(seed)
    seen = 0
    for _ in range(rounds):
        drawn = draw.choices(both, k=pairs)
        seen += paired_test([x for x, _ in drawn], [y for _, y in drawn]).p < alpha
    return seen / rounds


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, ties sharing their mean: whole numbers either way."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = start + 1 + end
        start = end
    return ranks


def _chance_of_sum(ranks: Sequence[int], least: int) -> float:
    """The chance that the ranks on one side add up to `least` or more when a coin decides on which side each is."""
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    return float(sum(ways[least:]) / 2 ** len(ranks))


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0


def zero_upper_bound(trials: int, confidence: float = 0.95) -> float:
    """The rate that `trials` without a single event still allow at `confidence` (the exact binomial bound; about 3/n)."""
    return 1.0 - (1.0 - confidence) ** (1.0 / trials) if trials else 1.0
