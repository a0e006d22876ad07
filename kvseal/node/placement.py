"""Which nodes a request goes to.

Owns the choice alone. Pure: numbers in, a placement out. Load is outstanding tokens, the work that a node still has, never a count of
requests. A prefix that a node holds is worth the tokens that it saves and no more, so no node can fall further behind the others than that
(and never further than `MAX_IMBALANCE_TOKENS`): popular prefixes spread by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DIRECT_TOKENS = 64
"""A prompt with no more than this to compute is not worth a hand-off: it goes straight to the node that answers."""
MAX_IMBALANCE_TOKENS = 8_192


@dataclass(frozen=True, slots=True)
class Candidate:
    """One usable node, as far as this request is concerned."""

    name: str
    outstanding_tokens: int
    cached_tokens: int
    """Of this prompt, in the node's prefix cache."""
    coming_tokens: int
    """The same, with what the node is computing or receiving."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the decode node computes the prompt itself. `decode` None: the prefill node answers alone."""

    prefill: str | None
    decode: str | None


def place(
    prompt_tokens: int,
    max_output_tokens: int,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    *,
    whole: bool = False,
    direct_tokens: int = DIRECT_TOKENS,
) -> Placement | None:
    """None: no node can take it. `whole`: every position of the prompt must be computed where it is answered (prompt logprobs)."""
    if max_output_tokens == 1 and prefills:
        return Placement(cheapest(prompt_tokens, prefills).name, None)
    if not decodes:
        return None
    decode = cheapest(prompt_tokens, decodes)
    if whole or not prefills or prompt_tokens - decode.cached_tokens <= direct_tokens:
        return Placement(None, decode.name)
    return Placement(cheapest(prompt_tokens, prefills).name, decode.name)


def cheapest(prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
    """The least of what is outstanding and what is new, among those not too far behind; the first one among equals."""
    least = min(candidate.outstanding_tokens for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.outstanding_tokens <= least + MAX_IMBALANCE_TOKENS]
    return min(near, key=lambda one: one.outstanding_tokens + prompt_tokens - min(prompt_tokens, one.coming_tokens))
