"""What the scheduler counts, for metrics.

Owns numbers alone. They only grow, and none of them is content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvseal.core.laws import Law


@dataclass(slots=True)
class SchedulerCounters:
    """Counts from the start; read by `node.engine` for its stats."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Sampled tokens of requests that have ended; `Scheduler.output_tokens` adds those of the open ones."""
    queried_tokens: int = 0
    """Prompt tokens looked up in the prefix cache, first admissions only."""
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    broken_seals: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("completed", "refused", "cancelled", "failed"), 0))

    def admitted(self, prompt_tokens: int, cached_tokens: int, *, queried: bool) -> None:
        """For the first time."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.queried_tokens += prompt_tokens if queried else 0

    def broken(self, law: Law) -> None:
        self.broken_seals[law.value] = self.broken_seals.get(law.value, 0) + 1
