"""Slow is told from stuck: by the pace of the server at that moment, and never by a budget that ended."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvseal.audit import runner
from kvseal.audit.budget import Allowance, Budget
from kvseal.audit.canary import Aviary
from kvseal.audit.client import Client, ClientSettings
from kvseal.audit.probes.base import Scene
from kvseal.audit.probes.patience import Patient, ask_patiently
from kvseal.audit.prompts import Gauge
from kvseal.audit.target import Target
from kvseal.audit.wire import End

from .rawhttp import Exchange, RawServer
from .standin import MODEL, Standin, Traits


def test_silence_on_a_machine_that_has_no_time_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the server is silent: one that refuses connections is dead whatever the machine does."""

    async def silent(http: Exchange) -> None:
        await http.gone.wait()

    async def go(gone: bool) -> bool:
        async with RawServer(silent) as server:
            settings = ClientSettings("http://127.0.0.1:9/v1" if gone else server.url, MODEL, timeout_s=0.2)
            async with Client(settings, Budget(Allowance())) as client:
                draw = random.Random(1)
                return await runner._dead(Scene(client, Target(MODEL, completions=True), Aviary(draw), draw)) is not None

    for busy in (True, False):
        monkeypatch.setattr(runner, "crowded", lambda busy=busy: busy)
        assert asyncio.run(go(gone=False)) is not busy and asyncio.run(go(gone=True))


async def _patiently(standin: Standin, tokens: int, allowance: Allowance | None = None) -> Patient:
    """A prompt of `tokens` tokens, asked where half a second is what a request usually gets."""
    draw = random.Random(1)
    async with (
        standin.server() as server,
        Client(ClientSettings(server.url, MODEL, timeout_s=0.5), Budget(allowance or Allowance())) as client,
    ):
        target = Target(MODEL, context_tokens=standin.traits.context, completions=True, gauge=Gauge({False: 0.0}, 1.0, "test"))
        scene = Scene(client, target, Aviary(draw), draw)
        return await ask_patiently(scene, scene.ask(target.gauge.text(tokens, draw, chat=False), tokens=tokens, label="long"), tokens)


def test_slow_is_not_called_stuck() -> None:
    """A server that needs longer for a long prompt than one request may take, and is honest, gets the time that it needs."""
    patient = asyncio.run(_patiently(Standin("", 1, Traits(prefill_s=4e-3)), 240))
    assert patient.answer.ok and not patient.undecided and patient.reckoned_s is not None and patient.reckoned_s > 0.5


def test_stuck_is_called_stuck() -> None:
    patient = asyncio.run(_patiently(Standin("oversize-hang", 1, Traits(context=256)), 300))
    assert patient.answer.end is End.TIMEOUT and not patient.undecided and patient.reckoned_s is not None


def test_a_budget_that_ends_before_slow_is_told_from_stuck_accuses_nobody() -> None:
    patient = asyncio.run(_patiently(Standin("", 1, Traits(prefill_s=4e-3)), 240, Allowance(requests=2)))
    assert "240 tokens was not answered within 0.5 s" in patient.undecided and "budget" in patient.undecided
