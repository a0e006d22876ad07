"""When open requests must be complete.

Owns `Deadlines`, a heap of them. Those of ended requests are skipped when they surface, and removed together when they are the majority.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from kvseal.sched.sequence import Sequence

_COMPACT_AT_LEAST = 64


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, sequence: Sequence) -> None:
        heappush(self._heap, (at_s, sequence.arrival, sequence))

    def passed(self, now_s: float, open_requests: int) -> Iterator[Sequence]:
        """Takes out the open sequences whose time has come."""
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            sequence = heappop(heap)[2]
            if not sequence.ended:
                yield sequence
        if len(heap) > _COMPACT_AT_LEAST and len(heap) > 2 * open_requests:
            self._heap = [entry for entry in heap if not entry[2].ended]
            heapify(self._heap)
