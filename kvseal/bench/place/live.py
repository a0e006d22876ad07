"""The real engine under a load of the simulator: same requests, same arrivals, same records, real steps.

Owns the clock that skips idle time: steps take what they take, and where nothing can be computed until the next arrival, it comes at once.
So a run lasts as long as the engine is busy, and what a request waits for is what it would wait for on a server. Never simulates.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

from kvseal.bench.place.instance import step_of
from kvseal.bench.place.latency import Step
from kvseal.bench.place.slo import Record
from kvseal.bench.place.tally import Tally
from kvseal.bench.place.trace import Job
from kvseal.core.batch import Batch, BatchResult
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Completed
from kvseal.core.request import Request, SamplingParams
from kvseal.exec.backend import UInt64
from kvseal.node.engine import Computes, Engine

ROUNDING_S = 1e-6
"""A request comes this much early rather than be waited for by a clock that has just been set to its time."""


class StepTimer:
    """Stands between scheduler and runner, and keeps what each step was and how long it took."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self.steps: list[tuple[Step, float]] = []
        self._timer = timer
        self._inner: Computes | None = None

    def around(self, inner: Computes) -> Computes:
        self._inner = inner
        return self

    def run(self, batch: Batch, ledger_nonces: UInt64) -> BatchResult:
        if self._inner is None:
            raise RuntimeError("the timer has no runner yet")
        began_s = self._timer()
        result = self._inner.run(batch, ledger_nonces)
        self.steps.append((step_of(batch), self._timer() - began_s))
        return result


class SkippingClock:
    """Seconds of `timer`, and those that were skipped."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._skipped_s = -timer()

    def now_s(self) -> float:
        return self._timer() + self._skipped_s

    def skip_to(self, at_s: float) -> None:
        """No effect if it is later than that already."""
        self._skipped_s += max(0.0, at_s - self.now_s())


def run_live(engine: Engine, clock: SkippingClock, jobs: Sequence[Job], *, seed: int = 0) -> list[Record]:
    """All jobs to their ends, their times counted from now. Outputs are as long as the jobs say; prompts share what `blocks` say."""
    chance = random.Random(seed)
    scope, start_s = Scope(os.urandom(16)), clock.now_s()
    tally = Tally(jobs, None, None)
    texts: dict[int, tuple[int, ...]] = {}
    requests = [_request(index, job, scope, _prompt(job, chance, texts)) for index, job in enumerate(jobs)]
    come = 0
    while come < len(jobs) or engine.has_work:
        if not engine.has_work:
            clock.skip_to(start_s + jobs[come].at_s)
        now_s = clock.now_s() - start_s + ROUNDING_S
        while come < len(jobs) and jobs[come].at_s <= now_s:
            if engine.submit(requests[come]) is not None:
                tally.refused(come)
            come += 1
        events = engine.step()
        now_s = clock.now_s() - start_s
        for event in events:
            index = int(event.request_id.rsplit("-", 1)[1])
            if isinstance(event, TokensEvent):
                tally.tokens(index, now_s, len(event.tokens))
            elif not isinstance(event.outcome, Completed):
                tally.refused(index)
    return tally.records


def _prompt(job: Job, chance: random.Random, texts: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    if not job.blocks:
        return _tokens(chance, job.prompt_tokens)
    tokens: list[int] = []
    for block in job.blocks:
        if block not in texts:
            texts[block] = _tokens(chance, job.block_tokens)
        tokens += texts[block]
    return tuple(tokens[: job.prompt_tokens])


def _tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(100, 40_000) for _ in range(count))


def _request(index: int, job: Job, scope: Scope, prompt: tuple[int, ...]) -> Request:
    return Request(
        request_id=RequestId(f"live-{scope.hex()[:8]}-{index}"),
        prompt_tokens=prompt,
        max_output_tokens=job.output_tokens,
        scope=scope,
        sampling=SamplingParams(temperature=0.0),
    )
