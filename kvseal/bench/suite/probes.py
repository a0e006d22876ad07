"""Rates: work per second of a call, and what memory and arithmetic of this machine give at most.

Owns the timing loops that kernel benchmarks share. Times are wall time: what is measured keeps its threads busy by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from kvseal import _native


def per_second(call: Callable[[], float], seconds: float) -> float:
    """Work per second of calls that each return how much work they did, for at least so long."""
    work, began_s, spent_s = 0.0, time.perf_counter(), 0.0
    while spent_s < seconds:
        work += call()
        spent_s = time.perf_counter() - began_s
    return work / spent_s


def read_rate(probe: _native.ReadProbe, threads: int, seconds: float) -> float:
    """GB/s of plain reads of the probe's memory: median over passes for at least so long."""
    rates: list[float] = []
    began_s = time.perf_counter()
    while not rates or time.perf_counter() - began_s < seconds:
        rates.append(probe.read(threads))
    return median(rates)
