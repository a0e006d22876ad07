"""`exec.sampling.RowSampler` in native code: all rows of a step in one call, on the kernels' threads, without the GIL.

Owns the translation of a request's parameters, once for each request. The arithmetic and its order are `exec.sampler`'s; the random point
of each draw comes from there. L13: rows are computed apart, so a token depends neither on the batch nor on the threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvseal import _native
from kvseal.core.batch import Row, TokenLogprobs
from kvseal.core.errors import SamplingFailed
from kvseal.core.ids import RequestId
from kvseal.core.request import SamplingParams
from kvseal.exec.sampler import NOT_FINITE, RULED_OUT, Float32, Sampled, is_plain_greedy, uniform

Drawn = int | tuple[int, tuple[float, tuple[tuple[int, float], ...]] | None]
"""A token, or why there is none (negative), or a token and its logprobs."""


class NativeSampler:
    def __init__(self, native: _native.Sampler) -> None:
        self._native = native
        self._known: dict[RequestId, tuple[SamplingParams, _native.Sampling]] = {}
        """Of the requests in the last steps."""

    def choose(self, logits: Float32, rows: Sequence[Row]) -> Sequence[int | Sampled | SamplingFailed]:
        if all(_is_plain(row) for row in rows):
            tokens = self._native.greedy(logits)
            return tokens if min(tokens) >= 0 else [answer_of(token) for token in tokens]
        if len(self._known) > 2 * len(rows) + 64:
            self._known = {row.request_id: self._known[row.request_id] for row in rows if row.request_id in self._known}
        return [answer_of(drawn) for drawn in self._native.draw(logits, [self._ask(row) for row in rows])]

    def logprobs(self, logits: Float32, tokens: Sequence[int], top: int) -> list[TokenLogprobs | SamplingFailed]:
        found = self._native.logprobs(logits, list(tokens), top)
        return [
            SamplingFailed(NOT_FINITE) if each is None else TokenLogprobs(token, *each) for token, each in zip(tokens, found, strict=True)
        ]

    def _ask(self, row: Row) -> tuple[_native.Sampling, array[int] | None, int, int, float]:
        params = row.sampling
        known = self._known.get(row.request_id)
        if known is None or known[0] is not params:
            known = self._known[row.request_id] = params, native_sampling(params)
        index = row.end - row.prompt_tokens
        point = point_of(params, index) if params.temperature > 0 else 0.0
        return known[1], _history(row), row.prompt_tokens, index, point


def point_of(params: SamplingParams, output_index: int) -> float:
    """Where in the distribution the draw of this output token falls."""
    return uniform(params.seed, output_index)


def native_sampling(params: SamplingParams) -> _native.Sampling:
    """The same parameters, in native code's form."""
    return _native.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias_ids=list(params.logit_bias),
        biases=list(params.logit_bias.values()),
        allowed_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        stop_ids=list(params.stop_token_ids),
        min_tokens=params.min_tokens,
        logprobs=-1 if params.logprobs is None else params.logprobs,
    )


def _is_plain(row: Row) -> bool:
    params = row.sampling
    return params.temperature == 0 and params.logprobs is None and is_plain_greedy(params, row.end - row.prompt_tokens)


def _history(row: Row) -> array[int] | None:
    """Only penalties look at it; the scheduler's own is in this form already."""
    params, history = row.sampling, row.history
    if params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0:
        return None
    return history if isinstance(history, array) and history.typecode == "I" else array("I", history)


def answer_of(drawn: Drawn) -> int | Sampled | SamplingFailed:
    """What native code says of a row, in the runner's words."""
    if isinstance(drawn, int):
        if drawn >= 0:
            return drawn
        return SamplingFailed(NOT_FINITE if drawn == _native.NOT_FINITE else RULED_OUT)
    token, found = drawn
    return SamplingFailed(NOT_FINITE) if found is None else Sampled(token, TokenLogprobs(token, *found))
