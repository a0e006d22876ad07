"""Slow or stuck? A prompt that got no answer in time is a hang only if this server, at its pace of that moment, had the time.

Asks shorter prompts right after the silence, reckons from them how long the silent one should have taken, and gives it several times as
much. Owns no finding. Laws: slowness is not called a hang; a spent budget is no verdict.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from kvseal.audit.budget import BudgetSpent
from kvseal.audit.probes.base import Scene, hung
from kvseal.audit.wire import Answer, Ask

_PATIENCE = 4.0
"""So many times as long as reckoned may a prompt take before it counts as hung."""
_GROWTH = 1.5
"""Time grows with the length of a prompt to this power at most: attention costs its square, all else grows in proportion."""
_SMALL_TOKENS = 64
_CROWDED = 8.0
_SAMPLE_S = 0.02
MOST_ASKS = 3
"""What a hang costs at most beyond the prompt itself: two shorter prompts, and the same prompt again."""


@dataclass(frozen=True, slots=True)
class Patient:
    """`answer` is the last one; `reckoned_s` how long it should have taken (None: nothing was answered any more); `undecided` says why slow
    cannot be told from stuck, and is empty where it can."""

    answer: Answer
    reckoned_s: float | None = None
    undecided: str = ""


async def ask_patiently(scene: Scene, ask: Ask, tokens: int) -> Patient:
    """Asks; after a silence asks again with the time that this server needs. `tokens` is the length of the prompt. Raises `BudgetSpent`
    only where nothing was silent yet."""
    first = await scene.client.ask(ask)
    if not hung(first):
        return Patient(first)
    usual_s = scene.client.settings.timeout_s
    reckoned_s: float | None = None
    try:
        reckoned_s = await _reckon(scene, ask, tokens)
        if reckoned_s is None:
            return Patient(first)
        again = await scene.client.ask(replace(ask, label=f"{ask.label}, again"), timeout_s=max(usual_s, _PATIENCE * reckoned_s))
        return Patient(again, reckoned_s)
    except BudgetSpent as error:
        if reckoned_s is not None and _PATIENCE * reckoned_s < usual_s:
            return Patient(first, reckoned_s)
        at_pace = "" if reckoned_s is None else f"; at its pace {reckoned_s:.0f} s would be due"
        said = f"a prompt of {tokens} tokens was not answered within {usual_s:g} s{at_pace}, and before slow could be told from stuck"
        return Patient(first, reckoned_s, f"{said} {error}")


def crowded() -> bool:
    """Has this very machine no time? True when computing takes many times as long by the clock as by the processor: a server on the same
    machine may then be silent for minutes with nothing wrong in it."""
    began_s, computed_s = time.monotonic(), time.process_time()
    while time.process_time() - computed_s < _SAMPLE_S:
        sum(range(1_000))
    return time.monotonic() - began_s > _CROWDED * _SAMPLE_S


async def _reckon(scene: Scene, ask: Ask, tokens: int) -> float | None:
    """How many seconds a prompt of `tokens` takes now, from the longest shorter one that is answered; None when none is."""
    limit = scene.target.context_tokens or tokens
    for size in (min(tokens, limit) // 4, _SMALL_TOKENS):
        if size < 16 or size >= tokens:
            continue
        text = scene.target.gauge.text(size, scene.draw, chat=ask.chat)
        shorter = replace(ask, prompt=text, prompt_tokens=size, max_tokens=1, label=f"how fast is the server now? {size} tokens")
        answer = await scene.client.ask(shorter)
        if answer.ok:
            return answer.total_s * math.pow(min(tokens, limit) / size, _GROWTH)
    return None
