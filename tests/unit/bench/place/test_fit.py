"""The fit: known coefficients come back, none is ever negative, and the real engine is driven as the simulator drives its own."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvseal.bench import fit as fitting
from kvseal.bench.place.instance import EventClock, Instance, Role
from kvseal.bench.place.latency import Step
from kvseal.bench.place.least_squares import nonnegative
from kvseal.bench.place.live import SkippingClock, run_live
from kvseal.bench.place.simulate import Placement, simulate
from kvseal.bench.place.trace import Trace
from kvseal.core.events import Event
from kvseal.core.outcome import Refused
from kvseal.core.request import Request

from .conftest import COST, kind_of, latency_of


def test_least_squares_without_negative_coefficients() -> None:
    chance = np.random.default_rng(7)
    for _ in range(20):
        features = chance.normal(size=(30, 6))
        values = features @ chance.normal(size=6) + 0.1 * chance.normal(size=30)
        found = nonnegative(features, values)
        gradient = features.T @ (values - features @ found)
        assert (found >= 0).all()
        assert (gradient < 1e-6).all() and abs(gradient @ found) < 1e-6  # nothing that is zero would help, nothing else could be better


def test_least_squares_finds_what_is_there() -> None:
    features = np.random.default_rng(1).random((40, 5))
    truth = np.array([0.0, 2.0, 0.0, 0.5, 1.0])
    assert nonnegative(features, features @ truth) == pytest.approx(truth, abs=1e-9)


def steps() -> list[Step]:
    found = [Step(1, count, count * count / 2, 0, 0, 1) for count in (4, 8, 40, 100, 300, 512, 600)]
    found += [Step(1, 512, 512.0 * start, 0, 0, 0) for start in (600, 2_000, 4_000)]
    found += [Step(0, 0, 0.0, rows, rows * context, rows) for rows in (1, 2, 4, 8, 16, 32) for context in (30, 3_000)]
    return [*found, Step(1, 128, 8_256, 8, 400, 9)]


def test_a_fit_finds_the_machine_behind_noisy_times() -> None:
    chance = random.Random(3)
    exact = [fitting.Sample(step, COST.step_s(step)) for step in steps()]
    assert fitting.residuals(fitting.fit(exact, COST.tokens), exact)["most"] < 1e-6
    noisy = [fitting.Sample(step, COST.step_s(step) * chance.uniform(0.95, 1.05)) for step in steps() for _ in range(5)]
    cost = fitting.fit(fitting.merged(noisy))
    assert max(abs(error) for error in fitting.errors(cost, exact)) < 0.12
    assert min(*cost.seconds, cost.logits_s, cost.sampled_s, cost.pair_s, cost.context_s) >= 0


def test_too_few_steps_are_no_fit() -> None:
    with pytest.raises(ValueError, match="too few"):
        fitting.fit([fitting.Sample(Step(1, 600, 0.0, 0, 0, 1), 1.0)])


def test_merged_steps_are_medians() -> None:
    samples = [fitting.Sample(Step(0, 0, 0.0, 1, 100 + number, 1), seconds) for number, seconds in enumerate((1.0, 9.0, 2.0))]
    (one,) = fitting.merged(samples)
    assert one.seconds == 2.0 and one.step.decode_context == 101


def test_a_model_that_is_not_there_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fitting.main([str(tmp_path / "none.gguf")]) == 2
    assert "kvseal bench fit:" in capsys.readouterr().err


class NullEngine:
    """What `run_live` needs of an engine: the scheduler of a simulated one, whose steps move a timer."""

    def __init__(self) -> None:
        self.time_s = 5.0
        self._clock = EventClock()
        self._instance = Instance(kind_of(), Role.BOTH, self._clock, chunk_tokens=256)

    @property
    def has_work(self) -> bool:
        return self._instance.lanes[0].scheduler.has_work

    def submit(self, request: Request) -> Refused | None:
        return self._instance.submit(request)

    def step(self) -> list[Event]:
        (lane,) = self._instance.lanes
        self._clock.at_s = self.time_s
        ends_s = self._instance.start(lane, self.time_s)
        if ends_s is None:
            return lane.scheduler.take_events()
        self.time_s = self._clock.at_s = ends_s
        return self._instance.finish(lane)


def test_the_live_run_sees_what_the_simulator_predicts(mixed: Trace) -> None:
    """On an engine whose steps take exactly what the model says, prediction and measurement are equal."""
    engine = NullEngine()
    jobs = mixed.at_rate(0.8, 50, poisson=True, seed=2)
    live = run_live(engine, SkippingClock(lambda: engine.time_s), jobs)  # type: ignore[arg-type]
    predicted = simulate(Placement(shared=1, shared_kind=kind_of(), chunk_tokens=256), latency_of(), jobs).records
    for one, other in zip(live, predicted, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s) and one.tpot_s == pytest.approx(other.tpot_s)
        assert one.tbt_s == pytest.approx(other.tbt_s)
