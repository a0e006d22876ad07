"""From rows of logits to tokens, for a whole step: NumPy's way, plainly right.

Owns the `RowSampler` protocol, the door between the runner and whatever draws, and its reference. `exec.backends.cpu_sampling` does the
same in native code, and one conformance suite runs both. Laws: L12 (logits that are not finite end their own row), L13 (a row's token
depends on its own logits, parameters, history and output index alone).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvseal.core.batch import Row, TokenLogprobs
from kvseal.core.errors import SamplingFailed
from kvseal.exec.sampler import Float32, Sampled, sample, token_logprobs


class RowSampler(Protocol):
    def choose(self, logits: Float32, rows: Sequence[Row]) -> Sequence[int | Sampled | SamplingFailed]:
        """[n, vocab_size] -> one answer for each row; a bare token where no logprobs were asked for."""
        ...

    def logprobs(self, logits: Float32, tokens: Sequence[int], top: int) -> Sequence[TokenLogprobs | SamplingFailed]:
        """[n, vocab_size] -> what the n states thought of these n tokens, and their `top` likeliest."""
        ...


class NumpySampler:
    """`exec.sampler`, row by row."""

    def choose(self, logits: Float32, rows: Sequence[Row]) -> list[int | Sampled | SamplingFailed]:
        return [_chosen(one, row) for one, row in zip(logits, rows, strict=True)]

    def logprobs(self, logits: Float32, tokens: Sequence[int], top: int) -> list[TokenLogprobs | SamplingFailed]:
        return [_known(one, token, top) for one, token in zip(logits, tokens, strict=True)]


def _chosen(logits: Float32, row: Row) -> Sampled | SamplingFailed:
    index = row.end - row.prompt_tokens
    try:
        return sample(logits, row.sampling, history=row.history, prompt_tokens=row.prompt_tokens, output_index=index)
    except SamplingFailed as failed:
        return failed


def _known(logits: Float32, token: int, top: int) -> TokenLogprobs | SamplingFailed:
    try:
        return token_logprobs(logits, token, top)
    except SamplingFailed as failed:
        return failed
