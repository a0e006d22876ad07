"""The scheduler of a node that hands pages over or takes them: pages may be held by a hand-off, and come back when it ends.

Owns that one difference. A prompt that another node computes is not known here while its pages arrive: `node.handoff_engine` keeps the
request, and submits it when the receipt is complete (it then finds its pages in the prefix cache) or when the hand-off has failed (it is
computed here). So no sequence ever holds pages that are not its own to write (L9, L11).
"""

from __future__ import annotations

from kvseal.sched.scheduler import Scheduler


class HandoffScheduler(Scheduler):
    """`Scheduler`, told of what is held elsewhere."""

    held_elsewhere: bool = False
    """Whether a hand-off holds pages now. Then nobody fails for want of pages: they come back within the hand-off's deadline."""

    def _pages_come_back(self) -> bool:
        return self.held_elsewhere or super()._pages_come_back()
