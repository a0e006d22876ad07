"""One suite for every row sampler: NumPy's, which says how it is meant, and the native one, token for token."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from kvseal import _native
from kvseal.core.batch import Row, TokenLogprobs
from kvseal.core.errors import SamplingFailed
from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import SamplingParams
from kvseal.exec.backends.cpu_sampling import NativeSampler
from kvseal.exec.sampler import NOT_FINITE, RULED_OUT, Sampled
from kvseal.exec.sampling import NumpySampler, RowSampler

VOCAB = 5_000


class NoTable:
    scope = Scope(bytes(16))
    valid_tokens = 0
    stamps: array[int] = array("Q")


def native(threads: int = 1, vocab: int = VOCAB) -> NativeSampler:
    return NativeSampler(_native.Sampler(vocab, threads))


def row(params: SamplingParams, history: tuple[int, ...] = (1, 2), prompt_tokens: int = 2, name: str = "r") -> Row:
    """A decoding row: its output index is the number of tokens after the prompt."""
    tokens = array("I", history)
    return Row(RequestId(name), tokens[-1:], len(tokens) - 1, NoTable(), params, True, tokens, prompt_tokens)


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return (np.random.RandomState(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def some_params(rng: random.Random, vocab: int) -> SamplingParams:
    def maybe(value: object, neutral: object, often: float = 0.5) -> object:
        return value if rng.random() < often else neutral

    fields = {
        "temperature": maybe(rng.choice([0.2, 0.7, 1.0, 2.0, 1e-30]), 0.0, 0.8),
        "top_k": maybe(rng.choice([1, 2, 40, 500, vocab - 1, vocab, 10**6]), 0),
        "top_p": maybe(rng.choice([0.999, 0.9, 0.5, 0.01]), 1.0),
        "min_p": maybe(rng.choice([0.01, 0.2, 1.0]), 0.0, 0.3),
        "presence_penalty": maybe(rng.uniform(-2, 2), 0.0, 0.3),
        "frequency_penalty": maybe(rng.uniform(-2, 2), 0.0, 0.3),
        "repetition_penalty": maybe(rng.uniform(0.5, 2), 1.0, 0.3),
        "seed": rng.randrange(2**64),
        "logit_bias": maybe({rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(5)}, {}, 0.3),
        "allowed_token_ids": maybe(tuple(rng.randrange(vocab) for _ in range(rng.choice([1, 7, 600]))), None, 0.2),
        "min_tokens": maybe(8, 0, 0.2),
        "stop_token_ids": frozenset(rng.randrange(vocab) for _ in range(3)),
        "logprobs": maybe(rng.choice([0, 1, 20]), None, 0.3),
    }
    return SamplingParams(**fields)  # type: ignore[arg-type]


def token_of(answer: int | Sampled | SamplingFailed) -> int | str:
    if isinstance(answer, SamplingFailed):
        return str(answer)
    return answer.token if isinstance(answer, Sampled) else answer


def assert_close(one: TokenLogprobs | None, other: TokenLogprobs | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert [id_ for id_, _ in one.top] == [id_ for id_, _ in other.top]
        assert np.allclose([one.logprob, *(p for _, p in one.top)], [other.logprob, *(p for _, p in other.top)], atol=1e-5)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, VOCAB])
def test_native_code_draws_what_numpy_draws(spread: float, vocab: int) -> None:
    rng = random.Random(f"{spread} {vocab}")
    logits = logits_of(rng.randrange(10**6), 24, vocab, spread)
    if spread == 4.0:
        logits = np.round(logits)  # many equals
    histories = [tuple(rng.randrange(vocab) for _ in range(rng.choice([1, 5, 40]))) for _ in logits]
    rows = [
        row(some_params(rng, vocab), history, rng.randrange(1, len(history) + 1), name=str(index))
        for index, history in enumerate(histories)
    ]
    expected, found = NumpySampler().choose(logits, rows), native(vocab=vocab).choose(logits, rows)
    assert list(map(token_of, found)) == list(map(token_of, expected))
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Sampled) and other.logprobs is not None:
            assert isinstance(one, Sampled)
            assert_close(one.logprobs, other.logprobs)


def test_a_row_s_token_is_its_own() -> None:
    """L13: the same alone, in any company, in any place, on any number of threads."""
    rng = random.Random(7)
    logits = logits_of(8, 33)
    rows = [row(some_params(rng, VOCAB), tuple(range(i + 1)), 1, name=str(i)) for i in range(33)]
    together = native(3).choose(logits, rows)
    assert native(1).choose(logits, rows) == together
    assert [native().choose(logits[i : i + 1], rows[i : i + 1])[0] for i in range(33)] == list(together)
    back = native(2).choose(np.ascontiguousarray(logits[::-1]), rows[::-1])
    assert list(back)[::-1] == list(together)


@pytest.fixture(params=["numpy", "native"])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return NumpySampler() if request.param == "numpy" else native()


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_rows_give_bare_tokens(sampler: RowSampler) -> None:
    logits = logits_of(1, 3)
    logits[1, [9, 700]] = 100
    assert list(map(token_of, sampler.choose(logits, [row(GREEDY)] * 3))) == [int(logits[0].argmax()), 9, int(logits[2].argmax())]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0, logprobs=2), SamplingParams(top_p=0.5)])
def test_a_row_that_is_not_finite_fails_alone(sampler: RowSampler, bad: float, params: SamplingParams) -> None:
    logits = logits_of(2, 3)
    logits[1, VOCAB - 1] = bad
    answers = sampler.choose(logits, [row(params)] * 3)
    assert [isinstance(answer, SamplingFailed) for answer in answers] == [False, True, False]
    assert token_of(answers[1]) == NOT_FINITE


def test_nothing_left_to_choose_fails(sampler: RowSampler) -> None:
    params = SamplingParams(allowed_token_ids=(4,), stop_token_ids=frozenset({4}), min_tokens=2)
    assert token_of(sampler.choose(logits_of(3), [row(params, (1, 2), 2)])[0]) == RULED_OUT


def test_penalties_that_overflow_fail(sampler: RowSampler) -> None:
    logits = np.full((1, VOCAB), -1.0, dtype=np.float32)
    logits[0, 0] = 3e38
    with np.errstate(over="ignore"):
        assert token_of(sampler.choose(logits, [row(SamplingParams(repetition_penalty=0.5), (0,), 1)])[0]) == NOT_FINITE


def test_logprobs_of_given_tokens(sampler: RowSampler) -> None:
    logits = logits_of(4, 3)
    logits[2, 0] = np.nan
    found = sampler.logprobs(logits, [5, 4_999, 1], 3)
    assert isinstance(found[2], SamplingFailed)
    for one, row_logits, token in zip(found[:2], logits, (5, 4_999), strict=False):
        exact = row_logits.astype(np.float64) - np.log(np.exp(row_logits.astype(np.float64)).sum())
        assert isinstance(one, TokenLogprobs) and one.token == token
        assert [id_ for id_, _ in one.top] == np.argsort(-row_logits, kind="stable")[:3].tolist()
        assert np.allclose([one.logprob, *(p for _, p in one.top)], [exact[token], *np.sort(exact)[::-1][:3]], atol=1e-5)


def test_parameters_follow_their_request() -> None:
    """The native form of a request's parameters is made once; another request of the same name gets its own."""
    one, logits = native(), logits_of(5)
    best = int(logits[0].argmax())
    assert token_of(one.choose(logits, [row(SamplingParams(temperature=0, logit_bias={7: 100.0}))])[0]) == 7
    assert token_of(one.choose(logits, [row(SamplingParams(temperature=0, logit_bias={8: 100.0}))])[0]) == 8
    for index in range(200):
        one.choose(logits, [row(SamplingParams(temperature=0, logit_bias={7: 0.5}), name=str(index))])
    assert len(one._known) <= 67
    assert token_of(one.choose(logits, [row(GREEDY)])[0]) == best


@pytest.mark.parametrize("fields", [{"logit_bias": {VOCAB: 1.0}}, {"allowed_token_ids": (VOCAB,)}, {"stop_token_ids": frozenset({-1})}])
def test_ids_outside_the_vocabulary_never_reach_a_row(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        native().choose(logits_of(6), [row(SamplingParams(**fields))])  # type: ignore[arg-type]


def test_a_history_outside_the_vocabulary_never_reaches_a_row() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        native().choose(logits_of(6), [row(SamplingParams(presence_penalty=1.0), (VOCAB,), 1)])
