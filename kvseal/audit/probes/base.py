"""What every probe works with: the scene (client, target, canaries, size) and a few helpers.

Owns no test. Laws: a probe never exceeds the budget, never raises for what a server did, and asks nothing that is not synthetic.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum

from kvseal.audit.canary import Aviary, Hit
from kvseal.audit.client import Client
from kvseal.audit.findings import Confidence, Exhibit, Finding, Grade, ProbeResult
from kvseal.audit.target import Target
from kvseal.audit.wire import Answer, Ask, End


class Depth(IntEnum):
    """How often each test is repeated."""

    QUICK = 1
    NORMAL = 2
    THOROUGH = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """An upper bound on what a probe sends."""

    requests: int
    tokens: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.requests + other.requests, self.tokens + other.tokens)


@dataclass(slots=True)
class Scene:
    """One audit in progress. `tenants` is the number of keys; tenant indices beyond it wrap around."""

    client: Client
    target: Target
    aviary: Aviary
    draw: random.Random
    depth: Depth = Depth.NORMAL
    tenants: int = 1
    concurrency: int = 4
    floor: float = 0.0  # Noise of logprobs under load, measured by the leak probe on prompts that reuse nothing.
    floor_known: bool = False
    draws: bool = False  # Tokens are drawn by lot although temperature 0 was asked for: answers are then not repeatable.
    alone_s: float = 0.0  # A small request on the idle server, for judging hangs.
    notes: list[str] = field(default_factory=list)
    fresh: bool = True  # Nobody has sent the prompts of this audit to this server before.
    heard: set[int] = field(default_factory=set)  # Numbers of the answers in which canaries were searched.

    def ask(
        self,
        prompt: str,
        *,
        tokens: int,
        label: str,
        max_tokens: int = 8,
        chat: bool | None = None,
        logprobs: bool = True,
        stream: bool = False,
        tenant: int = 0,
    ) -> Ask:
        """An `Ask` of about `tokens` prompt tokens at the endpoint that the target has, with logprobs where it gives them."""
        kind = self.target.plain if chat is None else chat
        alternatives = self.target.logprobs.get(kind, 0) if logprobs else 0
        return Ask(
            prompt,
            max_tokens=max_tokens,
            chat=kind,
            stream=stream and kind in self.target.streamed,
            logprobs=alternatives,
            tenant=tenant,
            prompt_tokens=tokens,
            label=label,
        )

    def other_tenant(self, tenant: int) -> int:
        return (tenant + 1) % max(1, self.tenants)

    def listen(self, answers: list[Answer], result: ProbeResult) -> list[Hit]:
        """Searches answers, each once, for canaries of anyone else and records a finding for the first one."""
        hits: list[Hit] = []
        for answer in answers:
            if answer.number in self.heard:
                continue
            self.heard.add(answer.number)
            alternatives = [[step.token, *(token for token, _ in step.top)] for step in answer.steps]
            prompt = answer.ask.prompt if isinstance(answer.ask.prompt, str) else ""
            for hit in self.aviary.search(f"{answer.text} {answer.error_message}", alternatives, prompt):
                hits.append(hit)
                confidence = Confidence.PROVEN
                result.find(
                    Finding(
                        "leak.canary",
                        Grade.LEAK,
                        confidence,
                        "an answer holds text of somebody else's request",
                        f"A canary planted by {hit.canary.owner} came back in the {hit.where} of a request that never"
                        f" held it: {hit.run} of its"
                        f" words in a row. Chance alone would do this in at most {hit.chance:.1g} of audits.",
                        "Take the server out of use for more than one tenant until its KV cache reuse is fixed; see the advisories.",
                        (exhibit(answer, f"canary of {hit.canary.owner}: {hit.canary.text}; seen: {hit.excerpt}"),),
                    )
                )
        return hits


@dataclass(frozen=True, slots=True)
class Probe:
    """`cost` bounds the requests before anything is sent; `run` does the work into a `ProbeResult`."""

    name: str
    title: str
    cost: Callable[[Target, Depth, int], Cost]
    run: Callable[[Scene, ProbeResult], Awaitable[None]]


def exhibit(answer: Answer, what: str = "") -> Exhibit:
    """One answer as evidence."""
    ask = answer.ask
    kind = ("chat" if ask.chat else "completions") + (", stream" if ask.stream else "")
    size = f"about {ask.prompt_tokens} prompt tokens, max_tokens {ask.max_tokens}"
    came = f"status {answer.status}, {answer.end.value}"
    if answer.finish_reason is not None:
        came += f", finish_reason {answer.finish_reason}"
    if answer.prompt_tokens is not None:
        came += f", usage {answer.prompt_tokens}+{answer.completion_tokens}"
    if answer.cached_tokens:
        came += f" ({answer.cached_tokens} cached)"
    came += f", {answer.total_s:.2f} s"
    said = answer.error_message or answer.note or answer.text
    label = f"#{answer.number} {ask.label} ({kind}; {size})"
    return Exhibit(label, what, f"{came}: {said[:240]!r}", answer.server_id[:80])


def hung(answer: Answer) -> bool:
    return answer.end is End.TIMEOUT
