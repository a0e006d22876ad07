"""What a caller asked for, as frozen data.

Owns `Request` and `SamplingParams`. A request is never edited after it is made (no field changes to express an error, a limit or a
preemption). Bounds are checked by `SamplingParams.checked`, in one place, before admission.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvseal.core.errors import InvalidRequest
from kvseal.core.ids import RequestId, Scope

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn, and when the request is complete.

    Neutral values switch a step off: ``temperature=0`` is greedy (ties go to the lower id), ``top_k=0``, ``top_p=1``, ``min_p=0``,
    penalties 0 (repetition 1). Stop *strings* are not here: text belongs to `serve`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Unsigned 64-bit. The draw for output token i depends on (seed, i) and on the logits alone (L13)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    """None: no logprobs. n >= 0: the chosen token's logprob and the n most likely tokens'."""
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the request. End-of-sequence ids of the model are added by `serve` unless `ignore_eos`."""
    min_tokens: int = 0
    """Stop ids have probability 0 until this many output tokens."""

    def checked(self, vocab_size: int) -> SamplingParams:
        """Returns itself, or raises `InvalidRequest` naming the parameter and its range."""
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("seed", self.seed, 0, 2**64 - 1)
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _within(name, count, 0, MAX_TOP_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
        for token, bias in self.logit_bias.items():
            _token("logit_bias", token, vocab_size)
            _within("logit_bias", bias, -100.0, 100.0)
        for token in self.allowed_token_ids or ():
            _token("allowed_token_ids", token, vocab_size)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: no token could ever be chosen", param="allowed_token_ids")
        for token in self.stop_token_ids:
            _token("stop_token_ids", token, vocab_size)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to complete. `n` choices are `n` requests that share their prompt through the prefix cache."""

    request_id: RequestId
    prompt_tokens: tuple[int, ...]
    max_output_tokens: int
    scope: Scope
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""
    deadline_s: float | None = None
    """On the engine's clock, counted from submission; None means no deadline."""

    @property
    def budget_tokens(self) -> int:
        """Prompt and output together: what must fit in every pool (L1)."""
        return len(self.prompt_tokens) + self.max_output_tokens

    def checked(self, vocab_size: int) -> Request:
        """Returns itself, or raises `InvalidRequest`. Whether it *fits* is `kv.capacity`'s to say."""
        if not self.prompt_tokens:
            raise InvalidRequest("the prompt is empty: it needs at least one token", param="prompt")
        if self.max_output_tokens < 1:
            raise InvalidRequest(f"max_tokens is {self.max_output_tokens}; it must be at least 1", param="max_tokens")
        if min(self.prompt_tokens) < 0 or max(self.prompt_tokens) >= vocab_size:
            raise InvalidRequest(f"prompt holds a token id outside 0..{vocab_size - 1}", param="prompt")
        if self.sampling.min_tokens > self.max_output_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.sampling.min_tokens}) is larger than max_tokens ({self.max_output_tokens})", param="min_tokens"
            )
        self.sampling.checked(vocab_size)
        return self


def _within(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    if not math.isfinite(value) or value < low or value > high or (low_open and value == low):
        span = f"above {low} and at most {high}" if low_open else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value}; it must be {span}", param=name)


def _token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} names token {token}; ids run from 0 to {vocab_size - 1}", param=name)
