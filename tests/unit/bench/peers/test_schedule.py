"""The order of repetitions, and what happens to an engine that fails, is slow, or never starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvseal.bench.peers.engines import Engine, EngineFailed
from kvseal.bench.peers.figures import Measurement
from kvseal.bench.peers.schedule import Interleaved, Plan, Runner
from kvseal.bench.peers.workload import SCENARIOS, Scenario

from .fakes import DiaryEngine

BATCH = next(scenario for scenario in SCENARIOS if scenario.name == "batch")
PREFILL = replace(next(scenario for scenario in SCENARIOS if scenario.name == "prefill"), calls=1)


def plan(*scenarios: Scenario, repetitions: int = 3, **more: float) -> Plan:
    return Plan(scenarios=scenarios, repetitions=repetitions, vocab_size=49_152, quiet_wait_s=0.0, **more)


def runner(engine: DiaryEngine, *, ours: bool = False) -> Runner:
    return Runner(engine.name, lambda: engine, ours=ours)


def run(of: Plan, *runners: Runner) -> list[Measurement]:
    return Interleaved(of, runners, say=lambda line: None).run()


def test_each_repetition_of_all_comes_before_the_next_of_any_and_the_order_turns() -> None:
    diary: list[str] = []
    engines = [DiaryEngine(name, diary) for name in "abc"]
    found = run(plan(BATCH), *(runner(engine) for engine in engines))
    assert diary == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [each.repetition for each in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(engine.stopped for engine in engines)


def test_all_engines_get_the_same_prompts() -> None:
    found = run(plan(BATCH), runner(DiaryEngine("a", [])), runner(DiaryEngine("b", [])))
    digests = {(each.repetition, each.digest) for each in found}
    assert len(digests) == 3


def test_a_failure_leaves_no_score_in_that_scenario_and_the_rest_goes_on() -> None:
    weak, strong = runner(DiaryEngine("weak", [], fails_at=3)), runner(DiaryEngine("strong", []))
    found = run(plan(BATCH, PREFILL, repetitions=2), weak, strong)
    assert {(each.engine, each.scenario) for each in found} == {("weak", "prefill"), ("strong", "batch"), ("strong", "prefill")}
    assert weak.failures == {"batch": "out of memory"}
    assert sum(each.engine == "strong" for each in found) == 4


def test_times_that_make_no_sense_cost_one_repetition_only() -> None:
    """One token took as long as all of them: that was noise, not the engine."""
    single = next(scenario for scenario in SCENARIOS if scenario.name == "single")
    engine = DiaryEngine("a", [], noisy_at=4)
    noisy = runner(engine)
    found = run(plan(replace(single, calls=1), repetitions=3), noisy)
    assert [each.repetition for each in found] == [0, 2] and not noisy.failures


def test_an_engine_that_does_not_start_is_named_and_the_rest_goes_on() -> None:
    def refuse() -> Engine:
        raise EngineFailed("no such instructions")

    absent = Runner("absent", refuse)
    found = run(plan(BATCH), absent, runner(DiaryEngine("present", [])))
    assert absent.failures == {"start": "no such instructions"}
    assert [each.engine for each in found] == ["present"] * 3


def test_a_peer_that_takes_too_long_is_stopped_and_bounded() -> None:
    slow = DiaryEngine("slow", [], fails_at=-1)
    found = run(plan(BATCH, repetitions=1, longest_s=8.0), runner(DiaryEngine("ours", []), ours=True), runner(slow))
    bounded = next(each for each in found if each.engine == "slow")
    assert bounded.cut and bounded.speed == 4_096 / 8.0
    assert slow.stopped


def test_a_run_that_is_ended_takes_its_engines_along() -> None:
    engine = DiaryEngine("a", [], ends_run_at=2)
    with pytest.raises(SystemExit):
        run(plan(BATCH), runner(engine))
    assert engine.stopped


def test_skipped_scenarios_are_not_run() -> None:
    diary: list[str] = []
    skipping = Runner("skips", lambda: DiaryEngine("skips", diary), skips=("batch",))
    found = run(plan(BATCH, PREFILL, repetitions=1), skipping)
    assert [each.scenario for each in found] == ["prefill"]


def test_no_repetition_starts_that_would_end_after_the_budget() -> None:
    found = run(plan(BATCH, repetitions=5, budget_s=0.0), runner(DiaryEngine("a", [])))
    assert len(found) == 1, "the first always runs"


def test_what_is_measured_is_kept_after_each_round() -> None:
    kept: list[int] = []
    Interleaved(
        plan(BATCH, PREFILL, repetitions=2),
        [runner(DiaryEngine("a", [])), runner(DiaryEngine("b", []))],
        say=lambda line: None,
        keep=lambda measured: kept.append(len(measured)),
    ).run()
    assert kept == [2, 4, 6, 8]
