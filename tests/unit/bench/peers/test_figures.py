"""Medians, pairwise ratios, the best peer, and bounds that stay bounds."""

from __future__ import annotations

import pytest

from kvseal.bench.peers.figures import Measurement, Results, spread
from kvseal.bench.peers.machine import Usage

QUIET = Usage(wall_s=1.0, own_cores=2.0, others_cores=0.0)


def measured(engine: str, *speeds: float, scenario: str = "batch", cut: bool = False, digest: str = "") -> list[Measurement]:
    return [Measurement(engine, scenario, index, speed, QUIET, cut, digest) for index, speed in enumerate(speeds)]


def test_a_ratio_is_taken_within_each_repetition() -> None:
    """A machine that slows down for one repetition slows both: 30/10, 3/1, 20/5, whatever the medians' ratio is."""
    results = Results([*measured("ours", 30, 3, 20), *measured("peer", 10, 1, 5)])
    ratio = results.ratio("ours", "peer", "batch")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high, ratio.count) == (3.0, 3.0, 4.0, 3)


def test_a_repetition_that_one_side_lacks_makes_no_pair() -> None:
    results = Results([*measured("ours", 30, 40), *measured("peer", 10)])
    ratio = results.ratio("ours", "peer", "batch")
    assert ratio is not None and (ratio.median, ratio.count) == (3.0, 1)
    assert results.ratio("ours", "peer", "single") is None
    assert results.ratio("ours", "nobody", "batch") is None


def test_a_stopped_peer_gives_a_bound_and_is_not_the_best() -> None:
    results = Results([*measured("ours", 100), *measured("slow", 20, cut=True), *measured("known", 10)])
    ratio = results.ratio("ours", "slow", "batch")
    assert ratio is not None and ratio.bound and ratio.median == 5.0
    assert results.best(["slow", "known"], "batch") == "known"
    assert results.best(["slow"], "batch") == "slow"
    assert results.best([], "batch") is None


@pytest.mark.parametrize(("values", "median"), [([3.0], 3.0), ([1.0, 5.0], 3.0), ([9.0, 1.0, 2.0], 2.0)])
def test_spread(values: list[float], median: float) -> None:
    found = spread((value, False) for value in values)
    assert found is not None
    assert (found.median, found.low, found.high, found.count, found.bound) == (median, min(values), max(values), len(values), False)


def test_no_values_no_spread() -> None:
    assert spread([]) is None


def test_different_tokens_are_found_and_missing_ones_are_not_compared() -> None:
    results = Results(
        [
            *measured("server", 1, 1, digest="a"),
            *measured("process", 1, digest="a"),
            *measured("server", 1, scenario="single", digest="b"),
            *measured("process", 1, scenario="single", digest="c"),
            *measured("process", 1, scenario="prefill"),
            *measured("server", 1, scenario="prefill"),
        ]
    )
    assert results.differing("server", "process") == ["single"]
    assert results.compared("server", "process") == 2
