"""The statistics of the timing test, with its power stated: pure arithmetic on lists of seconds.

Owns a one-sided rank test (Mann-Whitney, exact normal approximation with ties) and its power for the effect that the server's own positive
control shows. A test that could not have seen the effect proves nothing, and says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.001
"""How often one timing test may call an isolated server not isolated."""
WANTED_POWER = 0.9


@dataclass(frozen=True, slots=True)
class RankTest:
    """`p` is the chance of so low a `low` sample if both came from one distribution; `effect` is P(low < high), 0.5 is none."""

    p: float
    effect: float


def rank_test(low: Sequence[float], high: Sequence[float]) -> RankTest:
    """Is `low` really below `high`? Mann & Whitney 1947, normal approximation with continuity and tie corrections."""
    n, m = len(low), len(high)
    if not n or not m:
        return RankTest(1.0, 0.5)
    wins = sum((x < y) + 0.5 * (x == y) for x in low for y in high)
    effect = wins / (n * m)
    ranked = sorted([*low, *high])
    ties = sum(count**3 - count for count in _runs(ranked))
    total = n + m
    variance = n * m / 12.0 * ((total + 1) - ties / (total * max(1, total - 1)))
    if variance <= 0:
        return RankTest(1.0, effect)
    z = (wins - n * m / 2.0 - 0.5) / math.sqrt(variance)
    return RankTest(0.5 * math.erfc(z / math.sqrt(2.0)), effect)


def power(low: Sequence[float], high: Sequence[float], pairs: int, *, alpha: float = ALPHA, seed: int = 1, rounds: int = 200) -> float:
    """How often `rank_test` with `pairs` values on each side would see at `alpha` the difference that `low` and `high` show (bootstrap).

    `low` and `high` are the positive control: what the owner of a prefix measures warm and cold.
    """
    if not low or not high or pairs < 2:
        return 0.0
    draw = random.Random(seed)
    seen = sum(rank_test(draw.choices(low, k=pairs), draw.choices(high, k=pairs)).p < alpha for _ in range(rounds))
    return seen / rounds


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0


def zero_upper_bound(trials: int, confidence: float = 0.95) -> float:
    """The rate that `trials` without a single event still allow at `confidence` (the exact binomial bound; about 3/n)."""
    return 1.0 - (1.0 - confidence) ** (1.0 / trials) if trials else 1.0


def _runs(ordered: list[float]) -> list[int]:
    counts: list[int] = []
    for index, value in enumerate(ordered):
        if index and value == ordered[index - 1]:
            counts[-1] += 1
        else:
            counts.append(1)
    return counts
