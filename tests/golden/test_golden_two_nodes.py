"""The demo model on two nodes, real processes and real hand-offs, beside one engine: the same tokens and the same log-probabilities, to the
bit (L13), greedy and sampled, whatever the chunks, the threads and the way the pages go."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from kvseal.core.batch import TokenLogprobs
from kvseal.core.config import EngineConfig, NodeConfig
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Completed
from kvseal.core.request import Request, SamplingParams
from kvseal.node.client import EngineClient
from kvseal.node.node_client import NodeClient
from kvseal.node.router import Router
from kvseal.node.stream import RequestStream

SECRET = b"a secret of the tests"
SCOPE = Scope(bytes(range(16)))
PROMPT_TOKENS = (97, 160, 353)
"""In pages of 16: one slot of the last page; exactly full; several chunks, the last page one slot again."""
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=29, logprobs=2)
Answer = tuple[list[int], list[TokenLogprobs]]


def asked() -> list[Request]:
    """Every length greedy and sampled; the last begins like one that came before."""
    found = [
        Request(
            request_id=RequestId(f"two-{length}-{sampling.temperature}"),
            prompt_tokens=tuple((length * 7919 + at * 104_729 + place) % 40_000 for at in range(length)),
            max_output_tokens=10,
            scope=SCOPE,
            sampling=sampling,
        )
        for place, sampling in enumerate((GREEDY, SAMPLED))
        for length in PROMPT_TOKENS
    ]
    longer = found[2].prompt_tokens[:200] + (17,) * 90
    return [*found, replace(found[0], request_id=RequestId("two-again"), prompt_tokens=longer)]


async def read(stream: RequestStream) -> Answer:
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    async for event in stream:
        if isinstance(event, TokensEvent):
            tokens += event.tokens
            logprobs += event.logprobs
        else:
            assert isinstance(event.outcome, Completed), event.outcome
    return tokens, logprobs


async def one_node(config: EngineConfig) -> dict[str, Answer]:
    """One after the other, by itself."""
    client = await EngineClient.start(config)
    try:
        return {request.request_id: await read(client.submit(request)) for request in asked()}
    finally:
        await client.close()


def node(config: EngineConfig, role: str, listen: str | None, **sizes: int) -> EngineConfig:
    return replace(config, node=NodeConfig(role=role, name=f"{role}-0", secret=SECRET, listen=listen), **sizes)  # type: ignore[arg-type]


async def two_nodes(config: EngineConfig, listen: str | None) -> tuple[dict[str, Answer], dict[str, int]]:
    """All at once."""
    configs = (node(config, "prefill", listen, chunk_tokens=96), node(config, "decode", listen, threads=2))
    nodes = await asyncio.gather(*map(NodeClient.start_node, configs))
    router = Router(nodes, secret=SECRET)
    try:
        await router.prove(Scope(secrets.token_bytes(16)))
        streams = {request.request_id: router.submit(request) for request in asked()}
        answers = dict(zip(streams, await asyncio.gather(*map(read, streams.values())), strict=True))
        return answers, dict((await router.stats()).handoff)
    finally:
        await router.close()


WAYS = {"fp16 over shm": ("fp16", None), "int4 over shm": ("int4", None), "fp16 over tcp": ("fp16", "127.0.0.1")}


@pytest.mark.parametrize("way", ["int4 over shm", "fp16 over tcp", pytest.param("fp16 over shm", marks=pytest.mark.slow)])
def test_two_nodes_answer_like_one(way: str, demo_model_path: Path) -> None:
    kv_dtype, listen = WAYS[way]
    config = EngineConfig(model=demo_model_path, kv_dtype=kv_dtype, pool_tokens=8_192, threads=1)
    right = asyncio.run(asyncio.wait_for(one_node(config), 600))
    found, counted = asyncio.run(asyncio.wait_for(two_nodes(config, listen), 600))
    assert found == right
    assert len({tuple(tokens) for tokens, _ in found.values()}) > 5, "answers that are all the same show nothing"
    assert counted["split"] >= len(PROMPT_TOKENS) * 2 and counted["received"] >= counted["split"]
    assert not counted.get("recomputed") and not counted.get("differed") and not counted.get("placed_again"), counted
