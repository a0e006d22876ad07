"""Fleets of real processes on the oracle model, for the tests of router and workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvseal.core.config import EngineConfig, NodeConfig, TLSFiles
from kvseal.core.events import EndedEvent, TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Outcome
from kvseal.core.request import Request, SamplingParams
from kvseal.lab.rig import SCOPE
from kvseal.node.link_server import LinkServer
from kvseal.node.node_client import NodeClient
from kvseal.node.router import Router
from kvseal.node.stream import RequestStream

LAB = "kvseal.lab.node_process"
HOST = "127.0.0.1"
SECRET = b"a secret of the tests"
T = TypeVar("T")


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + at * 104_729) % 4000 for at in range(tokens)]


def request(name: str, tokens: Iterable[int], output: int = 6, *, scope: Scope = SCOPE, **fields: Any) -> Request:
    sampling = SamplingParams(temperature=0.0)
    return Request(
        request_id=RequestId(name),
        prompt_tokens=tuple(tokens),
        max_output_tokens=output,
        scope=scope,
        **{"sampling": sampling} | fields,
    )


@dataclass
class Read:
    tokens: list[int]
    outcome: Outcome
    cached_tokens: int = 0


async def read(stream: RequestStream) -> Read:
    tokens: list[int] = []
    cached, ends = 0, []
    async for event in stream:
        if isinstance(event, TokensEvent):
            tokens += event.tokens
            cached = event.cached_tokens
        else:
            ends.append(event)
    (end,) = ends
    assert isinstance(end, EndedEvent)
    return Read(tokens, end.outcome, cached)


def config(
    role: str, number: int = 0, *, model: str | Path = "oracle", on_failure: str = "recompute", silence_s: float = 5.0
) -> EngineConfig:
    node = NodeConfig(role=role, name=f"{role}-{number}", secret=SECRET, on_failure=on_failure, silence_s=silence_s)
    return EngineConfig(model=Path(model), pool_tokens=1024, page_tokens=8, chunk_tokens=32, node=node)


async def nodes(*configs: EngineConfig) -> list[NodeClient]:
    return list(await asyncio.gather(*(NodeClient.start_node(one, module=LAB) for one in configs)))


@asynccontextmanager
async def worker(config: EngineConfig, tls: TLSFiles | None = None, port: int = 0) -> AsyncIterator[tuple[NodeClient, LinkServer]]:
    """A node and its links on a port (0: a free one); both are closed in the end."""
    (node,) = await nodes(config)
    links = LinkServer(node, SECRET, tls)
    await links.listen(HOST, port)
    try:
        yield node, links
    finally:
        await links.close()
        await node.close()


class Fleet:
    """A router and its nodes on a loop of their own, for synchronous tests that share them."""

    def __init__(self, *configs: EngineConfig, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.router: Router = self.run(self._start(configs, options), 900.0)

    async def _start(self, configs: tuple[EngineConfig, ...], options: dict[str, Any]) -> Router:
        return Router(await nodes(*configs), secret=SECRET, **options)

    def run(self, what: Coroutine[Any, Any, T], timeout_s: float = 280.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(what, timeout_s))

    def node(self, name: str) -> NodeClient:
        node = self.router.fleet.named(name)
        assert node is not None
        return node

    async def until(self, what: Any, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not what():
                await asyncio.sleep(0.01)

    async def settled(self) -> None:
        """No page of any node is leased, draining or out of use."""
        async with asyncio.timeout(60.0):
            while True:
                stats = await self.router.stats()
                if not (stats.pages_leased or stats.pages_draining or stats.pages_quarantined or stats.running or stats.waiting):
                    assert stats.pages_free + stats.pages_sealed == stats.pages_total
                    return
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self.run(self.router.close())
        self.loop.close()
