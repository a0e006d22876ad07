"""Budgets, and prompts of an exact size."""

from __future__ import annotations

import random

import pytest

from kvseal.audit.budget import Allowance, Budget, BudgetSpent
from kvseal.audit.prompts import FILLER, Gauge
from kvseal.audit.target import numbers_in


def test_allowances_are_read_with_their_units() -> None:
    assert Allowance.parse("requests=500,tokens=200k,minutes=1.5") == Allowance(500, 200_000, 1.5)
    assert Allowance.parse("tokens=2M") == Allowance(tokens=2_000_000)
    assert Allowance.parse("") == Allowance()


@pytest.mark.parametrize(
    "text",
    [
        "requests",
        "requests=-1",
        "requests=0",
        "tokens=0.4",
        "minutes=0",
        "minutes=" + "9" * 400,
        "requests=" + "9" * 400,
        "dollars=3",
        "tokens=1q",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read|above 0|at least 1"):
        Allowance.parse(text)


def test_a_budget_books_before_and_settles_after() -> None:
    budget = Budget(Allowance(requests=3, tokens=100))
    budget.take(80)
    budget.settle(80, 10)
    budget.take(90)
    with pytest.raises(BudgetSpent, match="100 tokens"):
        budget.take(1)
    assert (budget.requests, budget.tokens) == (2, 100)
    budget.settle(90, 0)
    budget.take(0)
    with pytest.raises(BudgetSpent, match="3 requests"):
        budget.take(0)


def test_a_share_leaves_the_rest_to_others() -> None:
    budget = Budget(Allowance(requests=10, tokens=1_000))
    budget.share(0.3)
    for _ in range(3):
        budget.take(1)
    with pytest.raises(BudgetSpent, match="this probe's share of the budget of 10 requests"):
        budget.take(1)
    assert not budget.spent
    budget.share(1.0)
    for _ in range(7):
        budget.take(1)
    assert budget.spent


def test_a_share_of_the_time_leaves_time_to_others() -> None:
    budget = Budget(Allowance(minutes=1.0))
    budget.share(1.0, 0.0)
    with pytest.raises(BudgetSpent, match="this probe's share of the budget of 1 minutes"):
        budget.take(0)
    assert not budget.spent
    budget.share(1.0)
    budget.take(0)


def test_time_is_part_of_a_budget() -> None:
    budget = Budget(Allowance(minutes=0.0000001))
    with pytest.raises(BudgetSpent, match="minutes"):
        for _ in range(1_000_000):
            budget.take(0)


def test_prompts_have_the_size_that_the_gauge_says() -> None:
    gauge = Gauge({False: 1.0, True: 24.0}, 1.0, "usage")
    draw = random.Random(1)
    assert len(gauge.text(100, draw).split()) == 99
    assert len(gauge.text(100, draw, chat=True).split()) == 76
    assert len(gauge.text(100, draw, head="two words", tail=" end").split()) == 99
    assert gauge.exact and gauge.slack(1_000) == 2
    coarse = Gauge({False: 2.0}, 1.25, "usage")
    assert len(coarse.text(502, draw).split()) == 400 and not coarse.exact and coarse.slack(400) > 10
    assert set(gauge.text(50, draw).split()) <= set(FILLER)


def test_numbers_are_read_out_of_messages() -> None:
    assert numbers_in("maximum context length is 4,096 tokens (you sent 1_000_000)") == [4_096, 1_000_000]
    assert numbers_in("none") == []
