"""One engine in this process: scheduler, cache and runner, one step at a time.

Owns the order of a step: schedule, compute, apply. Used by `engine_process` behind a socket and by the offline `LLM` directly. Never
speaks HTTP, never sleeps, and lets every exception through: who runs the loop decides what a broken engine means (L12).
"""

from __future__ import annotations

from typing import Protocol

from kvseal.core.batch import Batch, BatchResult
from kvseal.core.clock import Clock
from kvseal.core.errors import InvalidRequest
from kvseal.core.events import Event
from kvseal.core.ids import RequestId
from kvseal.core.laws import Law
from kvseal.core.outcome import Refused
from kvseal.core.request import Request
from kvseal.exec.backend import Backend, UInt64
from kvseal.kv.manager import KVManager
from kvseal.node.peer_messages import NodeCard
from kvseal.node.report import EngineStats, StartReport
from kvseal.sched.scheduler import Scheduler


class Computes(Protocol):
    """What the engine needs of `exec.runner.Runner`."""

    def run(self, batch: Batch, ledger_nonces: UInt64) -> BatchResult: ...


class Engine:
    def __init__(
        self, *, report: StartReport, kv: KVManager, scheduler: Scheduler, runner: Computes, backend: Backend, clock: Clock
    ) -> None:
        self.report = report
        self.card: NodeCard | None = None
        """Who it is among several nodes; None by itself."""
        self.kv = kv
        self._scheduler = scheduler
        self._runner = runner
        self._backend = backend
        self._clock = clock
        self._stepped_at_s: float | None = None

    @property
    def has_work(self) -> bool:
        """A request is open, or an event has not been taken."""
        return self._scheduler.has_work

    @property
    def steps(self) -> int:
        """Completed steps."""
        return self._scheduler.counters.steps

    def submit(self, request: Request) -> Refused | None:
        """None: its events come out of `step`. `Refused`: nothing was reserved and no event follows."""
        try:
            request.checked(self.report.vocab_size)
        except InvalidRequest as error:
            return self._scheduler.refuse(error)
        return self._scheduler.submit(request)

    def cancel(self, request_id: RequestId) -> None:
        """No effect when it has ended. The `Cancelled` event comes out of the next `step`."""
        self._scheduler.cancel(request_id)

    def finish(self, request_id: RequestId) -> None:
        """It is complete: its text holds a stop string. No effect when it has ended. The event comes out of the next `step`."""
        self._scheduler.finish(request_id)

    def step(self) -> list[Event]:
        """Computes one batch, if anything can be computed now, and returns what happened since the last call."""
        batch = self._scheduler.schedule()
        if not batch.rows:
            return self._scheduler.take_events()
        result = self._runner.run(batch, self.kv.ledger_nonces)
        events = self._scheduler.apply(result)
        self._stepped_at_s = self._clock.now_s()
        return events

    def stats(self) -> EngineStats:
        usage, counters = self.kv.usage(), self._scheduler.counters
        seals = dict(counters.broken_seals)
        if twins := self.kv.broken_seals[Law.L13]:
            seals[Law.L13.value] = twins
        return EngineStats(
            pages_total=usage.total,
            pages_free=usage.free,
            pages_leased=usage.leased,
            pages_sealed=usage.sealed,
            pages_draining=usage.draining,
            pages_quarantined=usage.quarantined,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            steps=counters.steps,
            last_step_age_s=None if self._stepped_at_s is None else self._clock.now_s() - self._stepped_at_s,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=self._scheduler.output_tokens,
            cached_tokens=counters.cached_tokens,
            queried_tokens=counters.queried_tokens,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            evicted_pages=usage.evicted_total,
            broken_seals=seals,
            outcomes=dict(counters.outcomes),
        )

    def check(self) -> None:
        """Proves conservation and compares every seal with the ledger; raises `LawBroken`. O(pool)."""
        self.kv.check(self._backend.arena.memory)

    def close(self) -> None:
        self._backend.close()
