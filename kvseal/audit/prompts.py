"""Prompts of an exact size, of words that are one token each for nearly every tokeniser.

Owns the filler text and the `Gauge`, which learns from a server how many tokens a text is. Every text is synthetic and drawn from a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FILLER: tuple[str, ...] = tuple(
    """
    time year people way day man thing life world school state family group country problem hand part place case week company system program
    question work number night point home water room area money story fact month lot right study book eye job word business issue side kind
    head house service friend power hour game line end member law car city name team minute idea body back
    """.split()  # noqa: SIM905
)

TEMPLATE_TOKENS = 128
"""A template that nobody counts may hold so many tokens more than the usual one, or none."""


def filler(words: int, draw: random.Random) -> str:
    """`words` random filler words, each after a space."""
    return "".join(" " + FILLER[draw.randrange(len(FILLER))] for _ in range(words))


@dataclass(slots=True)
class Gauge:
    """Tokens of a prompt: ``base + per_word * words``, apart for completions and chat, as this server counted small prompts.

    `source` says who counted: its usage figures, its tokeniser, or nobody (then one token a word is a guess and nothing may rest on it).
    `guessed`: what stands around the words (a chat template, a first token) is counted nowhere for one of its endpoints.
    """

    base: dict[bool, float]
    per_word: float = 1.0
    source: str = "nobody"
    guessed: bool = False

    @property
    def known(self) -> bool:
        return self.source != "nobody"

    @property
    def exact(self) -> bool:
        return self.known and not self.guessed and abs(self.per_word - 1.0) < 1e-9

    def words_for(self, tokens: int, *, chat: bool) -> int:
        return max(1, round((tokens - self.base.get(chat, 0.0)) / max(0.05, self.per_word)))

    def tokens_of(self, words: int, *, chat: bool) -> int:
        return round(self.base.get(chat, 0.0) + self.per_word * words)

    def slack(self, tokens: int) -> int:
        """How far off the gauge may be at `tokens`, for comparing with what the server says."""
        return 2 if self.exact else 8 + tokens // 40 + (TEMPLATE_TOKENS if self.guessed else 0)

    def text(self, tokens: int, draw: random.Random, *, chat: bool = False, head: str = "", tail: str = "") -> str:
        """Filler of about `tokens` tokens in all, between `head` and `tail` (whose words are counted like filler)."""
        around = len(head.split()) + len(tail.split())
        return (head + filler(max(0, self.words_for(tokens, chat=chat) - around), draw) + tail).lstrip(" ")
