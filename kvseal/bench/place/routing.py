"""Which workers a simulated request goes to: the router's own choice, fed with what a router would know.

Owns the counting of outstanding work, as `node.fleet` counts it, and of the prefixes that each worker has been given. The choice itself is
`node.placement.place`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvseal.bench.place.trace import Job
from kvseal.node.placement import Candidate, place


class Worker(Protocol):
    name: str
    outstanding_tokens: int


class Routing:
    """`front` compute prompts, `back` answer; colocated workers are `back` alone. Workers have names of their own."""

    def __init__(self, front: Sequence[Worker], back: Sequence[Worker], *, direct_tokens: int) -> None:
        self._front = front
        self._back = back
        self._direct_tokens = direct_tokens
        self._named = {worker.name: worker for worker in (*front, *back)}
        self._holds: dict[str, set[int]] = {name: set() for name in self._named}

    def choose(self, job: Job) -> tuple[Worker | None, Worker | None]:
        """The worker for the prompt (None: the one that answers computes it) and the one that answers (None: nothing is left to do)."""
        if not job.blocks:
            return self._least(job)
        fronts, backs = [self._seen(one, job) for one in self._front], [self._seen(one, job) for one in self._back]
        outputs = job.output_tokens if backs else 1
        found = place(job.prompt_tokens, outputs, fronts, backs, direct_tokens=self._direct_tokens)
        if found is None:
            return None, None
        front = self._named[found.prefill] if found.prefill else None
        back = self._named[found.decode] if found.decode else None
        for worker in (front, back):
            if worker is not None:
                self._holds[worker.name].update(job.blocks)
        return front, back

    def _least(self, job: Job) -> tuple[Worker | None, Worker | None]:
        """What `place` chooses where nothing is known of prefixes, without the asking."""
        back = min(self._back, key=_outstanding, default=None)
        if self._front and (back is None or job.output_tokens == 1):
            return min(self._front, key=_outstanding), None
        if not self._front or job.prompt_tokens <= self._direct_tokens:
            return None, back
        return min(self._front, key=_outstanding), back

    def _seen(self, worker: Worker, job: Job) -> Candidate:
        holds = self._holds[worker.name]
        known = next((count for count, block in enumerate(job.blocks) if block not in holds), len(job.blocks)) * job.block_tokens
        return Candidate(worker.name, worker.outstanding_tokens, known, known)


def _outstanding(worker: Worker) -> int:
    return worker.outstanding_tokens


def answer_work(job: Job) -> int:
    """What a request costs the worker that answers it, as the router counts it before it knows how long the answer gets."""
    return job.prompt_tokens + min(job.output_tokens, job.prompt_tokens + 256)
