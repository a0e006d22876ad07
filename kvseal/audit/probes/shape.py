"""The noise of batch shapes: how far logprobs move when the same tokens are computed in another shape, with no reuse at all.

A prompt computed at once and the same tokens computed one by one go through other kernels; a warm answer differs from a cold one by as
much, with nothing wrong in the cache. Only a server that can be told not to reuse shows this apart from reuse. Owns no finding.
"""

from __future__ import annotations

from kvseal.audit.probes.base import Scene
from kvseal.audit.prompts import filler
from kvseal.audit.wire import Json, dig, whole

MOST_SHAPE_NATS = 0.25
"""A server may excuse no more than this: beyond it, its numerics would hide anything."""
_PROMPT_TOKENS = (16, 64, 160)
_OUTPUT_TOKENS = 16
_SPLIT = 8

_Odds = dict[int, float]


async def shape_floor(scene: Scene) -> float | None:
    """The largest move (nats) of a logprob between tokens generated one by one and the same tokens sent as a prompt, both uncached.

    None where the server has no known switch against reuse (llama.cpp's `cache_prompt` is one), or does not follow it.
    """
    if scene.target.engine != "llamacpp" or not scene.target.completions:
        return None
    floor: float | None = None
    for words in _PROMPT_TOKENS:
        if words + _OUTPUT_TOKENS + 8 > min((*scene.target.limits(), 1 << 30)):
            break
        reply = await scene.client.post("/tokenize", {"content": filler(words, scene.draw).lstrip()}, root=True)
        listed = dig(reply.json, "tokens")
        prompt = [token for token in listed if isinstance(token, int)] if isinstance(listed, list) else []
        one_by_one = await _uncached(scene, prompt, _OUTPUT_TOKENS)
        ids = [token for token, _ in one_by_one]
        at_once = await _uncached(scene, prompt + ids[:_SPLIT], _OUTPUT_TOKENS - _SPLIT)
        if (move := _move(one_by_one[_SPLIT:], at_once)) is not None:
            floor = max(floor or 0.0, move)
    return None if floor is None else min(floor, MOST_SHAPE_NATS)


async def _uncached(scene: Scene, prompt: list[int], max_tokens: int) -> list[tuple[int, _Odds]]:
    """Token ids and what the likely ones were worth; empty when the server does not say, or did reuse something."""
    body: dict[str, Json] = {
        "model": scene.target.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "seed": 1, "logprobs": 5,
        "cache_prompt": False,
    }  # fmt: skip
    reply = await scene.client.post("/completions", body) if prompt else None
    content = dig(reply.json, "choices", 0, "logprobs", "content") if reply is not None else None
    if reply is None or not isinstance(content, list) or whole(dig(reply.json, "usage", "prompt_tokens_details", "cached_tokens")):
        return []
    steps: list[tuple[int, _Odds]] = []
    for step in content:
        token, top = dig(step, "id"), dig(step, "top_logprobs")
        if not isinstance(token, int) or not isinstance(top, list):
            return []
        odds = {dig(entry, "id"): dig(entry, "logprob") for entry in top if isinstance(dig(entry, "logprob"), float)}
        steps.append((token, odds))
    return steps


def _move(one: list[tuple[int, _Odds]], other: list[tuple[int, _Odds]]) -> float | None:
    """The largest move over the tokens that both began with, and the first that differs."""
    move: float | None = None
    for (token, odds), (other_token, other_odds) in zip(one, other, strict=False):
        for name in odds.keys() & other_odds.keys():
            move = max(move or 0.0, abs(odds[name] - other_odds[name]))
        if token != other_token:
            break
    return move
