"""Goodput from measured shares, and what ``kvseal bench split`` shows of ways that were measured, or not, or meet no limit."""

from __future__ import annotations

import pytest

from kvseal.bench.place.latency import Latency
from kvseal.bench.split import CASES, CHUNKED, SPLIT, WHOLE, entries_of, goodput, plot_of, predicted


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
    assert "no rate" in {entry.name: entry for entry in entries_of(case, ways, nothing)}[measured.name].no_score
    lines = {line.name: line.dashed for line in plot_of(latency, case, ways, found).lines}
    assert lines == {SPLIT: False, WHOLE: False, **{f"{name}, simul.": True for name in (SPLIT, CHUNKED, WHOLE)}}
