"""Requests that wait at the router until a node that can answer them has room.

Owns their order: that of the scheduler (`sched.policy.order_key`), so that nobody waits for ever. A prompt is computed only when its pages
have somewhere to go: what is computed too early would hold pages on one node and time out on the other.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvseal.node.split_request import SplitRequest
from kvseal.sched.policy import order_key


class RouterLine:
    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], SplitRequest]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(not one.ended for _, one in self._heap)

    def push(self, one: SplitRequest) -> None:
        self._arrivals += 1
        heappush(self._heap, (order_key(self._arrivals, one.request.priority), one))

    def first(self) -> SplitRequest | None:
        """The next one, still in line. Those that have ended meanwhile leave it here."""
        while self._heap and self._heap[0][1].ended:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Takes out what `first` returned."""
        heappop(self._heap)
