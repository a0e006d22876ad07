"""Which way pages go: what was asked for, else what suits where the nodes are."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvseal.core.clock import ManualClock
from kvseal.core.config import NodeConfig
from kvseal.core.errors import ConfigError
from kvseal.handoff.nixl import installed as nixl_installed
from kvseal.lab.oracle_node import oracle_node
from kvseal.node.router import Router

from .fleets import SECRET, config, nodes


def name_of(**asked: str) -> str:
    node = NodeConfig(role="decode", name="decode-0", secret=bytes(32), **asked)  # type: ignore[arg-type]
    engine = oracle_node(node, None, clock=ManualClock(), secret=bytes(32))
    try:
        return engine.card.transport
    finally:
        engine.close()


def test_by_place_and_by_name() -> None:
    assert name_of() == "shm"
    assert name_of(listen="127.0.0.1") == "tcp"
    assert name_of(transport="tcp") == "tcp"
    assert name_of(listen="127.0.0.1", transport="shm") == "shm"


@pytest.mark.skipif(nixl_installed(), reason="the extra [nixl] is installed")
def test_what_is_not_installed_is_said_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'kvseal\[nixl\]'"):
        name_of(transport="nixl")


@pytest.mark.skipif(not nixl_installed(), reason="the extra [nixl] is not installed")
def test_nixl_by_name() -> None:
    assert name_of(transport="nixl") == "nixl"


def test_nodes_that_move_pages_in_different_ways_are_not_put_together() -> None:
    decode = config("decode")
    assert decode.node is not None
    other = replace(decode, node=replace(decode.node, transport="tcp"))

    async def together() -> None:
        found = await nodes(config("prefill"), other)
        try:
            with pytest.raises(ConfigError, match=r"\(shm, tcp\); give all the same --transport"):
                Router(found, secret=SECRET)
        finally:
            for one in found:
                await one.close()

    asyncio.run(together())
