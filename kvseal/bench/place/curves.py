"""Attainment of a pool of workers over the rate of requests, simulated where it is asked for and kept.

Owns the curves and the hunt for the highest rate that passes. Never judges placements (`search` does).
"""

from __future__ import annotations

import math
from collections.abc import Callable

GRID = 1.08
"""Rates of curves are powers of it."""
FARTHEST = 400
"""Powers of a grid below a guess that are looked at; a rate so low passes nowhere else."""


class Curve:
    """`most_rate`: where a run would be too short to say anything; if it passes there, that is the figure."""

    def __init__(self, run: Callable[[float], float], most_rate: float) -> None:
        self._run = run
        self._known: dict[int, float] = {}
        self._most = math.floor(math.log(most_rate, GRID))

    def at_grid(self, power: int) -> float:
        if power not in self._known:
            self._known[power] = self._run(GRID**power)
        return self._known[power]

    def goodput(self, target: float, guess: float) -> float:
        """The highest rate with at least `target`; 0 if there is none near enough to `guess`."""
        power = highest(lambda power: self.at_grid(power) >= target, round(math.log(guess, GRID)), self._most)
        if power is None:
            return 0.0
        if power >= self._most:
            return float(GRID**power)
        below, above = self.at_grid(power), self.at_grid(power + 1)
        share = (below - target) / (below - above) if below > above else 0.0
        return float(GRID ** (power + min(1.0, share)))

    def reaches(self, target: float, rate: float) -> bool:
        """Whether the grid point below `rate` passes."""
        return rate > 0 and self.at_grid(min(self._most, math.floor(math.log(rate, GRID)))) >= target


def highest(test: Callable[[int], bool], guess: int, most: int, *, first: int = 4) -> int | None:
    """The highest whole number up to `most` that passes a test that all lower ones pass, sought from `guess` outwards; None if none."""
    guess = min(guess, most)
    step, least = first, guess - FARTHEST
    if test(guess):
        low = guess
        while True:
            if low == most:
                return most
            high = min(most, low + step)
            if not test(high):
                break
            low, step = high, 2 * step
    else:
        high = guess
        while True:
            low = high - step
            if low < least:
                return None
            if test(low):
                break
            high, step = low, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if test(middle) else (low, middle)
    return low
