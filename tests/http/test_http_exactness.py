"""The same request gives the same answer, to the token: alone, in a crowd, after others, with its prefix cached or not (L13)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from servers import ServerProcess

QUESTIONS = [
    "Name a colour.",
    "What is two plus two?",
    "Write a haiku about rain.",
    "Say hello in French.",
    "Who wrote Hamlet?",
    "List three fruits.",
    "What does a cat say?",
    "Why is the sky blue?",
]
CROWD = 32


def _body(i: int) -> dict[str, Any]:
    text = QUESTIONS[i % len(QUESTIONS)] + " Please." * (i // len(QUESTIONS))
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
        "return_token_ids": True,
        "cache_salt": f"salt-{i % 3}",
    }


def test_a_crowd_of_32_equals_each_alone(server: ServerProcess) -> None:
    alone = [server.client.post("/v1/chat/completions", json=_body(i)).raise_for_status().json() for i in range(CROWD)]

    async def crowd() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=CROWD)) as client:
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=_body(i)) for i in range(CROWD)))
        return [answer.raise_for_status().json() for answer in answers]

    together = asyncio.run(crowd())
    for one, other in zip(alone, together, strict=True):
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
        assert one["choices"][0]["message"] == other["choices"][0]["message"]
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the second time the prefix was there"


def test_salts_do_not_share(server: ServerProcess) -> None:
    def cached(**more: str) -> int:
        body = {
            "prompt": "A prompt that nobody else uses, long enough to fill a page or two of the cache, and then a few more words.",
            "max_tokens": 1,
        }
        answer = server.client.post("/v1/completions", json=body | more).raise_for_status().json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
    assert cached(prompt_cache_key="one") == 0
    assert cached() == 0


def test_all_pages_come_back(server: ServerProcess) -> None:
    server.wait_until(lambda seen: seen["kvseal_kv_pages[leased]"] == 0)
    seen = server.metrics()
    assert seen["kvseal_kv_pages[quarantined]"] == 0
    assert all(value == 0 for name, value in seen.items() if name.startswith("kvseal_broken_seals"))
