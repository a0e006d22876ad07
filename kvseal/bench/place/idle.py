"""What requests take alone: the measure of limits that are given as multiples, and of what cannot be met at all.

Owns `Idle`. Simulates a few requests of a trace one at a time, with the engine's own scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvseal.bench.place.latency import Latency
from kvseal.bench.place.simulate import Placement, simulate
from kvseal.bench.place.slo import SLO, quantile
from kvseal.bench.place.trace import Trace

IDLE_JOBS = 48
MORE_JOBS = 1_000
"""Looked at when the search has found nothing, and a sample may have been too small to say why."""
IDLE_OUTPUTS = 12
"""Tokens of an idle request that are simulated; the rest takes as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Times of requests alone on an idle worker of the fastest kind."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    tbt_s: tuple[float, ...]
    life_s: float
    refused: int

    def met(self, slo: SLO) -> int:
        """How many meet all limits together."""
        limits = [limit for _, limit in slo.limits()]
        times = zip(self.ttft_s, self.tpot_s, self.tbt_s, strict=True)
        return sum(all(limit is None or value <= limit for value, limit in zip(one, limits, strict=True)) for one in times)

    def typical(self) -> SLO:
        return SLO(ttft_s=quantile(self.ttft_s, 0.5), tpot_s=quantile(self.tpot_s, 0.5), tbt_s=quantile(self.tbt_s, 0.5))


def idle_times(latency: Latency, trace: Trace, chunk_tokens: tuple[int, ...] | None, most_jobs: int = IDLE_JOBS) -> Idle:
    """Some requests of the trace, one at a time, on the kind of worker that is fastest with the first of them."""
    jobs = list(trace.jobs)
    step = max(1, len(jobs) // most_jobs)
    some = [job._replace(blocks=()) for job in jobs[::step][:most_jobs]]
    best: Idle | None = None
    for kind in latency.kinds:
        place = Placement(shared=1, shared_kind=kind, chunk_tokens=max(chunk_tokens or kind.chunk_tokens))
        most_tokens = min(kind.context_tokens, kind.pool_tokens)
        fit = [job for job in some if job.prompt_tokens + job.output_tokens <= most_tokens]
        apart = [job._replace(at_s=1e6 * number, output_tokens=min(IDLE_OUTPUTS, job.output_tokens)) for number, job in enumerate(fit)]
        records = simulate(place, latency, apart).records if fit else []
        lives = [record.ttft_s + (job.output_tokens - 1) * record.tpot_s for record, job in zip(records, fit, strict=True) if record.done]
        records = [record for record in records if record.done]
        idle = Idle(
            ttft_s=tuple(record.ttft_s for record in records),
            tpot_s=tuple(record.tpot_s for record in records),
            tbt_s=tuple(record.tbt_s for record in records),
            life_s=sum(lives) / max(1, len(lives)),
            refused=len(some) - len(records),
        )
        if best is None or (-idle.refused, -idle.life_s) > (-best.refused, -best.life_s):
            best = idle
    if best is None:
        raise ValueError("a latency model has at least one kind")
    return best
