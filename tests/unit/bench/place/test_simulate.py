"""Simulated placements: exact times of small loads, the fast model against the scheduler, and loads that do not fit."""

from __future__ import annotations

import math

import pytest

from kvseal.bench.place.fast import simulate_fast
from kvseal.bench.place.instance import WHOLE_TOKENS
from kvseal.bench.place.latency import Latency, Step, WorkerKind
from kvseal.bench.place.simulate import Outcome, Placement, simulate
from kvseal.bench.place.slo import SLO, attainment, quantile
from kvseal.bench.place.trace import Job, Trace

from .conftest import COST, kind_of, latency_of


def shared(kind: WorkerKind, count: int = 1, chunk_tokens: int = 512) -> Placement:
    return Placement(shared=count, shared_kind=kind, chunk_tokens=chunk_tokens)


def split(kind: WorkerKind, prefill: int = 1, decode: int = 1, chunk_tokens: int = WHOLE_TOKENS) -> Placement:
    return Placement(prefill=prefill, prefill_kind=kind, decode=decode, decode_kind=kind, chunk_tokens=chunk_tokens)


def test_one_request_takes_what_its_steps_take(latency: Latency, kind: WorkerKind) -> None:
    (record,) = simulate(shared(kind), latency, [Job(2.0, 100, 3)]).records
    first = COST.step_s(Step(1, 64, 32.5 * 64, 0, 0, 0)) + COST.step_s(Step(1, 36, (64 + 18.5) * 36, 0, 0, 1))  # the first step is careful
    decode = sum(COST.step_s(Step(0, 0, 0.0, 1, context, 1)) for context in (101, 102))
    assert record.ttft_s == pytest.approx(first)
    assert record.tpot_s == pytest.approx(decode / 2)
    assert record.produced == 3 and record.done


def test_a_split_request_waits_for_its_hand_off(kind: WorkerKind) -> None:
    latency = latency_of(kind, handoff_step_s=0.25)
    (record,) = simulate(split(kind), latency, [Job(0.0, 100, 3)]).records
    decode = sum(COST.step_s(Step(0, 0, 0.0, 1, context, 1)) for context in (101, 102))
    assert record.tpot_s == pytest.approx((latency.handoff_s(100) + decode) / 2)  # the first token came with the pages
    assert latency.handoff_s(100) == pytest.approx(0.25 + 100 * 23_040 / 4e9)


def test_short_prompts_are_not_handed_over(kind: WorkerKind) -> None:
    latency = latency_of(kind, handoff_step_s=100.0)
    near, far = simulate(split(kind), latency, [Job(0.0, 64, 4), Job(0.0, 65, 4)]).records
    assert near.last_s < 10 < 100 < far.last_s


PLACEMENTS = {
    "colocated, chunks": shared(kind_of(), 1, 256),
    "colocated, whole": shared(kind_of(), 2, 8_192),
    "few at once": shared(kind_of(max_running=3), 1, 128),
    "no target of time": shared(kind_of(step_s=None), 2, 2_048),
    "split": split(kind_of(), 1, 1),
    "split, chunks": split(kind_of(), 2, 3, 128),
    "pipeline": shared(kind_of(stages=2, width=2), 1, 512),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_fast_model_is_the_scheduler(name: str, mixed: Trace) -> None:
    """Where memory suffices and prompts share nothing, step by step."""
    place = PLACEMENTS[name]
    latency = latency_of(*(kind for _, _, kind in place.groups()))
    jobs = mixed.at_rate(0.9 * place.workers, 60, poisson=True, seed=3)
    real, fast = simulate(place, latency, jobs), simulate_fast(place, latency, jobs)
    assert real.steps == fast.steps and real.ended_s == pytest.approx(fast.ended_s)
    for one, other in zip(real.records, fast.records, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s, rel=1e-4)
        assert one.tpot_s == pytest.approx(other.tpot_s, rel=1e-4)
        assert one.tbt_s == pytest.approx(other.tbt_s, rel=0.01, abs=1e-4)  # a run of steps is counted with the mean of its gaps


def test_the_fast_model_is_near_where_memory_is_short(mixed: Trace) -> None:
    kind = kind_of(pool_tokens=4_096, context_tokens=4_096)
    latency = latency_of(kind)
    jobs = mixed.at_rate(1.2, 80, poisson=True, seed=1)
    outcomes = [run(shared(kind), latency, jobs) for run in (simulate, simulate_fast)]
    slow, quick = (quantile([record.ttft_s for record in outcome.records], 0.9) for outcome in outcomes)
    assert all(record.done for outcome in outcomes for record in outcome.records)
    assert quick == pytest.approx(slow, rel=0.15)


def test_what_fits_no_worker_is_refused_and_missed(latency: Latency, kind: WorkerKind) -> None:
    jobs = [Job(0.0, 8_000, 500), Job(0.0, 100, 2)]
    for run in (simulate, simulate_fast):
        outcome = run(shared(kind), latency, jobs)
        assert [record.refused for record in outcome.records] == [True, False]
        assert attainment(outcome.records, SLO(ttft_s=100.0)) == 0.5


def test_a_run_stops_when_too_many_have_missed(latency: Latency, kind: WorkerKind, mixed: Trace) -> None:
    jobs = mixed.at_rate(50.0, 60, poisson=True)
    slo = SLO(ttft_s=0.5)
    for run in (simulate, simulate_fast):
        whole = run(shared(kind), latency, jobs, slo=slo)
        early = run(shared(kind), latency, jobs, slo=slo, missed_allowed=6)
        assert not whole.stopped and attainment(whole.records, slo) < 0.8
        assert early.stopped and early.ended_s < whole.ended_s


def test_shared_prefixes_are_found_again(latency: Latency, kind: WorkerKind) -> None:
    """Blocks with equal ids are computed once on a worker, and the router sends them where they are."""
    jobs = [
        Job(100.0 * number, 512, 2, tuple(range(8)) if number % 2 else tuple(range(1_000 + 8 * number, 1_008 + 8 * number)), 64)
        for number in range(6)
    ]
    records = simulate(shared(kind, 2), latency, jobs).records
    again = [record.ttft_s for record in records[3::2]]
    assert max(again) < 0.2 * records[1].ttft_s
    assert min(record.ttft_s for record in records[::2]) > 0.9 * records[1].ttft_s


def test_stages_overlap_batches() -> None:
    """Two stages compute two batches at once; one batch takes as long as ever."""
    plain, staged = kind_of(step_s=None), kind_of(step_s=None, stages=2, width=2)
    alone = [simulate(shared(kind, 1, 4_096), latency_of(kind), [Job(0.0, 400, 1)]).records[0].ttft_s for kind in (plain, staged)]
    assert alone[0] == pytest.approx(alone[1])
    both = simulate(shared(staged, 1, 4_096), latency_of(staged), [Job(0.0, 400, 1), Job(0.0, 400, 1)])
    assert both.ended_s == pytest.approx(1.5 * alone[0])


def test_equal_input_gives_equal_output(latency: Latency, kind: WorkerKind, mixed: Trace) -> None:
    def once() -> list[float]:
        outcome: Outcome = simulate(split(kind, 2, 2), latency, mixed.at_rate(2.0, 40, poisson=True, seed=5))
        return [record.last_s for record in outcome.records]

    first = once()
    assert first == once() and all(map(math.isfinite, first))
