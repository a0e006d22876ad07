"""The arithmetic of fairness and admission, against plain models of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvseal.sched import policy

priorities = st.integers(-20, 20)


@given(st.lists(priorities, min_size=2, max_size=60))
def test_nobody_is_overtaken_more_often_than_stated(arrivals: list[int]) -> None:
    clamped = [max(-policy.MAX_PRIORITY, min(policy.MAX_PRIORITY, one)) for one in arrivals]
    keys = [policy.order_key(at, one) for at, one in enumerate(arrivals)]
    assert len(set(keys)) == len(keys)
    for early in range(len(keys)):
        passed = [late for late in range(early + 1, len(keys)) if keys[late] < keys[early]]
        for late in passed:
            assert clamped[late] < clamped[early]
            assert late - early <= policy.AGEING_ARRIVALS * (clamped[early] - clamped[late])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 80)), max_size=12))
def test_peak_growth_is_that_of_a_step_by_step_model(forecasts: list[tuple[int, int]]) -> None:
    worst = 0
    for step in range(51):
        slots = 0
        for remaining, held in forecasts:
            slots += step if step <= remaining else -held
        # At the step of its end a sequence has grown and not given back yet.
        worst = max(worst, slots)
    assert policy.peak_growth_tokens(forecasts) == worst


@given(st.lists(st.integers(1, 2_000), max_size=700), st.integers(0, 3_000), st.integers(1, 4_000), st.integers(1, 10_000))
def test_forecast_stays_within_what_is_possible(lengths: list[int], produced: int, most: int, arrival: int) -> None:
    history = policy.LengthHistory()
    for length in lengths:
        history.add(length)
    assert history._sorted == sorted(history._recent)
    assert len(history._recent) <= policy.HISTORY_LENGTHS
    remaining = history.remaining(produced, most, arrival)
    assert 1 <= remaining <= most


def test_forecast_learns() -> None:
    history = policy.LengthHistory()
    for _ in range(policy.HISTORY_LENGTHS + 5):
        history.add(100)
    assert {history.remaining(0, 9_999, arrival) for arrival in range(50)} == {100}
    assert history.remaining(60, 9_999, 3) == 40
    assert history.remaining(60, 7, 3) == 7
    assert history.remaining(150, 9_999, 3) == 150  # longer than all: expected to double


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.sampled_from([1, 4]))
def test_shared_tokens_is_the_plain_comparison(one: list[int], other: list[int], page_tokens: int) -> None:
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    assert policy.shared_tokens(one, other, page_tokens) == common // page_tokens * page_tokens


def test_shared_tokens_finds_the_page_of_the_first_difference() -> None:
    one = list(range(100))
    for at in range(100):
        other = [*one[:at], -1, *one[at + 1 :]]
        assert policy.shared_tokens(one, other, 8) == at // 8 * 8


def test_a_wait_must_be_worth_it() -> None:
    assert policy.worth_sharing(64, 48) and not policy.worth_sharing(64, 56) and not policy.worth_sharing(8, 0)
