"""All engines get the same prompts, no repetition repeats one, and a speed is what its name says."""

from __future__ import annotations

import pytest

from kvseal.bench.peers.workload import SCENARIOS, warm_up

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize("name", BY_NAME)
def test_prompts_are_the_same_for_all_and_new_each_time(name: str) -> None:
    scenario = BY_NAME[name]
    first = scenario.work(0, seed=7, vocab_size=49_152)
    assert first == scenario.work(0, seed=7, vocab_size=49_152)
    seen = {tuple(prompt) for call in first for prompt in call.prompts}
    for other in (scenario.work(1, seed=7, vocab_size=49_152), scenario.work(0, seed=8, vocab_size=49_152)):
        assert not seen & {tuple(prompt) for call in other for prompt in call.prompts}
    assert len(seen) == sum(len(call.prompts) for call in first), "no prompt twice in one repetition"


def test_shapes_are_those_of_the_figure() -> None:
    single = BY_NAME["single"].work(0, seed=0, vocab_size=49_152)
    assert [(len(call.prompts), len(call.prompts[0]), call.output_tokens) for call in single] == [(1, 128, 1), (1, 128, 128)] * 2
    (shared,) = BY_NAME["shared"].work(0, seed=0, vocab_size=49_152)
    assert {len(prompt) for prompt in shared.prompts} == {1_280} and len(shared.prompts) == 32
    assert len({tuple(prompt[:1_024]) for prompt in shared.prompts}) == 1
    assert len({tuple(prompt[1_024:1_040]) for prompt in shared.prompts}) == 32
    assert shared.new_tokens == 4_096


@pytest.mark.parametrize("vocab_size", [3, 300, 1_100, 49_152, 262_144])
def test_tokens_exist_in_the_vocabulary(vocab_size: int) -> None:
    calls = [*BY_NAME["single"].work(0, seed=0, vocab_size=vocab_size), *warm_up(vocab_size, seed=0, requests=4)]
    assert all(0 <= token < vocab_size for call in calls for prompt in call.prompts for token in prompt)


def test_speeds() -> None:
    assert BY_NAME["single"].speed([1.0, 3.0, 1.0, 3.0]) == pytest.approx(2 * 127 / 4.0)
    assert BY_NAME["prefill"].speed([2.0, 2.0]) == pytest.approx(512.0)
    assert BY_NAME["batch"].speed([4.0]) == pytest.approx(1_024.0)
    assert BY_NAME["shared"].speed([8.0]) == pytest.approx(512.0)
    with pytest.raises(ValueError, match="too noisy"):
        BY_NAME["single"].speed([3.0, 1.0, 3.0, 1.0])


@pytest.mark.parametrize("name", BY_NAME)
def test_quick_is_small(name: str) -> None:
    small = BY_NAME[name].quick()
    assert sum(call.new_tokens for call in small.work(0, seed=0, vocab_size=49_152)) <= 40
