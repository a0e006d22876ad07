"""The scoreboard's data: figures, both sides of each ratio, targets, and whether they are met.

Owns the statistics. A ratio is taken pair by pair, A over B, of measurements that took turns; what counts is the median, shown with its
smallest and largest. A figure without B is judged by A's median. A run in which a request failed has no score: its entry carries the
reason and no values. Never measures and never decides an exit status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

LEAST_PAIRS = 5
"""Fewer are shown but marked: a quick run, not a figure to quote."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison, all its measurements in order."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def middle(self) -> float:
        return median(self.values)


@dataclass(frozen=True, slots=True)
class Target:
    """What the score must be: at least `low`, at most `high`; None leaves that end open."""

    low: float | None = None
    high: float | None = None

    def met(self, score: float) -> bool:
        return (self.low is None or score >= self.low) and (self.high is None or score <= self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the scoreboard."""

    figure: str
    """Its number in the performance notes: "1", "13", "growth"."""
    name: str
    a: Side | None = None
    b: Side | None = None
    target: Target | None = None
    checked: str = ""
    """What was found equal before the ratio counts, e.g. "outputs of 60 requests equal, token for token"."""
    note: str = ""
    no_score: str = ""
    """Why there is none: a request failed, outputs differ, or something it needs is not there."""

    def __post_init__(self) -> None:
        if self.no_score:
            return
        if self.a is None or not self.a.values:
            raise ValueError(f"figure {self.figure}, {self.name}: neither values nor a reason why there are none")
        if self.b is not None and (len(self.b.values) != len(self.a.values) or min(self.b.values) <= 0):
            raise ValueError(f"figure {self.figure}, {self.name}: a ratio needs pairs, and a B above zero")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Pair by pair; without B, A's values."""
        if self.a is None or self.no_score:
            return ()
        return self.a.values if self.b is None else tuple(a / b for a, b in zip(self.a.values, self.b.values, strict=True))

    @property
    def score(self) -> float | None:
        return median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """None: nothing to meet, or no score."""
        return None if self.target is None or self.score is None else self.target.met(self.score)

    @property
    def verdict(self) -> str:
        if self.no_score:
            return "no score"
        return {True: "met", False: "MISSED", None: ""}[self.met]

    @property
    def is_short(self) -> bool:
        """A ratio of fewer pairs than the protocol asks for."""
        return self.b is not None and 0 < len(self.ratios) < LEAST_PAIRS


@dataclass(frozen=True, slots=True)
class Line:
    """A named line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over an axis of powers of two. `marks` are horizontal lines with a name."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one benchmark found."""

    name: str
    """Its command: ``kvseal bench NAME``."""
    title: str
    entries: Sequence[Entry]
    plots: Sequence[Plot] = ()
    settings: dict[str, str] = field(default_factory=dict)
    """Model, dtypes, threads, sizes: what must be known to read the figures."""
    remarks: Sequence[str] = ()
    seconds: float = 0.0
    other_cores: float | None = None
    """Cores that other processes used meanwhile; above `peers.machine.LOUD_CORES` the figures are not to be quoted."""


def missing(figure: str, name: str, why: str, target: Target | None = None) -> Entry:
    """A line that says why it has no score."""
    return Entry(figure=figure, name=name, target=target, no_score=why)


def figure_order(entry: Entry) -> tuple[int, str]:
    """Figures by number, then those with a name."""
    return (int(entry.figure), "") if entry.figure.isdigit() else (1_000, entry.figure)
