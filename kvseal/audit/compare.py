"""Is this answer the same as that one? Numerics of batching are told from corruption by logprobs and a noise floor.

Owns the comparison of two greedy answers to the same prompt. A server whose kernels depend on the batch may flip a near tie; it may not
change what a token was worth by far more than it does on prompts that reuse nothing. Laws: "batch numerics are not called corruption".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvseal.audit.findings import Confidence
from kvseal.audit.wire import Answer

FLOOR_FACTOR = 8.0
"""A logprob may move by so many times the noise floor before it is called a difference."""
LEAST_MOVE = 0.05
"""And always by this much (nats): rounding in 16 bits reaches it."""

SHAPE_MOVE = 0.5
"""The same tokens of a quantised model in another batch shape moved by up to 0.2 nats with no reuse: less proves nothing."""


class Kind(StrEnum):
    SAME = "same"
    NUMERICS = "numerics"  # Near ties flipped, or logprobs moved within the noise.
    DIFFERENT = "different"
    UNKNOWN = "unknown"  # The texts differ, and without logprobs nobody can say why.


@dataclass(frozen=True, slots=True)
class Difference:
    """`position` is the first token that differs (-1: none); `move` the largest change of a logprob before it (nats); `gap` how much less
    likely the other token was held, at least; `exact` says that not even a logprob moved."""

    kind: Kind
    position: int = -1
    move: float = 0.0
    gap: float = 0.0
    exact: bool = False

    def __str__(self) -> str:
        if self.position >= 0:
            return (
                f"token {self.position} differs (the other one was at least {self.gap:.3g} nats less likely);"
                f" logprobs before it moved by {self.move:.3g}"
            )
        return f"the tokens agree; logprobs moved by at most {self.move:.3g}"


def compare(reference: Answer, other: Answer, floor: float = 0.0) -> Difference:
    """Compares two answers to one prompt. `floor` is the largest move of a logprob that this server showed without any reuse (nats)."""
    if not reference.steps or not other.steps:
        if reference.text == other.text:
            return Difference(Kind.SAME, exact=True)
        return Difference(Kind.UNKNOWN, position=common_length(reference.text, other.text))
    tokens, others = list(reference.tokens), list(other.tokens)
    shared = common_length(tokens, others)
    move = max((abs(reference.steps[i].logprob - other.steps[i].logprob) for i in range(shared)), default=0.0)
    allowed = max(LEAST_MOVE, FLOOR_FACTOR * floor)
    if shared == len(tokens) == len(others):
        exact = move == 0.0 and _same_tops(reference, other)
        kind = Kind.SAME if exact else (Kind.NUMERICS if move <= allowed else Kind.DIFFERENT)
        return Difference(kind, move=move, exact=exact)
    if shared == min(len(tokens), len(others)):  # One ended earlier: an end is a token that is not listed.
        gap = _end_gap(reference if len(tokens) > len(others) else other, shared)
        return Difference(Kind.DIFFERENT if move > allowed or gap > 2 * allowed else Kind.NUMERICS, shared, move, gap)
    gap = max(_gap(reference, others[shared], shared), _gap(other, tokens[shared], shared))
    different = move > allowed or gap > 2 * allowed
    return Difference(Kind.DIFFERENT if different else Kind.NUMERICS, shared, move, gap)


def drawn(reference: Answer, other: Answer) -> bool:
    """Do the two differ, and not since they were computed differently: where they part, one of them took a token that it held itself for
    less likely than another? Without logprobs, whatever differs may be so."""
    at = common_length(reference.tokens, other.tokens)
    if not reference.steps or not other.steps:
        return reference.text != other.text
    steps = [answer.steps[at] for answer in (reference, other) if at < len(answer.steps)]
    return len(steps) == 2 and any(max((odds for _, odds in step.top), default=-math.inf) > step.logprob + LEAST_MOVE for step in steps)


def sureness(broken: list[Difference], floor: float) -> Confidence:
    """How sure it is that answers which differ were not merely computed in batches of another shape."""
    if max((max(difference.move, difference.gap) for difference in broken), default=0.0) < SHAPE_MOVE:
        return Confidence.SUSPECTED
    return Confidence.PROVEN if floor < 0.02 and len(broken) > 1 else Confidence.LIKELY


def blind_spot(floor: float) -> list[str]:
    """What could not be seen, in a sentence, where the noise is so large that a corruption may hide in it."""
    allowed = FLOOR_FACTOR * floor
    if allowed < SHAPE_MOVE:
        return []
    return [f"logprobs are so noisy here (floor {floor:.3g} nats) that no change below {allowed:.3g} nats could be told from noise"]


def largest_move(reference: Answer, other: Answer) -> float | None:
    """The largest change of a logprob over the tokens that both began with, alternatives included; None without logprobs in both."""
    if not reference.steps or not other.steps:
        return None
    shared = common_length(list(reference.tokens), list(other.tokens))
    move = 0.0
    for index in range(min(shared + 1, len(reference.steps), len(other.steps))):
        mine = dict(reference.steps[index].top) or {reference.steps[index].token: reference.steps[index].logprob}
        theirs = dict(other.steps[index].top) or {other.steps[index].token: other.steps[index].logprob}
        common = mine.keys() & theirs.keys()
        if not common:
            return max(move, 10.0)
        move = max(move, *(abs(mine[name] - theirs[name]) for name in common))
        if mine.keys() != theirs.keys() and index < shared:
            lows = abs(min(mine.values()) - min(theirs.values()))
            move = max(move, lows)
    return move


def _gap(answer: Answer, token: str, index: int) -> float:
    """How much less likely `answer` held `token` at `index` than the one it chose, at least (nats)."""
    step = answer.steps[index]
    odds = dict(step.top)
    if token in odds:
        return max(0.0, step.logprob - odds[token])
    if len(odds) >= 2:
        return max(0.0, step.logprob - min(odds.values()))
    return max(0.0, step.logprob + 0.7) if step.logprob > -0.7 else 0.0  # Without alternatives: only a confident choice says anything.


def _end_gap(answer: Answer, index: int) -> float:
    """How much less likely an end was at `index` than the token that `answer` went on with, at least: all else together had the rest."""
    chosen = answer.steps[index].logprob
    rest = -math.expm1(min(-1e-12, chosen))  # 1 - exp(chosen)
    return max(0.0, chosen - math.log(max(1e-12, rest)))


def common_length(a: Sequence[str], b: Sequence[str]) -> int:
    """How many items (or letters) two begin with alike."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def _same_tops(a: Answer, b: Answer) -> bool:
    return all(x.top == y.top for x, y in zip(a.steps, b.steps, strict=True))
