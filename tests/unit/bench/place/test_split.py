"""Goodput from measured shares, and what ``kvseal bench split`` shows of ways that were measured, or not, or meet no limit."""

from __future__ import annotations

import math

import pytest

from kvseal.bench.place.latency import Latency
from kvseal.bench.split import CASES, CHUNKED, MOST_RATES, SPLIT, WHOLE, entries_of, goodput, looked_for, plot_of, predicted


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ((), 0.0),
        (((1.0, 0.5),), 0.0),
        (((1.0, 0.9),), 1.0),
        (((1.0, 1.0), (2.0, 0.8)), 1.5),
        (((1.0, 0.5), (2.0, 1.0)), 0.0),
        (((1.0, 1.0), (2.0, 1.0), (4.0, 0.0)), 2.2),
    ],
)
def test_goodput_lies_between_the_last_that_passed_and_the_first_that_did_not(points: tuple[tuple[float, float], ...], rate: float) -> None:
    assert goodput(points) == pytest.approx(rate)


@pytest.mark.parametrize("best", [0.02, 0.3, 0.9, 1.0, 3.0])
def test_each_way_finds_its_own_goodput_from_wherever_it_begins(best: float) -> None:
    points = looked_for(lambda rate: 1.0 if rate <= best else 0.3, 1.0, lambda: 0.0)
    assert len(points) <= MOST_RATES and list(points) == sorted(points)
    if best > 1 / 2**MOST_RATES:
        assert best / 1.5 <= goodput(points) <= best * 1.5, points


def test_what_there_is_no_time_for_is_not_tried_and_how_far_it_went_is_said(latency: Latency) -> None:
    points = looked_for(lambda rate: 0.1, 1.0, lambda: 0.3)
    assert [rate for rate, _ in points] == [0.3, 0.5, 1.0]
    lowest = iter([0.1, 0.6, math.inf])
    assert looked_for(lambda rate: 0.1, 1.0, lambda: next(lowest)) == ((0.6, 0.1), (1.0, 0.1))
    lowest = iter([0.1, 0.1, 0.8])
    assert looked_for(lambda rate: float(rate < 0.6), 1.0, lambda: next(lowest)) == ((0.5, 1.0), (1.0, 0.0)), "0.71 would take too long"
    assert looked_for(lambda rate: 1.0, 1.0, lambda: math.inf) == ()
    case = CASES[0]
    ways, _ = predicted(latency, case, 20)
    entries = {entry.name: entry for entry in entries_of(case, ways, {SPLIT: ((1.0, 1.0), (2.0, 0.8)), WHOLE: points})}
    said = entries[f"goodput measured, {case.name}, split / {WHOLE}"].no_score
    assert f"{SPLIT} kept the limits up to 1.5 req/s" in said and f"{WHOLE} kept them at no rate from 0.3 to 1 req/s" in said


def test_what_is_shown(latency: Latency) -> None:
    case = CASES[0]
    ways, why = predicted(latency, case, 20)
    assert {way.name for way in ways} == {SPLIT, CHUNKED, WHOLE} and not why
    found = {SPLIT: ((1.0, 1.0), (2.0, 0.8)), WHOLE: ((1.0, 0.95), (2.0, 0.0))}
    entries = {entry.name: entry for entry in entries_of(case, ways, found)}
    measured = entries[f"goodput measured, {case.name}, split / {WHOLE}"]
    assert measured.a is not None and measured.a.values == (1.5,) and "100% at 1" in measured.note
    assert f"goodput measured, {case.name}, split / {CHUNKED}" not in entries, "it was not measured"
    nothing = {SPLIT: ((1.0, 0.2),), WHOLE: ((1.0, 0.2),)}
    assert "no rate from 1 to 1" in {entry.name: entry for entry in entries_of(case, ways, nothing)}[measured.name].no_score
    lines = {line.name: line.dashed for line in plot_of(latency, case, ways, found).lines}
    assert lines == {SPLIT: False, WHOLE: False, **{f"{name}, simul.": True for name in (SPLIT, CHUNKED, WHOLE)}}
