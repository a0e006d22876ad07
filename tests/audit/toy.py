"""A toy language model without weights: deterministic, copies what it has read, and every answer depends on every token that it read.

The next token is the one that followed the last two tokens when they stood earlier in the context (so it recalls facts and continues
lists);
where they did not, a word drawn by a hash over the whole context. Logprobs come from that hash, so a foreign, missing or misplaced token
changes the numbers with certainty.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass, field

VOCABULARY = tuple(
    f" {word}"
    for word in "so it was the and in of to for on with from by at as but or if then there here when while after".split()  # noqa: SIM905
)
_PIECE = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")


def tokenize(text: str) -> list[str]:
    return _PIECE.findall(text)


@dataclass
class Emitted:
    """One step: the token, its logprob, and what was likely beside it."""

    token: str
    logprob: float
    top: dict[str, float]


@dataclass
class Reading:
    """A context as the model read it. `noise` moves logprobs by up to so many nats, as batching does, and may flip near ties."""

    tokens: list[str]
    noise: float = 0.0
    shift: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    _state: bytes = b""
    _after: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._state = hashlib.blake2b("\x00".join(self.tokens).encode(), digest_size=16).digest()
        for first, second, third in zip(self.tokens, self.tokens[1:], self.tokens[2:], strict=False):
            self._after[first.strip(), second.strip()] = third

    def taint(self, tokens: list[str]) -> None:
        """Foreign keys and values stand among those that are read: the numbers change."""
        self._state = hashlib.blake2b(self._state + "\x00".join(tokens).encode(), digest_size=16).digest()

    def step(self) -> Emitted:
        digits = hashlib.blake2b(self._state, digest_size=32).digest()
        last = tuple(token.strip() for token in self.tokens[-2:])
        token = self._after.get((last[0], last[1])) if len(last) == 2 else None
        others = [VOCABULARY[value % len(VOCABULARY)] for value in digits[:12]]
        if token is None:
            token = others[0]
        best = -0.05 - digits[12] / 256.0 * 0.5
        names = list(dict.fromkeys(name for name in others if name != token))[:4]
        gaps = [0.02 + digits[13 + index] / 256.0 * 2.0 for index in range(len(names))]
        odds = [best, *(best - gap - index for index, gap in enumerate(gaps))]
        if self.noise:
            odds = [value + self.chance.uniform(-self.noise, self.noise) for value in odds]
        top = dict(zip([token, *names], [value + self.shift for value in odds], strict=True))
        chosen = max(top, key=lambda name: top[name])
        self.accept(chosen)
        return Emitted(chosen, top[chosen], top)

    def accept(self, token: str) -> None:
        if len(self.tokens) >= 2:
            self._after[self.tokens[-2].strip(), self.tokens[-1].strip()] = token
        self.tokens.append(token)
        self._state = hashlib.blake2b(self._state + token.encode(), digest_size=16).digest()
