"""Figures 1, 2 and 7 of the performance notes, on the shared trace and with margins for a busy machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvseal.bench import admission
from kvseal.bench.scheduler import microseconds_per_request


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


def call_us() -> float:
    """What calling a Python function costs here and now: a yardstick that a busy machine and a tracer stretch as well."""

    def nothing(value: object) -> object:
        return value

    began = time.thread_time_ns()
    for at in range(50_000):
        nothing(at)
    return (time.thread_time_ns() - began) / 50_000 / 1_000


def test_a_step_costs_microseconds_whatever_runs_and_waits() -> None:
    few = min(microseconds_per_request(16, rounds=5) / call_us() for _ in range(3))
    many = min(microseconds_per_request(128, rounds=3) / call_us() for _ in range(3))
    crowded = min(microseconds_per_request(128, waiting=5_000, rounds=3) / call_us() for _ in range(2))
    assert max(few, many, crowded) <= 150  # about 60 on a quiet machine, 2.5 us
    assert crowded <= 1.6 * many
