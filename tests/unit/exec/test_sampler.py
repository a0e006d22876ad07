"""The sampler against a plain oracle that sorts everything, and the promises of each step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvseal.core.errors import SamplingFailed
from kvseal.core.request import SamplingParams
from kvseal.exec.sampler import sample, token_logprobs, uniform

VOCAB = 1000


def logits_of(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return (np.random.RandomState(seed).standard_normal(vocab) * spread).astype(np.float32)


def draw(logits: np.ndarray, *, history: tuple[int, ...] = (1, 2), prompt_tokens: int = 2, index: int = 0, **params: object) -> int:
    return sample(
        logits,
        SamplingParams(**params),
        history=history,
        prompt_tokens=prompt_tokens,
        output_index=index,  # type: ignore[arg-type]
    ).token


def oracle_weights(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Steps 6 to 9 as they read: sort, cut, cut, cut. Float64 weights per token, 0 where cut."""
    scaled = (logits - logits.max()).astype(np.float32) / np.float32(params.temperature)
    weights = np.exp(scaled.astype(np.float64))
    order = np.argsort(-scaled, kind="stable")
    if 0 < params.top_k < len(scaled):
        weights[scaled < scaled[order[params.top_k - 1]]] = 0
    if params.top_p < 1:
        cumulative = weights[order].cumsum()
        last = order[min(int((cumulative < params.top_p * cumulative[-1]).sum()), len(order) - 1)]
        weights[scaled < scaled[last]] = 0
    if params.min_p > 0:
        weights[scaled < np.float32(math.log(params.min_p))] = 0
    return weights


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 999, 1000, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_the_draw_equals_the_oracle(seed: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_of(seed, spread=spread)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    weights = oracle_weights(logits, params)
    cumulative = weights.cumsum() / weights.sum()
    for index in range(3):
        token = sample(logits, params, history=(1,), prompt_tokens=1, output_index=index).token
        assert weights[token] > 0
        point = uniform(seed, index)
        before = cumulative[token - 1] if token else 0.0
        assert before - 1e-4 <= point <= cumulative[token] + 1e-4


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    counts = np.bincount([draw(logits, seed=seed) for seed in range(4000)], minlength=4) / 4000
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 0.03


def test_large_vocabularies_too() -> None:
    logits = np.zeros(50_000, dtype=np.float32)
    drawn = [draw(logits, seed=seed) for seed in range(500)]
    assert min(drawn) < 1000
    assert max(drawn) > 49_000
    assert abs(np.mean(drawn) - 25_000) < 2500
    one = np.full(50_000, -100.0, dtype=np.float32)
    one[[7, 49_999]] = 0
    assert {draw(one, seed=seed) for seed in range(60)} == {7, 49_999}


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    logits = logits_of(1, spread=1.0)
    assert [draw(logits, seed=9, index=i) for i in range(20)] == [draw(logits.copy(), seed=9, index=i, history=(4, 5)) for i in range(20)]
    assert len({draw(logits, seed=9, index=i) for i in range(50)}) > 10
    assert len({draw(logits, seed=i) for i in range(50)}) > 10


def test_the_generator_is_fixed_for_ever() -> None:
    """These values are a promise to users who keep seeds."""
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 7)] == GENERATED
    assert all(0 <= uniform(seed, index) < 1 for seed in range(50) for index in range(50))


GENERATED = [0.12311943861730146, 0.5826717794384204, 0.1991258062364596]


def test_greedy_takes_the_highest_and_the_lower_id() -> None:
    logits = logits_of(2)
    assert draw(logits, temperature=0) == int(logits.argmax())
    logits[[3, 500]] = 50
    assert draw(logits, temperature=0) == 3
    assert draw(logits, temperature=0, logit_bias={500: 0.5}) == 500
    assert draw(logits, temperature=1e-30, top_k=1) in (3, 500)
    assert draw(logits, temperature=1e-30) in (3, 500)


def test_allowed_tokens() -> None:
    logits = logits_of(3)
    allowed = (900, 4, 77, 4)
    assert {draw(logits, allowed_token_ids=allowed, seed=seed, temperature=2) for seed in range(200)} == {900, 4, 77}
    assert draw(logits, allowed_token_ids=allowed, temperature=0) == max({900, 4, 77}, key=lambda token: logits[token])


def test_logit_bias() -> None:
    logits = logits_of(4)
    best = int(logits.argmax())
    assert draw(logits, temperature=0, logit_bias={best: -100.0}) == int(np.argsort(-logits)[1])
    assert draw(logits, temperature=1, logit_bias={5: 100.0}) == 5


def test_repetition_penalty_covers_prompt_and_output() -> None:
    logits = np.array([4.0, 3.0, -1.0, -1.5], dtype=np.float32)
    assert draw(logits, temperature=0, repetition_penalty=2.0, history=(0, 0, 0), prompt_tokens=3) == 1  # 4 / 2 < 3, once only
    assert draw(logits, temperature=0, repetition_penalty=2.0, history=(3, 0, 1), prompt_tokens=1) == 0
    assert draw(np.array([-1.0, -1.5], dtype=np.float32), temperature=0, repetition_penalty=2.0, history=(0,), prompt_tokens=1) == 1


def test_presence_and_frequency_cover_the_output_alone() -> None:
    logits = np.array([2.0, 1.0, 0.0], dtype=np.float32)
    assert draw(logits, temperature=0, presence_penalty=1.5, history=(0, 0), prompt_tokens=2) == 0
    assert draw(logits, temperature=0, presence_penalty=1.5, history=(0, 0), prompt_tokens=1) == 1
    assert draw(logits, temperature=0, presence_penalty=0.9, history=(9, 0, 0, 0), prompt_tokens=1) == 0
    assert draw(logits, temperature=0, frequency_penalty=0.5, history=(2, 0, 0), prompt_tokens=1) == 0
    assert draw(logits, temperature=0, frequency_penalty=0.5, history=(2, 0, 0, 0), prompt_tokens=1) == 1
    assert draw(logits, temperature=0, frequency_penalty=-2.0, history=(2, 2, 2), prompt_tokens=1) == 2


def test_min_tokens_rules_stop_ids_out() -> None:
    logits = np.array([5.0, 1.0, 0.0], dtype=np.float32)
    params = {"temperature": 0, "min_tokens": 3, "stop_token_ids": frozenset({0})}
    assert [draw(logits, index=index, **params) for index in (0, 2, 3)] == [1, 1, 0]


def test_top_k_keeps_equals_of_the_last() -> None:
    logits = np.array([3.0, 2.0, 2.0, 1.0], dtype=np.float32)
    assert {draw(logits, top_k=2, temperature=2, seed=seed) for seed in range(200)} == {0, 1, 2}
    assert {draw(logits, top_k=1, temperature=2, seed=seed) for seed in range(50)} == {0}


def test_top_p_keeps_the_fewest() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    assert {draw(logits, top_p=0.49, seed=seed) for seed in range(200)} == {0}
    assert {draw(logits, top_p=0.79, seed=seed) for seed in range(200)} == {0, 1}
    assert {draw(logits, top_p=0.81, seed=seed) for seed in range(300)} == {0, 1, 2}
    assert {draw(logits, top_p=0.55, top_k=2, seed=seed) for seed in range(200)} == {0}, "0.5 is 0.62 of what top_k left"


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    assert {draw(logits, min_p=0.29, seed=seed) for seed in range(300)} == {0, 1, 2}
    assert {draw(logits, min_p=1.0, seed=seed) for seed in range(50)} == {0}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1}, {"temperature": 0, "logit_bias": {1: -100.0}, "logprobs": 3}])
def test_logits_that_are_not_finite_never_become_a_token(bad: float, params: dict[str, object]) -> None:
    for at in (0, 500, VOCAB - 1):
        logits = logits_of(5)
        logits[at] = bad
        with pytest.raises(SamplingFailed, match="not finite"):
            draw(logits, **params)
    with pytest.raises(SamplingFailed, match="not finite"):
        draw(np.full(VOCAB, bad, dtype=np.float32), **params)


def test_penalties_that_overflow_never_become_a_token() -> None:
    logits = np.array([3e38, -1.0], dtype=np.float32)
    with np.errstate(over="ignore"), pytest.raises(SamplingFailed, match="not finite"):
        draw(logits, repetition_penalty=0.5, history=(0,), prompt_tokens=1)


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(SamplingFailed, match="ruled out"):
        draw(logits_of(6), allowed_token_ids=(4,), stop_token_ids=frozenset({4}), min_tokens=2, temperature=1)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_of(7)
    exact = logits.astype(np.float64) - logits.max()
    exact -= np.log(np.exp(exact).sum())
    params = SamplingParams(temperature=0.3, top_k=5, logit_bias={17: 100.0}, logprobs=4)
    sampled = sample(logits, params, history=(1,), prompt_tokens=1, output_index=0)
    assert sampled.token == 17
    assert sampled.logprobs is not None
    assert sampled.logprobs.token == 17
    assert abs(sampled.logprobs.logprob - exact[17]) < 1e-5
    assert [token for token, _ in sampled.logprobs.top] == np.argsort(-logits, kind="stable")[:4].tolist()
    assert np.allclose([value for _, value in sampled.logprobs.top], np.sort(exact)[::-1][:4], atol=1e-5)


@pytest.mark.parametrize("top", [0, 1, 20])
def test_top_logprobs_with_ties(top: int) -> None:
    logits = np.zeros(100, dtype=np.float32)
    found = token_logprobs(logits, 99, top)
    assert [token for token, _ in found.top] == list(range(top))
    assert abs(found.logprob + math.log(100)) < 1e-6


def test_logprobs_with_extreme_logits() -> None:
    logits = np.array([1e30, -1e30, 0.0], dtype=np.float32)
    assert token_logprobs(logits, 0, 2).logprob == 0
    assert token_logprobs(np.array([3.0, 1.0], dtype=np.float32), 1, 20).top[1][0] == 1
