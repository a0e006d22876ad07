"""The waiting line: everybody who holds nothing, in fair order.

Owns the heap of waiting sequences. Leaving it from the middle costs nothing at that moment; dead entries are removed when they surface, or
all at once when they are the majority, so that neither memory nor time is lost to them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvseal.core.errors import Overloaded
from kvseal.sched.company import Company
from kvseal.sched.sequence import Sequence

_COMPACT_AT_LEAST = 64


class WaitingLine:
    def __init__(self, page_tokens: int) -> None:
        self.company = Company(page_tokens)
        self.tokens = 0
        """Of all who wait."""
        self._heap: list[tuple[tuple[int, int], int, Sequence]] = []
        """With the number of the entry; one that is not its sequence's own any more is dead."""
        self._entries = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, sequence: Sequence) -> None:
        self._entries += 1
        sequence.line_entry = self._entries
        self.tokens += len(sequence.tokens)
        self.company.enter(sequence)
        heappush(self._heap, (sequence.key, self._entries, sequence))

    def first(self) -> Sequence | None:
        """The head of the line, still in it; None when nobody waits."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].line_entry:
            heappop(heap)
            self._dead -= 1
        return heap[0][2] if heap else None

    def take(self, sequence: Sequence) -> None:
        """It leaves the line, from wherever it stands."""
        sequence.line_entry = 0
        self.tokens -= len(sequence.tokens)
        self.company.leave(sequence)
        self._dead += 1
        if self._dead > _COMPACT_AT_LEAST and 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].line_entry]
            heapify(self._heap)
            self._dead = 0


class Pace:
    """How fast requests end, for an honest Retry-After."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._interval_s: float | None = None

    def ended(self, now_s: float) -> None:
        if self._last_s is not None:
            interval_s = now_s - self._last_s
            self._interval_s = interval_s if self._interval_s is None else 0.9 * self._interval_s + 0.1 * interval_s
        self._last_s = now_s

    def seconds_for(self, waiting: int) -> float:
        """Until a tenth of the line has moved, from 1 to 60 s."""
        interval_s = self._interval_s or 0.0
        return min(60.0, max(1.0, interval_s * waiting / 10))

    def overloaded(self, waiting: int, max_queued: int) -> Overloaded:
        retry_after_s = self.seconds_for(waiting)
        why = f"{waiting} requests wait already and the line holds {max_queued}; try again in {retry_after_s:.0f} s"
        return Overloaded(why, retry_after_s=retry_after_s)
