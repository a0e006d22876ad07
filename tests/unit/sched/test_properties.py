"""Properties of the whole engine under random loads: exact, lawful after every step, fair, and it always ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hypothesis import given, settings
from hypothesis import strategies as st

from kvseal.core.batch import BatchResult, RowResult
from kvseal.core.outcome import Cancelled, Completed
from kvseal.core.request import SamplingParams
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig, truth
from kvseal.sched.policy import AGEING_ARRIVALS, MAX_OVERTAKEN, MAX_PRIORITY, LengthHistory

STOPPING = SamplingParams(temperature=0.0, stop_token_ids=frozenset({4_095}))


@dataclass(frozen=True)
class Load:
    family: int
    prompt_tokens: int
    output_tokens: int
    other_scope: bool
    priority: int
    steps_before: int
    cancel_after: int | None
    prompt_logprobs: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        """Members of a family share their beginnings."""
        return tuple((self.family * 1_000 + at * 7) % 4_000 for at in range(self.prompt_tokens))


loads = st.lists(
    st.builds(
        Load,
        family=st.integers(0, 2),
        prompt_tokens=st.integers(1, 45),
        output_tokens=st.integers(1, 25),
        other_scope=st.booleans(),
        priority=st.integers(-1, 1),
        steps_before=st.integers(0, 3),
        cancel_after=st.one_of(st.none(), st.integers(0, 8)),
        prompt_logprobs=st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


@lru_cache(maxsize=4_096)
def alone(prompt: tuple[int, ...], output_tokens: int) -> list[int]:
    return truth(prompt, output_tokens, sampling=STOPPING)


@settings(max_examples=30, deadline=None)
@given(
    loads=loads, pages=st.integers(18, 40), chunk_tokens=st.sampled_from([1, 5, 16, 64]), running=st.integers(1, 6), optimist=st.booleans()
)
def test_any_load_is_answered_exactly(loads: list[Load], pages: int, chunk_tokens: int, running: int, optimist: bool) -> None:
    rig = Rig(pages=pages, chunk_tokens=chunk_tokens, max_running=running)
    if optimist:  # admits too many, and has to preempt
        rig.scheduler._admission.lengths = LengthHistory(prior=(1,) * 200)
    cancels: dict[int, list[str]] = {}
    steps = 0
    for index, load in enumerate(loads):
        for _ in range(load.steps_before):
            _step(rig, cancels.pop(steps, []))
            steps += 1
        sampling = replace(STOPPING, prompt_logprobs=0) if load.prompt_logprobs else STOPPING
        scope = OTHER_SCOPE if load.other_scope else SCOPE
        rig.submit(str(index), load.prompt, load.output_tokens, scope=scope, priority=load.priority, sampling=sampling)
        if load.cancel_after is not None:
            cancels.setdefault(steps + load.cancel_after, []).append(str(index))
    while rig.engine.has_work:
        assert steps < 20_000
        _step(rig, cancels.pop(steps, []))
        steps += 1
    for index, load in enumerate(loads):
        answer = rig.answers[str(index)]
        expected = alone(load.prompt, load.output_tokens)
        if isinstance(answer.outcome, Cancelled):
            assert load.cancel_after is not None and answer.tokens == expected[: len(answer.tokens)]
            continue
        assert isinstance(answer.outcome, Completed)
        assert answer.tokens == expected
        assert answer.outcome.usage.completion_tokens == len(expected)
        if load.prompt_logprobs:
            assert len(answer.prompt_logprobs) == load.prompt_tokens and answer.cached_tokens == 0
    usage = rig.kv.usage()
    assert usage.leased == usage.draining == usage.quarantined == 0 and usage.sealed == usage.evictable


def _step(rig: Rig, cancelled: list[str]) -> None:
    for name in cancelled:
        rig.cancel(name)
    rig.step()
    rig.engine.check()


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(-12, 12), st.integers(1, 60), st.booleans(), st.integers(0, 2)), min_size=2, max_size=60),
    running=st.integers(1, 4),
)
def test_nobody_is_overtaken_more_often_than_stated(arrivals: list[tuple[int, int, bool, int]], running: int) -> None:
    """Arrivals of (priority, prompt tokens, shares its beginning with others, steps before the next); counts who starts before whom."""
    rig = Rig(pages=60, max_running=running)
    started: list[int] = []
    for index, (priority, tokens, shared, steps) in enumerate(arrivals):
        prompt = [1 if shared else 2 + index] * tokens
        rig.submit(str(index), prompt, 3, priority=priority)
        for _ in range(steps):
            _null_step(rig, started)
    while rig.engine.has_work:
        _null_step(rig, started)
    assert sorted(started) == list(range(len(arrivals)))
    clamped = [max(-MAX_PRIORITY, min(MAX_PRIORITY, priority)) for priority, _, _, _ in arrivals]
    for place, index in enumerate(started):
        passed_by = [other for other in started[:place] if other > index]
        by_class = [other for other in passed_by if other - index <= AGEING_ARRIVALS * (clamped[index] - clamped[other])]
        assert len(passed_by) - len(by_class) <= MAX_OVERTAKEN


def _null_step(rig: Rig, started: list[int]) -> None:
    batch = rig.scheduler.schedule()
    for row in batch.rows:
        if int(row.request_id) not in started:
            started.append(int(row.request_id))
    if batch.rows:
        # The same page has the same digest whoever computes it (L13).
        rows = tuple(RowResult(row.request_id, token=5, page_digests=(bytes(16),) * (row.end // 4 - row.start // 4)) for row in batch.rows)
        rig.scheduler.apply(BatchResult(batch.step, rows))
    else:
        rig.scheduler.take_events()
