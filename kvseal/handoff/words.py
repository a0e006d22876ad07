"""How the hand-offs of a node end, and what is counted of them.

Owns `End` and `Counters`, used by both ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from kvseal.handoff.session import Delivered, Outcome
from kvseal.kv.manager import Grant


@dataclass(frozen=True, slots=True)
class End:
    """A hand-off is over. At the receiver, when delivered, `grant` holds the pages, valid, and published if full; whoever takes this goes
    on with it, or drops it."""

    handoff: str
    outcome: Outcome
    grant: Grant | None = None


SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, float("inf"))
"""Upper bounds of what `Counters.seconds` counts."""


@dataclass(slots=True)
class Counters:
    """For metrics."""

    delivered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By `Reason` value."""
    pages: int = 0
    """Moved and checked."""
    bytes: int = 0
    ignored_messages: int = 0
    """Of hand-offs or incarnations that are not, or not any more."""
    quarantined_pages: int = 0
    """Now, because a transport could not say that it is quiet."""
    readmitted_pages: int = 0
    """Back from that quarantine, on proof."""
    resets: int = 0
    """How often the transport was torn down to get proof: each is an alarm."""
    fences: int = 0
    """How often the transport was asked whether it is quiet."""
    fence_waits: int = 0
    """How often it could not say so."""
    fence_s: float = 0.0
    """What the asking took."""
    seconds: list[int] = field(default_factory=lambda: [0] * len(SECONDS))
    """At the receiver: from Intent to receipt, by `SECONDS`. The prompt is computed meanwhile."""
    seconds_sum: float = 0.0

    def took(self, seconds: float) -> None:
        """A hand-off that was delivered."""
        self.seconds[bisect_left(SECONDS, seconds)] += 1
        self.seconds_sum += seconds

    def histogram(self) -> tuple[tuple[float, int], ...]:
        """Upper bound, and how many above the one before."""
        return tuple(zip(SECONDS, self.seconds, strict=True))

    def count(self, outcome: Outcome) -> None:
        if isinstance(outcome, Delivered):
            self.delivered += 1
        else:
            self.failed[outcome.reason.value] += 1
