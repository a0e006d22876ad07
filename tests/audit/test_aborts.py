"""Who goes on generating for clients that have gone? Waits of others tell, and the server's own count where it has room for all."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from kvseal.audit.budget import Budget
from kvseal.audit.client import Client, ClientSettings
from kvseal.audit.findings import ProbeResult
from kvseal.audit.probes.aborts import _idle_s, _slots_come_back, _Try, _waited_s
from kvseal.audit.runner import AuditSettings, _first_look
from kvseal.audit.wire import Answer, Ask, End

from .rates import traits_for
from .standin import Standin

_ROOM = 32  # More places than the auditor may ever use: nobody waits, whoever goes on.


def _answer(end: End, first_s: float | None, total_s: float) -> Answer:
    return Answer(Ask("x", max_tokens=1), end=end, status=200, first_s=first_s, total_s=total_s)


def _tried(waited_s: float, *, rest_s: float = 1.0, counted: bool | None = None) -> _Try:
    return _Try(rest_s, waited_s, counted, _answer(End.ANSWERED, 0.01, 0.01))


def test_who_waited_is_seen_among_those_that_hung_up_themselves() -> None:
    """Of three that were sent at 0 s the second got its place 1.1 s after the first hung up; the third never got one, and was given up."""
    first, second, third = _answer(End.CANCELLED, 0.1, 0.2), _answer(End.CANCELLED, 1.3, 1.4), _answer(End.TIMEOUT, None, 4.0)
    ended = [(0.2, first), (1.4, second), (4.0, third)]
    assert _waited_s(first, 0.2, ended) == 0.0
    assert _waited_s(second, 1.4, ended) == pytest.approx(1.1)
    assert _waited_s(third, 4.0, ended) == pytest.approx(2.6)


def test_a_place_is_blocked_by_a_wait_or_by_the_servers_count() -> None:
    assert not _tried(0.02).blocked(0.02) and _tried(0.9).blocked(0.02) and _tried(0.02, counted=True).blocked(0.02)
    assert _tried(0.02).tells(0.02) and not _tried(0.02).tells(0.3)


async def _slots(fault: str, *, metrics: bool = True) -> ProbeResult:
    traits = replace(traits_for("keeps-generating", 1), places=_ROOM, metrics=metrics)
    async with Standin(fault, 1, traits).server() as server:
        settings = AuditSettings(ClientSettings(server.url, keys=traits.keys, timeout_s=4.0))
        async with Client(settings.client, Budget(settings.allowance)) as client:
            scene, result = await _first_look(settings, client, random.Random(1)), ProbeResult("aborts", "Aborts")
            small = scene.ask("A small request", tokens=24, max_tokens=1, stream=True, logprobs=False, label="small request")
            await _slots_come_back(scene, result, small, await _idle_s(scene, small))
            return result


def test_a_server_with_room_for_all_is_told_by_its_own_count() -> None:
    (finding,) = asyncio.run(_slots("keeps-generating")).findings
    assert finding.rule == "aborts.keeps-generating" and "metrics went on counting them" in finding.proof


def test_an_honest_server_with_room_for_all_is_clean() -> None:
    result = asyncio.run(_slots(""))
    assert result.findings == [] and len(result.proved) == 1 and result.unproven == []


def test_without_metrics_room_for_all_stays_open() -> None:
    """Nobody waits there, whether the server goes on or not: that must not look proved."""
    result = asyncio.run(_slots("keeps-generating", metrics=False))
    assert result.findings == [] and "more places than the 4 requests" in result.unproven[0]
