"""The waiting line: everybody who holds nothing, in fair order.

Owns the heap of waiting sequences. Leaving it by cancellation costs nothing at that moment; the dead are removed when they surface, or
all at once when they are the majority, so that neither memory nor time is lost to them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvseal.sched.sequence import Sequence

_COMPACT_AT_LEAST = 64


class WaitingLine:
    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, sequence: Sequence) -> None:
        heappush(self._heap, (sequence.key, sequence))

    def first(self) -> Sequence | None:
        """The head of the line, still in it; None when nobody waits."""
        heap = self._heap
        while heap and heap[0][1].ended:
            heappop(heap)
            self._dead -= 1
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        """Takes out what `first` returned."""
        return heappop(self._heap)[1]

    def left(self) -> None:
        """A sequence in the line has just ended."""
        self._dead += 1
        if self._dead > _COMPACT_AT_LEAST and 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].ended]
            heapify(self._heap)
            self._dead = 0
