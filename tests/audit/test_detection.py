"""Every switch of the stand-in is found, and nothing is found where none is on. The full measurement is ``python -m tests.audit.rates``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import pytest
from _pytest.mark import ParameterSet

from kvseal.audit.findings import Grade, Report, Verdict
from kvseal.audit.probes.base import Depth
from kvseal.audit.runner import PROBES

from .rates import found, honest_traits, run_one, traits_for
from .standin import FAULTS, Traits

_TIMEOUT_S = 1.5
_HANGS = ("oversize-hang", "oversize-stops-all", "stream-hangs-at-limit", "overload-hang", "health-green-while-stuck")
_HANG_TIMEOUT_S = 0.8  # Where what is looked for is a silence, a shorter one is as good.
_AT_ONCE = 4
"""Audits that run at once, each in a process of its own: most of each is waiting."""


@dataclass(frozen=True)
class _Job:
    """One audit: of a switch with the probe that is due, or of an honest server with all."""

    fault: str = ""
    seed: int = 1
    logprobs: bool = True
    depth: Depth = Depth.QUICK


def _audited(job: _Job) -> Report:
    if job.fault:
        timeout_s = _HANG_TIMEOUT_S if job.fault in _HANGS else _TIMEOUT_S
        traits, only = traits_for(job.fault, job.seed), (FAULTS[job.fault][0],)
        return asyncio.run(run_one(job.fault, job.seed, traits=traits, only=only, depth=Depth.QUICK, timeout_s=timeout_s))
    traits, only = (honest_traits(job.seed), ()) if job.logprobs else (Traits(logprobs=False, noise=0.02), ("leak", "reuse"))
    return asyncio.run(run_one("", job.seed, traits=traits, only=only, depth=job.depth, timeout_s=20.0))


def _first(job: _Job) -> bool:
    return job.fault in (*_HANGS, "", "shared-timing-only")


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[dict[_Job, Future[Report]]]:
    """The audits of all tests of this file that were chosen; those that wait longest begin first."""
    params = [item.callspec.params for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    jobs = [job for each in params if isinstance(job := each.get("job"), _Job)]
    with ProcessPoolExecutor(_AT_ONCE, mp_context=get_context("spawn")) as pool:
        yield {job: pool.submit(_audited, job) for job in sorted(jobs, key=_first, reverse=True)}
        pool.shutdown(cancel_futures=True)


def _params(jobs: list[_Job]) -> list[ParameterSet]:
    """The first seeds are for every day; all others, and the deeper audits, are slow tests."""
    slow = pytest.mark.slow
    return [
        pytest.param(job, id=f"{job.fault or 'honest'}-{job.seed}", marks=[slow] if job.seed > 2 or (job.fault and job.seed > 1) else [])
        for job in jobs
    ]


def test_there_are_enough_switches_and_each_probe_has_some() -> None:
    assert len(FAULTS) >= 25
    assert {probe for probe, _ in FAULTS.values()} == {probe.name for probe in PROBES}


@pytest.mark.parametrize("job", _params([_Job(fault, seed) for seed in range(1, 21) for fault in FAULTS]))
def test_a_switch_is_found(job: _Job, reports: dict[_Job, Future[Report]]) -> None:
    report = reports[job].result()
    assert found(job.fault, report), [finding.rule for finding in report.findings]
    assert report.exit_status == 1


@pytest.mark.parametrize("job", _params([_Job(seed=seed, depth=Depth.QUICK if seed < 3 else Depth.NORMAL) for seed in range(1, 63)]))
def test_an_honest_server_is_clean(job: _Job, reports: dict[_Job, Future[Report]]) -> None:
    report = reports[job].result()
    assert report.findings == [] and report.stopped == "" and report.exit_status == 0
    assert all(result.verdict in (Verdict.PASSED, Verdict.UNPROVEN) for result in report.results)


@pytest.mark.parametrize("job", [_Job(seed=3, logprobs=False)], ids=["noisy"])
def test_a_server_without_logprobs_is_not_called_corrupt(job: _Job, reports: dict[_Job, Future[Report]]) -> None:
    """Its texts vary under load (noise flips near ties), and nobody can see why: that must stay unproven."""
    report = reports[job].result()
    assert [finding for finding in report.findings if finding.grade in (Grade.LEAK, Grade.CORRUPTION)] == []
