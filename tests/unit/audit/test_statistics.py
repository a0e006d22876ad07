"""The rank test and its power, against published values and by simulation."""

from __future__ import annotations

import random

import pytest

from kvseal.audit.statistics import median, power, rank_test, zero_upper_bound


def test_separated_samples_are_seen_and_equal_ones_are_not() -> None:
    low, high = [1.0 + i / 100 for i in range(12)], [2.0 + i / 100 for i in range(12)]
    assert rank_test(low, high).p < 1e-4
    assert rank_test(low, high).effect == 1.0
    assert rank_test(high, low).p > 0.99
    assert rank_test([1.0] * 10, [1.0] * 10).p > 0.4
    assert rank_test([], low).p == 1.0


def test_a_textbook_value() -> None:
    """Five against five, completely apart: z = (25 - 12.5 - 0.5) / sqrt(5 * 5 * 11 / 12) = 2.507, one-sided p = 0.0061."""
    assert rank_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]).p == pytest.approx(0.0061, abs=2e-4)


def test_the_level_holds_without_an_effect() -> None:
    draw = random.Random(3)
    alarms = sum(rank_test([draw.gauss(1, 0.3) for _ in range(12)], [draw.gauss(1, 0.3) for _ in range(12)]).p < 0.05 for _ in range(2_000))
    assert 50 <= alarms <= 150  # 5 % of 2000 is 100; three sigma are 30.


def test_power_grows_with_the_effect_and_with_the_pairs() -> None:
    draw = random.Random(4)
    warm = [draw.gauss(1.0, 0.2) for _ in range(30)]
    near, far = [draw.gauss(1.1, 0.2) for _ in range(30)], [draw.gauss(2.0, 0.2) for _ in range(30)]
    assert power(warm, far, 12) > 0.95
    assert power(warm, near, 12) < 0.3
    assert power(warm, near, 100) > power(warm, near, 12)
    assert power([], far, 12) == 0.0


def test_median_and_the_bound_of_zero_events() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0 and median([1.0, 2.0]) == 1.5
    assert zero_upper_bound(0) == 1.0
    assert zero_upper_bound(60) == pytest.approx(0.0487, abs=1e-3)
