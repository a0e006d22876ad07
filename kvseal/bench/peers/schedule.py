"""Runs the engines against each other, interleaved.

Owns the order: repetition i of every engine comes before repetition i + 1 of any, one engine works at a time, and the order turns by one
with each repetition so that none always comes first. Engines stay up between; what idle ones and strangers use is measured and marked.
An engine that fails in a scenario has no score there, and the rest goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvseal.bench.peers.engines import Engine, EngineFailed, TooSlow
from kvseal.bench.peers.figures import Measurement
from kvseal.bench.peers.machine import Meter, cpu_seconds, resident_bytes, wait_for_quiet
from kvseal.bench.peers.workload import Scenario, warm_up

Starter = Callable[[], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    scenarios: Sequence[Scenario]
    repetitions: int
    vocab_size: int
    seed: int = 0
    quiet_wait_s: float = 20.0
    budget_s: float | None = None
    """No repetition of a scenario starts that would end later, judged by its last one. The first always runs."""
    longest_s: float = 900.0
    """An engine that takes longer for one repetition is stopped."""
    most_times_ours: float | None = None
    """An engine that takes this many times as long as the slowest of ours is stopped, and its ratio is a bound."""


@dataclass(slots=True)
class Runner:
    """A named engine that can be started again."""

    name: str
    starter: Starter
    ours: bool = False
    skips: Sequence[str] = ()
    engine: Engine | None = None
    about: dict[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    """Scenario, or "start" -> why."""

    def start(self) -> bool:
        if self.engine is None and "start" not in self.failures:
            try:
                self.engine = self.starter()
                self.start_s, self.about = self.engine.start_s, self.engine.about
            except EngineFailed as error:
                self.failures["start"] = str(error)
        return self.engine is not None

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.stop()
            self.engine = None


class Interleaved:
    """One run of a `Plan` over some runners."""

    def __init__(
        self,
        plan: Plan,
        runners: Sequence[Runner],
        *,
        say: Callable[[str], None],
        keep: Callable[[list[Measurement]], object] = lambda measured: None,
    ) -> None:
        """keep: gets everything measured so far after each round of a scenario, so that a run which is ended early is not lost."""
        self._plan = plan
        self._runners = list(runners)
        self._say = say
        self._keep = keep
        self._measured: list[Measurement] = []
        self._took_s: dict[tuple[str, str], float] = {}
        """(engine, scenario) -> seconds of its last repetition."""

    def run(self) -> list[Measurement]:
        """All repetitions; engines are started before and stopped after, whatever happens."""
        began = time.monotonic()
        before = signal.signal(signal.SIGTERM, _stop)  # Else a `timeout` around this would leave the engines behind.
        try:
            for runner in self._runners:
                self._begin(runner)
            for repetition in range(self._plan.repetitions):
                for scenario in self._plan.scenarios:
                    if self._fits(scenario, repetition, time.monotonic() - began):
                        self._round(scenario, repetition)
                        self._keep(self._scored())
        finally:
            for runner in self._runners:
                runner.stop()
            signal.signal(signal.SIGTERM, before)
        return self._scored()

    def _scored(self) -> list[Measurement]:
        return [each for each in self._measured if each.scenario not in self._failures(each.engine)]

    def _begin(self, runner: Runner) -> None:
        if not runner.start():
            self._say(f"{runner.name}: does not run: {runner.failures['start']}")
            return
        self._say(f"{runner.name}: started in {runner.start_s:.1f} s")
        # A shape that is not warmed up is not wrong: engines that skip the scenarios with many requests are spared them here too.
        most = max((each.requests for each in self._plan.scenarios if each.name not in runner.skips), default=1)
        for call in warm_up(self._plan.vocab_size, seed=self._plan.seed, requests=most):
            try:
                if runner.engine is not None:
                    runner.engine.ask(call, timeout_s=self._plan.longest_s)
            except (EngineFailed, TooSlow) as error:
                runner.failures["start"] = f"warm-up: {error or 'no answer in time'}"
                runner.stop()
                self._say(f"{runner.name}: does not run: {runner.failures['start']}")
                return

    def _fits(self, scenario: Scenario, repetition: int, spent_s: float) -> bool:
        if self._plan.budget_s is None or repetition == 0:
            return True
        expected_s = sum(seconds for (_, name), seconds in self._took_s.items() if name == scenario.name)
        return spent_s + expected_s <= self._plan.budget_s

    def _round(self, scenario: Scenario, repetition: int) -> None:
        turn = repetition % max(1, len(self._runners))
        for runner in [*self._runners[turn:], *self._runners[:turn]]:
            if scenario.name not in runner.skips and scenario.name not in runner.failures and runner.start():
                self._measure(runner, scenario, repetition)

    def _measure(self, runner: Runner, scenario: Scenario, repetition: int) -> None:
        engine = runner.engine
        if engine is None:
            return
        wait_for_quiet(self._plan.quiet_wait_s)
        calls = scenario.work(repetition, seed=self._plan.seed, vocab_size=self._plan.vocab_size)
        limit_s = self._limit(runner, scenario)
        others = [other.engine.pid for other in self._runners if other.engine is not None and other is not runner]
        idle_before_s = cpu_seconds(others)
        meter = Meter([engine.pid], idle=others)
        seconds, digests, cut = [], [], False
        try:
            for call in calls:
                answer = engine.ask(call, timeout_s=limit_s)
                seconds.append(answer.seconds)
                digests.append(answer.digest)
            speed = scenario.speed(seconds)
        except TooSlow:
            cut = True
        except EngineFailed as error:
            self._fail(runner, scenario, str(error))
            return
        except ValueError as error:  # Of the times, not of the engine: this repetition has no score, the next one may.
            self._say(f"{runner.name}: {scenario.name} #{repetition + 1}: {error}")
            return
        usage = meter.stop()
        if cut:
            speed = sum(call.new_tokens for call in calls) / limit_s
            runner.stop()  # It is still busy with what nobody waits for.
        idle_cores = (cpu_seconds(others) - idle_before_s) / usage.wall_s
        memory = 0 if runner.engine is None else resident_bytes([engine.pid])
        digest = "" if cut or not all(digests) else "/".join(digests)
        found = Measurement(runner.name, scenario.name, repetition, speed, usage, cut, digest, memory)
        self._measured.append(found)
        self._took_s[runner.name, scenario.name] = usage.wall_s
        self._say(_line(found, idle_cores))

    def _limit(self, runner: Runner, scenario: Scenario) -> float:
        ours = [self._took_s[key] for each in self._runners if each.ours and (key := (each.name, scenario.name)) in self._took_s]
        if runner.ours or not ours or self._plan.most_times_ours is None:
            return self._plan.longest_s
        return min(self._plan.longest_s, max(ours) * self._plan.most_times_ours)

    def _fail(self, runner: Runner, scenario: Scenario, why: str) -> None:
        runner.failures[scenario.name] = why
        runner.stop()
        self._say(f"{runner.name}: {scenario.name} failed: {why}")

    def _failures(self, name: str) -> Mapping[str, str]:
        return next((runner.failures for runner in self._runners if runner.name == name), {})


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _line(found: Measurement, idle_cores: float) -> str:
    others = found.usage.others_cores
    noise = "unknown" if others is None else f"{others:.2f}"
    loud = " LOUD" if found.usage.is_loud else ""
    slow = " (stopped: slower than this)" if found.cut else ""
    return (
        f"  {found.scenario:8} #{found.repetition + 1} {found.engine:24} {found.speed:8.1f} tok/s{slow}"
        f"  {found.usage.wall_s:6.1f} s, cores: own {found.usage.own_cores:.2f}, others {noise} (idle engines {idle_cores:.2f}){loud}"
    )
