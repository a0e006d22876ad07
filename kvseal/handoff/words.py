"""How the hand-offs of a node end, and what is counted of them.

Owns `End` and `Counters`, used by both ends.
"""

from __future__ import annotations

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

    def count(self, outcome: Outcome) -> None:
        if isinstance(outcome, Delivered):
            self.delivered += 1
        else:
            self.failed[outcome.reason.value] += 1
