"""A router whose only nodes stand still: what is open waits for them, and at the end of the router has an outcome."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kvseal.core.errors import Draining
from kvseal.core.outcome import Completed, Failed
from kvseal.lab.rig import truth
from kvseal.node import client as client_module

from .fleets import Fleet, config, prompt, read, request


def test_draining_ends_what_frozen_nodes_do_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CLOSE_TIMEOUT_S", 0.2)
    fleet = Fleet(config("prefill", model="oracle-slow"), config("decode", model="oracle-slow"))
    router = fleet.router

    async def end() -> None:
        stream = router.submit(request("open", prompt(1, 90), 500))
        await anext(stream)
        for node in router.fleet.nodes:
            os.kill(node.pid or 0, signal.SIGSTOP)
        try:
            assert not await router.drain(0.1)
            answer = await asyncio.wait_for(read(stream), 5)
        finally:
            for node in router.fleet.nodes:
                os.kill(node.pid or 0, signal.SIGCONT)
        assert isinstance(answer.outcome, Failed) and isinstance(answer.outcome.error, Draining)
        assert router.open_requests == 0

    try:
        fleet.run(end())
    finally:
        fleet.close()


def test_what_can_go_nowhere_else_waits_for_its_node() -> None:
    tokens = prompt(2, 90)
    fleet = Fleet(config("prefill"), config("decode"), frozen_after_s=0.5)
    router = fleet.router

    async def wait() -> None:
        pids = [node.pid or 0 for node in router.fleet.nodes]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            stream = router.submit(request("waits", tokens))
            await fleet.until(lambda: not any(router.fleet.usable(node) for node in router.fleet.nodes))
            await asyncio.sleep(0.5)
            assert router.open_requests == 1 and not stream.ended
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        answer = await read(stream)
        assert isinstance(answer.outcome, Completed) and answer.tokens == truth(tokens, 6)
        await fleet.settled()

    try:
        fleet.run(wait())
    finally:
        fleet.close()


def test_a_prefill_node_that_freezes_with_its_prompt_computed_is_not_waited_for(tmp_path: Path) -> None:
    """Its answer is complete and its hand-off is not: what sees that is the router, long before silence would be."""
    tokens, doomed = prompt(7, 100), tmp_path / "oracle-stop-before-manifest"
    fleet = Fleet(config("prefill", model=doomed, silence_s=200.0), config("decode", silence_s=200.0), frozen_after_s=1.0)
    router = fleet.router
    try:
        answer = fleet.run(read(router.submit(request("computed", tokens, deadline_s=60.0))))
        assert doomed.with_name(doomed.name + ".died").exists()
        assert isinstance(answer.outcome, Completed) and answer.tokens == truth(tokens, 6)
        counted = fleet.run(router.stats()).handoff
        assert counted["lost"] == counted["recomputed"] == counted["failed_peer_gone"] == 1
        os.kill(fleet.node("prefill-0").pid or 0, signal.SIGCONT)
        fleet.run(fleet.settled())
    finally:
        fleet.close()
