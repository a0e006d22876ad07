"""Which way pages go: what was asked for, else what suits where the nodes are."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from kvseal.core.clock import ManualClock
from kvseal.core.config import NodeConfig
from kvseal.core.errors import ConfigError
from kvseal.core.outcome import Completed, Failed, Refused
from kvseal.handoff.nixl import installed as nixl_installed
from kvseal.lab.oracle_node import oracle_node
from kvseal.lab.rig import truth
from kvseal.node.router import Router

from .fleets import SECRET, Fleet, config, nodes, prompt, read, request


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


@pytest.mark.skipif(not nixl_installed(), reason="the extra [nixl] is not installed")
def test_nodes_over_nixl_and_the_death_of_each() -> None:
    asked = []
    for role in ("prefill", "decode"):
        made = config(role, silence_s=1.5)
        assert made.node is not None
        asked.append(replace(made, node=replace(made.node, transport="nixl")))
    fleet = Fleet(*asked)
    try:
        for turn, victim in enumerate(("prefill-0", "decode-0", "")):
            answer = fleet.run(read(fleet.router.submit(request(f"a-{turn}", prompt(turn, 90)))))
            assert isinstance(answer.outcome, Completed) and answer.tokens == truth(prompt(turn, 90), 6)
            assert fleet.run(fleet.router.stats()).handoff["received"] >= 1
            if victim:
                open_ = [fleet.router.submit(request(f"b-{turn}-{at}", prompt(10 + at, 120))) for at in range(3)]
                node = fleet.node(victim)
                fleet.run(asyncio.sleep(0.05))
                os.kill(node.pid or 0, signal.SIGKILL)
                for at, stream in enumerate(open_):
                    found = fleet.run(read(stream))
                    right = truth(prompt(10 + at, 120), 6)
                    assert found.tokens == right[: len(found.tokens)]
                    assert found.tokens == right or isinstance(found.outcome, Failed | Refused), found
                fleet.run(fleet.until(lambda node=node: node.usable and node.restarts))
        fleet.run(fleet.settled())
    finally:
        fleet.close()


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
