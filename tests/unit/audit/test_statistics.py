"""The paired test and its power, against published values, by counting and by simulation."""

from __future__ import annotations

import random
from itertools import product

import pytest

from kvseal.audit import statistics
from kvseal.audit.statistics import median, paired_test, power, zero_upper_bound


def test_separated_pairs_are_seen_and_equal_ones_are_not() -> None:
    low, high = [1.0 + i / 100 for i in range(14)], [2.0 + i / 100 for i in range(14)]
    assert paired_test(low, high).p == 2.0**-14
    assert paired_test(low, high).ratio == pytest.approx(1.94, abs=0.02)
    assert paired_test(high, low).p == 1.0
    assert paired_test([1.0] * 10, [1.0] * 10).p == 1.0
    assert paired_test([], []).p == 1.0
    with pytest.raises(ValueError, match="zip"):
        paired_test([1.0], [])


def test_published_critical_values() -> None:
    """Wilcoxon's table: eight pairs with a rank sum of 3 on the losing side have a one-sided p of 5/256, of 5 have 10/256."""
    for lost, chance in ((3, 5 / 256), (5, 10 / 256)):
        high = [2.0 ** (-(rank) if rank == lost else rank) for rank in range(1, 9)]
        assert paired_test([1.0] * 8, high).p == pytest.approx(chance)


def test_exact_and_approximate_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    low, high = [1.0] * 20, [draw.uniform(0.8, 1.5) for _ in range(20)]
    exact = paired_test(low, high).p
    monkeypatch.setattr(statistics, "_EXACT_PAIRS", 0)
    assert paired_test(low, high).p == pytest.approx(exact, rel=0.1)


def test_ties_share_their_rank() -> None:
    """Ranks 2, 2, 2, 4: the sum of those that won is 8 of 10."""
    sums = [sum(rank for rank, sign in zip((2, 2, 2, 4), signs, strict=True) if sign) for signs in product((0, 1), repeat=4)]
    assert paired_test([1.0] * 4, [2.0, 2.0, 0.5, 4.0]).p == sum(total >= 8 for total in sums) / 16


def test_the_level_holds_without_an_effect() -> None:
    draw = random.Random(3)
    for pairs in (12, 30):
        alarms = sum(
            paired_test([draw.gauss(1, 0.3) ** 2 for _ in range(pairs)], [draw.gauss(1, 0.3) ** 2 for _ in range(pairs)]).p < 0.05
            for _ in range(1_000)
        )
        assert 25 <= alarms <= 75  # 5 % of 1000 is 50; three sigma are 21.


def test_a_machine_that_is_slow_by_phases_does_not_hide_an_effect_in_pairs() -> None:
    draw = random.Random(5)
    phases = [draw.choice((1.0, 8.0)) for _ in range(16)]
    low, high = ([phase * seconds * draw.uniform(0.9, 1.1) for phase in phases] for seconds in (1.0, 1.4))
    assert paired_test(low, high).p < 1e-4
    draw.shuffle(high)  # The same times in the order of no moment: this is what a test without pairs sees.
    assert paired_test(low, high).p > 0.01


def test_power_grows_with_the_effect_and_with_the_pairs() -> None:
    draw = random.Random(4)
    warm = [draw.gauss(1.0, 0.2) for _ in range(30)]
    near, far = [draw.gauss(1.1, 0.2) for _ in range(30)], [draw.gauss(2.0, 0.2) for _ in range(30)]
    assert power(warm, far, 12) > 0.95
    assert power(warm, near, 12) < 0.3
    assert power(warm, near, 100) > power(warm, near, 12)
    assert power([], [], 12) == 0.0


def test_median_and_the_bound_of_zero_events() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0 and median([1.0, 2.0]) == 1.5
    assert zero_upper_bound(0) == 1.0
    assert zero_upper_bound(60) == pytest.approx(0.0487, abs=1e-3)
