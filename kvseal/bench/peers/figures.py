"""Medians and ratios.

Owns what is computed from measurements: the median with minimum and maximum, the ratio of KVSeal to a peer taken within each repetition,
and which peer is the best. Pairs, never averages of averages: repetition i of one engine stands against repetition i of the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvseal.bench.peers.machine import Usage


@dataclass(frozen=True, slots=True)
class Measurement:
    """One engine, one scenario, one repetition."""

    engine: str
    scenario: str
    repetition: int
    speed: float
    """Tokens per second; an upper bound when `cut`."""
    usage: Usage
    cut: bool = False
    """It was stopped because it took too long: it is no faster than `speed`."""
    digest: str = ""
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one or more values; `bound` marks a median that is only known to be at least (a ratio) or at most (a speed) this."""

    median: float
    low: float
    high: float
    count: int
    bound: bool = False


def spread(values: Iterable[tuple[float, bool]]) -> Spread | None:
    """Of (value, is a bound). A median that rests on a bound is one. None of nothing."""
    found = list(values)
    if not found:
        return None
    numbers = [value for value, _ in found]
    middle = statistics.median(numbers)
    return Spread(middle, min(numbers), max(numbers), len(numbers), any(bound for _, bound in found))


class Results:
    """All measurements of a run, looked up by engine and scenario."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self.measurements = list(measurements)

    def of(self, engine: str, scenario: str) -> list[Measurement]:
        return [each for each in self.measurements if each.engine == engine and each.scenario == scenario]

    def speed(self, engine: str, scenario: str) -> Spread | None:
        return spread((each.speed, each.cut) for each in self.of(engine, scenario))

    def ratio(self, ours: str, peer: str, scenario: str) -> Spread | None:
        """KVSeal's speed over the peer's, per repetition that both have. A peer that was stopped gives a lower bound."""
        theirs = {each.repetition: each for each in self.of(peer, scenario)}
        pairs = ((each, theirs[each.repetition]) for each in self.of(ours, scenario) if each.repetition in theirs)
        return spread((one.speed / other.speed, other.cut) for one, other in pairs if other.speed > 0)

    def best(self, engines: Iterable[str], scenario: str) -> str | None:
        """The fastest of these by its median; one whose speed is only bounded is never the best beside one that is known."""
        known = {name: found for name in engines if (found := self.speed(name, scenario)) is not None}
        return max(known, key=lambda name: (not known[name].bound, known[name].median), default=None)

    def differing(self, first: str, second: str) -> list[str]:
        """Scenarios in which two engines gave different tokens for the same prompts."""
        return sorted({one.scenario for one, other in self._compared(first, second) if one.digest != other.digest})

    def compared(self, first: str, second: str) -> int:
        """How many repetitions of two engines both came with their tokens."""
        return len(self._compared(first, second))

    def _compared(self, first: str, second: str) -> list[tuple[Measurement, Measurement]]:
        others = {(each.scenario, each.repetition): each for each in self.of_engine(second) if each.digest}
        return [(one, others[key]) for one in self.of_engine(first) if one.digest and (key := (one.scenario, one.repetition)) in others]

    def of_engine(self, engine: str) -> list[Measurement]:
        return [each for each in self.measurements if each.engine == engine]
