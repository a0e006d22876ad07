"""How far admission gets with little memory, counted in an event model on a published trace. Speed itself is `kvseal.bench.scheduler`'s."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvseal.bench import admission


@dataclass(frozen=True)
class Window:
    load: list[admission.Lengths]
    unlimited: float


@pytest.fixture(scope="module")
def windows(shared: Path) -> list[Window]:
    found = []
    for skip in (0, 900):
        load = admission.first_turns(shared / "traces" / "sharegpt-lengths.jsonl", skip=skip)
        everything = sum(one.total_tokens + admission.PAGE_TOKENS for one in load)
        found.append(Window(load, admission.paged(load, everything).rate))
    return found


def test_known_lengths_lose_nothing_to_memory(windows: list[Window]) -> None:
    for window in windows:
        paged = admission.paged(window.load, admission.SLOTS, forced=True)
        longest = admission.reserved(window.load, admission.SLOTS, longest_tokens=admission.LONGEST_TOKENS)
        oracle = admission.reserved(window.load, admission.SLOTS, longest_tokens=None)
        assert paged.rate >= 0.95 * window.unlimited  # figure 2
        assert paged.rate >= 1.0 * oracle.rate and paged.waste <= 0.035  # figure 1
        assert paged.rate >= 1.9 * longest.rate


def test_unknown_lengths_do_not_thrash(windows: list[Window]) -> None:
    ratios = []
    for window in windows:
        paged = admission.paged(window.load, admission.SLOTS)
        ratios.append(paged.rate / window.unlimited)
        assert paged.preemptions <= 15 and paged.waste <= 0.035
    assert sum(ratios) / len(ratios) >= 0.95 and min(ratios) >= 0.92
