"""A node is healthy while it works: one that is stopped is seen, one that only takes long over a step is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from kvseal.core.clock import ManualClock
from kvseal.node import node_client
from kvseal.node.client import STALL_AFTER_S, EngineState
from kvseal.node.node_client import NodeClient
from kvseal.node.spawn import cpu_ticks

from .fleets import LAB, config


def test_a_stopped_node_stands_still_and_one_that_computes_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look() -> None:
        clock = ManualClock()
        node = await NodeClient.start_node(config("decode"), module=LAB, clock=clock)
        try:
            assert node.pid is not None
            os.kill(node.pid, signal.SIGSTOP)
            await asyncio.sleep(0.05)
            clock.advance(1.0)
            assert node.still_s <= 1.0
            clock.advance(6.0)
            assert node.still_s == 6.0, "it computes nothing"
            ticks = iter(range(10**6, 10**7))
            monkeypatch.setattr(node_client, "cpu_ticks", lambda pid: next(ticks))
            assert node.still_s == 0.0, "it computes"
            clock.advance(STALL_AFTER_S)
            assert node.still_s == node.last_progress_age_s > STALL_AFTER_S and node.state is EngineState.STALLED, "and never gets anywhere"
            monkeypatch.setattr(node_client, "cpu_ticks", lambda pid: None)
            assert node.still_s == node.last_progress_age_s, "where the system does not say, answers alone count"
            os.kill(node.pid, signal.SIGCONT)
        finally:
            await node.close()

    asyncio.run(asyncio.wait_for(look(), 60))


def test_ticks_are_those_of_the_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        first, give_up_s = cpu_ticks(child.pid), time.monotonic() + 30
        assert first is not None
        while cpu_ticks(child.pid) == first:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert cpu_ticks(child.pid) is None
