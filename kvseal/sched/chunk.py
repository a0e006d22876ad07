"""How many new tokens a step may have.

Owns `StepSize`. A step is the time in which nothing else can happen: no other request gets a token, no cancellation takes effect, and the
engine seems to stand still. So a chunk is as large as was asked for, or as small as it must be for the step to end in time, learned from
the steps before. Speed alone depends on it, never a token (L13).
"""

from __future__ import annotations

FIRST_TOKENS = 64
"""Until a step has been timed."""
LEAST_TOKENS = 32
"""Smaller chunks read all weights for little work."""
BESIDE_DECODERS_S = 0.1
"""What a step with chunks may last while somebody waits for their next token: chunks of this length are computed nearly as fast as longer
ones, and readers take ten tokens a second for a steady stream."""
TIMED_AT_LEAST_TOKENS = 16
"""Steps of few tokens are bound by memory and say nothing of the cost of a token."""


class StepSize:
    """`most_tokens` at most; with `target_s`, steps of many tokens aim to last no longer, and beside decoders no longer than
    `BESIDE_DECODERS_S`."""

    def __init__(self, most_tokens: int, target_s: float | None) -> None:
        self._most_tokens = most_tokens
        self._target_s = target_s
        self._token_s: float | None = None

    def tokens(self, running: int, decoding: int = 0) -> int:
        """For a step with `running` sequences, each of which gets at least one; `decoding` of them wait for nothing else."""
        if self._target_s is None:
            return self._most_tokens
        target_s = min(self._target_s, BESIDE_DECODERS_S) if decoding else self._target_s
        fits = FIRST_TOKENS if self._token_s is None else round(target_s / self._token_s)
        return max(running, min(self._most_tokens, max(decoding + LEAST_TOKENS, fits)))

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has lasted so long."""
        if tokens >= TIMED_AT_LEAST_TOKENS and seconds > 0:
            token_s = seconds / tokens
            self._token_s = token_s if self._token_s is None else 0.5 * (self._token_s + token_s)
