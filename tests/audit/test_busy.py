"""Servers that are busy: for a while, at the wrong moment, or for ever. None takes the whole budget, and none is asked too early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvseal.audit.budget import Allowance
from kvseal.audit.client import ClientSettings
from kvseal.audit.findings import Report, Verdict
from kvseal.audit.probes.base import Depth
from kvseal.audit.runner import AuditSettings, audit

from .rawhttp import Exchange, RawServer
from .standin import Standin, Traits

_ERROR = {"error": {"message": "come back later", "type": "x", "param": None, "code": None}}


async def _busy(http: Exchange, status: int, retry_after: str) -> None:
    await http.reply(status, _ERROR, headers={"Retry-After": retry_after} if retry_after else {})


def _audit(
    handler: Any, *, only: tuple[str, ...] = ("limits", "honesty"), timeout_s: float = 5.0, allowance: Allowance | None = None
) -> Report:
    async def go() -> Report:
        async with RawServer(handler) as server:
            client = ClientSettings(server.url, timeout_s=timeout_s)
            settings = AuditSettings(client, only=only, depth=Depth.QUICK, seed=5, allowance=allowance or Allowance())
            return await audit(settings)

    return asyncio.run(go())


def _turning(since: Callable[[Exchange], bool], status: int, retry_after: str) -> tuple[Any, list[float]]:
    """An honest server which from the first request on that `since` names refuses every generation; and when it was asked since then."""
    standin, asked_s = Standin("", 1, Traits()), list[float]()

    async def handler(http: Exchange) -> None:
        if http.path.endswith("/completions") and (asked_s or since(http)):
            asked_s.append(time.monotonic())
            await _busy(http, status, retry_after)
        else:
            await standin.handle(http)

    return handler, asked_s


@pytest.mark.parametrize(
    ("status", "retry_after", "said"),
    [(503, "0.02", "it is not ready"), (503, "3600", "it asks to come back in 3600 s"), (429, "0.02", "with less --concurrency")],
)
def test_a_server_that_refuses_from_the_first_request_on_is_not_audited(status: int, retry_after: str, said: str) -> None:
    handler, asked_s = _turning(lambda http: True, status, retry_after)
    report = _audit(handler)
    assert report.exit_status == 2 and not report.findings
    assert f"all refused with {status} ('come back later')" in report.stopped and said in report.stopped
    assert len(asked_s) <= 10


@pytest.mark.parametrize("everything", [False, True])
def test_nobody_is_waited_for_longer_than_the_minutes_of_the_audit(everything: bool) -> None:
    handler, _ = _turning(lambda http: True, 503, "40")

    async def from_the_models_on(http: Exchange) -> None:
        await _busy(http, 503, "20")

    began_s = time.monotonic()
    report = _audit(from_the_models_on if everything else handler, timeout_s=60.0, allowance=Allowance(minutes=0.02))
    assert report.exit_status == 2 and "the budget of 0.02 minutes is spent" in report.stopped
    assert time.monotonic() - began_s < 15.0


def test_a_server_that_asks_for_an_hour_before_it_lists_its_models_is_not_waited_for() -> None:
    async def handler(http: Exchange) -> None:
        await _busy(http, 503, "3600")

    began_s = time.monotonic()
    report = _audit(handler, timeout_s=120.0)
    assert report.exit_status == 2 and "asks to come back in 3600 s" in report.stopped and "it is not ready" in report.stopped
    assert time.monotonic() - began_s < 20


def test_a_server_that_stops_taking_requests_is_a_finding() -> None:
    handler, asked_s = _turning(lambda http: b"no-such-model" in http.body, 503, "0.02")
    report = _audit(handler, only=("honesty",))
    assert [finding.rule for finding in report.findings] == ["audit.server-refuses"]
    assert "all refused with 503" in report.findings[0].proof and not report.stopped
    assert len(asked_s) < 70


def test_an_oversize_prompt_that_ends_the_engine_is_named_also_where_every_later_one_is_refused() -> None:
    handler, _ = _turning(lambda http: len(http.body) > 2_500, 503, "0.02")
    report = _audit(handler, only=("limits", "leak"))
    assert {"limits.hang-takes-server", "audit.server-refuses"} <= {finding.rule for finding in report.findings}
    assert [result.skipped for result in report.results if result.probe == "leak"] == ["the server refuses every request"]


def test_a_spent_allowance_is_no_fault_of_the_server() -> None:
    """429 for good in the middle: what was shown stands, and nothing is held against the server; but the audit is not whole."""
    handler, _ = _turning(lambda http: b"no-such-model" in http.body, 429, "3600")
    report = _audit(handler, only=("limits", "honesty"))
    assert report.findings == [] and report.exit_status == 2 and report.incomplete == ["honesty"]
    assert report.results[0].verdict is Verdict.PASSED
    assert "with another key" in str([result.unproven for result in report.results])


def test_only_what_is_too_large_is_refused_with_503() -> None:
    """Many refusals in a row, but not of everything: such a server is audited to the end."""
    standin = Standin("", 1, Traits())

    async def handler(http: Exchange) -> None:
        if len(http.body) > 2_500:
            await _busy(http, 503, "0.01")
        else:
            await standin.handle(http)

    report = _audit(handler, only=("limits", "isolation"))
    assert [finding.rule for finding in report.findings] == ["limits.server-error"]
    assert not any(result.skipped for result in report.results)
