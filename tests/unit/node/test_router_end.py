"""The end of a router: every request has an outcome, whatever its nodes do."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvseal.core.errors import Draining
from kvseal.core.outcome import Failed
from kvseal.node import router as router_module

from .fleets import Fleet, config, prompt, read, request


def test_draining_ends_what_frozen_nodes_do_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "CLOSE_TIMEOUT_S", 0.2)
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
