"""What every engine is asked for: four scenarios, the same token ids for all.

Owns the scenarios of figure 14, their prompts and what counts as their speed. A prompt is a list of ordinary token ids, drawn anew for each
repetition from a seed that names the scenario and the repetition: all engines get the same, and no cache helps where none is meant to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

Prompts = list[list[int]]

_FIRST_TOKEN = 1_000
"""Below stand special tokens and single bytes."""


@dataclass(frozen=True, slots=True)
class Call:
    """One group of requests, sent at once; all answers have `output_tokens` tokens."""

    prompts: Prompts
    output_tokens: int

    @property
    def new_tokens(self) -> int:
        return len(self.prompts) * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`requests` at once of `shared_tokens` common and `prompt_tokens` own tokens, each answered with `output_tokens`."""

    name: str
    title: str
    prompt_tokens: int
    output_tokens: int
    requests: int = 1
    shared_tokens: int = 0
    target: float
    """How many times the best peer's speed KVSeal aims at."""
    calls: int = 1
    """How often a repetition asks; short scenarios do it more than once."""

    @property
    def unit(self) -> str:
        return "prompt tokens/s" if self.is_prefill else "output tokens/s"

    @property
    def is_prefill(self) -> bool:
        return self.output_tokens == 1

    @property
    def is_single_stream(self) -> bool:
        return self.requests == 1 and not self.is_prefill

    def work(self, repetition: int, *, seed: int, vocab_size: int) -> list[Call]:
        """The calls of one repetition. A single stream is asked for one token first, so that its prompt can be taken off its time."""
        draw = random.Random(f"{seed}/{self.name}/{repetition}")

        def tokens(count: int) -> list[int]:
            return random_tokens(draw, count, vocab_size)

        calls: list[Call] = []
        for _ in range(self.calls):
            if self.is_single_stream:
                calls.append(Call([tokens(self.prompt_tokens)], 1))
            shared = tokens(self.shared_tokens)
            calls.append(Call([shared + tokens(self.prompt_tokens) for _ in range(self.requests)], self.output_tokens))
        return calls

    def speed(self, seconds: Sequence[float]) -> float:
        """Tokens per second from the seconds that each call of `work` took. Raises ValueError when the times make no sense."""
        if self.is_single_stream:
            first, whole = sum(seconds[0::2]), sum(seconds[1::2])
            if whole <= first:
                raise ValueError(f"{self.output_tokens} tokens took {whole:.3f} s and one took {first:.3f} s: too noisy to tell a speed")
            return self.calls * (self.output_tokens - 1) / (whole - first)
        if self.is_prefill:
            return self.calls * self.requests * (self.shared_tokens + self.prompt_tokens) / sum(seconds)
        return self.calls * self.requests * self.output_tokens / sum(seconds)

    def quick(self) -> Scenario:
        """A small version, to see that everything runs; its figures mean nothing."""
        return replace(
            self,
            output_tokens=min(self.output_tokens, 32 if self.requests == 1 else 8),
            prompt_tokens=min(self.prompt_tokens, 128),
            shared_tokens=min(self.shared_tokens, 128),
            requests=min(self.requests, 4),
            calls=1,
        )


SCENARIOS = (
    Scenario(name="single", title="single stream, 128 in, 128 out", prompt_tokens=128, output_tokens=128, target=1.5, calls=2),
    Scenario(name="prefill", title="prefill, 1,024 in", prompt_tokens=1_024, output_tokens=1, target=2.5, calls=2),
    Scenario(name="batch", title="32 at once, 256 in, 128 out", prompt_tokens=256, output_tokens=128, requests=32, target=4.0),
    Scenario(
        name="shared",
        title="32 at once, 1,024 shared + 256 own in, 128 out, nothing cached",
        prompt_tokens=256,
        output_tokens=128,
        requests=32,
        shared_tokens=1_024,
        target=5.0,
    ),
)
MOST_REQUESTS = max(scenario.requests for scenario in SCENARIOS)
MOST_TOKENS = max(scenario.shared_tokens + scenario.prompt_tokens + scenario.output_tokens for scenario in SCENARIOS)


def random_tokens(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    """Ordinary ids: neither from the start nor from the end of the vocabulary, where special tokens stand (unless it is tiny)."""
    last = max(1, vocab_size * 97 // 100)
    return [draw.randrange(min(_FIRST_TOKEN, last // 2), last) for _ in range(count)]


def warm_up(vocab_size: int, *, seed: int, requests: int) -> list[Call]:
    """Every shape once, small: threads, caches and compiled graphs are made before anything is measured."""
    draw = random.Random(f"{seed}/warm-up")
    prompts = [random_tokens(draw, 64, vocab_size) for _ in range(requests)]
    long = [random_tokens(draw, 512, vocab_size)]
    return [Call(prompts[:1], 8), Call(long, 1), Call(prompts, 4)]
