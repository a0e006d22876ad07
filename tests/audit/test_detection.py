"""Every switch of the stand-in is found, and nothing is found where none is on. The full measurement is ``python -m tests.audit.rates``."""

from __future__ import annotations

import asyncio

import pytest

from kvseal.audit.findings import Grade, Verdict
from kvseal.audit.probes.base import Depth
from kvseal.audit.runner import PROBES

from .rates import found, honest_traits, run_one, traits_for
from .standin import FAULTS, Traits

_TIMEOUT_S = 1.5


def test_there_are_enough_switches_and_each_probe_has_some() -> None:
    assert len(FAULTS) >= 25
    assert {probe for probe, _ in FAULTS.values()} == {probe.name for probe in PROBES}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_switch_is_found(fault: str) -> None:
    report = asyncio.run(run_one(fault, 1, traits=traits_for(fault, 1), only=(FAULTS[fault][0],), depth=Depth.QUICK, timeout_s=_TIMEOUT_S))
    assert found(fault, report), [finding.rule for finding in report.findings]
    assert report.exit_status == 1


@pytest.mark.parametrize("seed", [1, 2])
def test_an_honest_server_is_clean(seed: int) -> None:
    report = asyncio.run(run_one("", seed, traits=honest_traits(seed), depth=Depth.QUICK, timeout_s=20.0))
    assert report.findings == [] and report.stopped == "" and report.exit_status == 0
    assert all(result.verdict in (Verdict.PASSED, Verdict.UNPROVEN) for result in report.results)


def test_a_server_without_logprobs_is_not_called_corrupt() -> None:
    """Its texts vary under load (noise flips near ties), and nobody can see why: that must stay unproven."""
    report = asyncio.run(
        run_one("", 3, traits=Traits(logprobs=False, noise=0.02), only=("leak", "reuse"), depth=Depth.QUICK, timeout_s=20.0)
    )
    assert [finding for finding in report.findings if finding.grade in (Grade.LEAK, Grade.CORRUPTION)] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 21))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_switch_is_found_with_every_seed(fault: str, seed: int) -> None:
    report = asyncio.run(
        run_one(fault, seed, traits=traits_for(fault, seed), only=(FAULTS[fault][0],), depth=Depth.QUICK, timeout_s=_TIMEOUT_S)
    )
    assert found(fault, report), [finding.rule for finding in report.findings]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 63))
def test_honest_servers_of_many_kinds_are_clean(seed: int) -> None:
    report = asyncio.run(run_one("", seed, traits=honest_traits(seed), timeout_s=20.0))
    assert report.findings == [] and report.exit_status == 0
