"""Servers that are slow, dying, rate-limiting, behind TLS or lying: an audit of them ends, in time, with a report."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvseal.audit.budget import Allowance, Budget
from kvseal.audit.client import Client, ClientSettings
from kvseal.audit.findings import Report
from kvseal.audit.probes.base import Depth
from kvseal.audit.report import html, junit, sarif, terminal
from kvseal.audit.report import json as json_report
from kvseal.audit.runner import AuditSettings, audit
from kvseal.audit.wire import Ask, End

from .rawhttp import Exchange, RawServer
from .standin import MODEL, Standin, Traits

MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 256}]}


def _settings(url: str, **changes: Any) -> AuditSettings:
    client = ClientSettings(url, timeout_s=changes.pop("timeout_s", 0.4), keys=changes.pop("keys", ()), **changes.pop("client", {}))
    return AuditSettings(client, depth=Depth.QUICK, seed=5, **changes)


def _all_reports(report: Report) -> str:
    """Every form of the report can be made of it."""
    forms = [json_report.render(report), junit.render(report), sarif.render(report), html.render(report), terminal.render(report)]
    json.loads(forms[0])
    json.loads(forms[2])
    return "\n".join(forms)


async def _audit(handler: Any, **changes: Any) -> Report:
    began_s = time.monotonic()
    async with RawServer(handler) as server:
        report = await audit(_settings(server.url, **changes))
    assert time.monotonic() - began_s < 45
    _all_reports(report)
    return report


async def _models_first(http: Exchange) -> bool:
    if http.path == "/v1/models":
        await http.reply(200, MODELS)
        return True
    if http.path not in ("/v1/completions", "/v1/chat/completions"):
        await http.reply(404, {"error": {"message": "no such route"}})
        return True
    return False


def test_nobody_there() -> None:
    report = asyncio.run(audit(_settings("http://127.0.0.1:9/v1")))
    assert report.exit_status == 2 and "Is the server running" in report.stopped


def test_a_server_that_never_answers() -> None:
    async def handler(http: Exchange) -> None:
        if not await _models_first(http):
            await http.gone.wait()

    report = asyncio.run(_audit(handler))
    assert report.exit_status == 2 and "no endpoint generates" in report.stopped


def test_a_server_that_drips_one_byte_at_a_time() -> None:
    async def handler(http: Exchange) -> None:
        if await _models_first(http):
            return
        await http.start_stream("application/json")
        while not http.gone.is_set():
            await http.chunk(b" ")
            await asyncio.sleep(0.01)

    assert asyncio.run(_audit(handler)).exit_status == 2


def test_a_server_that_dies_in_the_middle() -> None:
    report = asyncio.run(_run_standin("dies"))
    assert any(finding.rule == "audit.server-died" for finding in report.findings)
    assert all(result.skipped for result in report.results[1:-1])  # The last one looks through what was answered before.


async def _run_standin(fault: str, **changes: Any) -> Report:
    async with Standin(fault, 1, Traits(keys=())).server() as server:
        return await audit(_settings(server.url, **changes))


def test_a_rate_limited_server_is_asked_more_slowly_and_audited_all_the_same() -> None:
    """One in three requests gets 429; the auditor waits as told, never has more in flight than allowed, and finds nothing."""
    standin = Standin("", 1, Traits())
    count = 0

    async def handler(http: Exchange) -> None:
        nonlocal count
        count += 1
        if http.path.endswith("completions") and count % 3 == 0:
            await http.reply(
                429, {"error": {"message": "slow down", "type": "x", "param": None, "code": None}}, headers={"Retry-After": "0.01"}
            )
        else:
            await standin.handle(http)

    report = asyncio.run(_audit(handler, timeout_s=5.0, only=("leak", "limits")))
    assert [finding.rule for finding in report.findings] == [] and report.exit_status == 0


def test_retry_after_is_obeyed_and_bounded() -> None:
    times: list[float] = []

    async def handler(http: Exchange) -> None:
        times.append(time.monotonic())
        await http.reply(429, {"error": {"message": "slow down"}}, headers={"Retry-After": "0.3" if len(times) == 1 else "0"})

    async def go() -> End:
        async with RawServer(handler) as server, Client(ClientSettings(server.url, timeout_s=2.0), Budget(Allowance())) as client:
            return (await client.ask(Ask("x"))).end

    assert asyncio.run(go()) is End.REFUSED
    assert len(times) == 5 and times[1] - times[0] >= 0.29


@pytest.mark.parametrize(
    "lie",
    ["endless-body", "endless-stream", "endless-line", "wrong-type", "broken-json", "deep-json", "not-an-object", "redirect-loop",
     "bad-chunks", "empty", "strange-choices", "huge-numbers", "binary", "error-as-list", "slam"],
)  # fmt: skip
def test_a_lying_server(lie: str) -> None:
    report = asyncio.run(_audit(_liar(lie), timeout_s=3.0, only=("honesty",)))
    assert report.exit_status in (1, 2)


def _liar(lie: str) -> Any:
    async def handler(http: Exchange) -> None:
        if await _models_first(http):
            return
        stream = http.body and b'"stream": true' in http.body
        if lie in ("endless-body", "endless-stream", "endless-line"):
            await http.start_stream("text/event-stream" if stream else "application/json")
            line = b'data: {"choices":[{"text":"a"}]}\n\n' * 200 if lie == "endless-stream" else b"x" * 65_536
            while not http.gone.is_set():
                await http.chunk(line)
        elif lie == "wrong-type":
            await http.reply(200, b"<html>hello</html>", kind="text/html")
        elif lie == "broken-json":
            await http.reply(200, b'{"choices": [{"text": "a"')
        elif lie == "deep-json":
            await http.reply(200, b"[" * 200_000)
        elif lie == "not-an-object":
            await http.reply(200, [1, 2, 3])
        elif lie == "redirect-loop":
            await http.reply(302, b"", headers={"Location": http.path})
        elif lie == "bad-chunks":
            http.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
            await http.writer.drain()
            http.writer.close()
        elif lie == "empty":
            await http.reply(200, b"")
        elif lie == "strange-choices":
            await http.reply(
                200, {"choices": [{"text": 5, "logprobs": {"content": 7, "tokens": "no", "top_logprobs": {}}}], "usage": "none"}
            )
        elif lie == "huge-numbers":
            body = {
                "id": 3,
                "choices": [
                    {
                        "text": "a",
                        "message": {"content": "a"},
                        "finish_reason": "stop",
                        "logprobs": {"tokens": ["a"], "token_logprobs": [1e999]},
                    }
                ],
            }
            await http.reply(200, {**body, "usage": {"prompt_tokens": -5, "completion_tokens": 10**30}})
        elif lie == "binary":
            await http.reply(200, bytes(range(256)) * 10)
        elif lie == "error-as-list":
            await http.reply(500, {"error": [{"message": {"deep": 1}}]})
        else:
            http.slam()

    return handler


def test_models_that_are_no_list() -> None:
    async def handler(http: Exchange) -> None:
        await http.reply(200, {"data": {"id": 5}})

    assert asyncio.run(_audit(handler)).exit_status == 2


SECRET = "sk-very-secret-key-0123456789"


def _said_everywhere(report: Report) -> None:
    text = _all_reports(report)
    assert SECRET not in text and "secret" not in text and "key-" in text


def test_a_key_that_a_refusal_echoes_is_in_no_report() -> None:
    """Also not half of it, where a text is cut to its first letters."""

    async def handler(http: Exchange) -> None:
        key = http.headers.get("authorization", "")
        if http.path == "/v1/models":
            await http.reply(200, MODELS)
        else:
            await http.reply(401, {"error": {"message": "x" * (480 if http.body else 180) + f" bad key {key}"}})

    async def go() -> Report:
        async with RawServer(handler) as server:
            return await audit(_settings(server.url, keys=(SECRET,)))

    _said_everywhere(asyncio.run(go()))


def test_a_key_that_answers_echo_in_every_field_is_in_no_report() -> None:
    async def handler(http: Exchange) -> None:
        key = http.headers.get("authorization", "").removeprefix("Bearer ")
        if http.path == "/v1/models":
            await http.reply(200, {"data": [{"id": f"model-{key}", "max_model_len": 256, "owned_by": key}]})
        elif http.path in ("/v1/completions", "/v1/chat/completions") and b'"stream": true' in http.body:
            await http.start_stream()
            for letter in key:
                await http.event(
                    {"id": key, "choices": [{"index": 0, "text": letter, "delta": {"content": letter}, "finish_reason": None}]}
                )
            await http.event({"id": key, "choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": key}]})
            await http.event("[DONE]")
            await http.end_stream()
        elif http.path in ("/v1/completions", "/v1/chat/completions"):
            usage = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
            choice = {"text": f" it is {key}", "message": {"role": "assistant", "content": f"it is {key}"}, "finish_reason": key}
            await http.reply(200, {"id": key, "choices": [choice], "usage": usage}, headers={"x-request-id": key})
        else:
            await http.reply(404, f"no route for {key}".encode(), kind=f"text/{key}")

    async def go() -> Report:
        async with RawServer(handler) as server:
            return await audit(_settings(server.url, keys=(SECRET,), timeout_s=2.0, only=("leak", "honesty", "limits")))

    report = asyncio.run(go())
    assert report.findings
    _said_everywhere(report)


def test_a_server_that_still_loads_its_model_is_waited_for() -> None:
    standin, asked = Standin("", 1, Traits()), iter(range(2))

    async def handler(http: Exchange) -> None:
        if http.path == "/v1/models" and next(asked, None) is not None:
            await http.reply(503, {"error": {"message": "Loading model"}}, headers={"Retry-After": "0"})
        else:
            await standin.handle(http)

    report = asyncio.run(_audit(handler, timeout_s=5.0, only=("honesty",)))
    assert report.stopped == "" and report.exit_status == 0


def test_a_server_that_never_gets_ready_is_given_up() -> None:
    async def handler(http: Exchange) -> None:
        await http.reply(503, {"error": {"message": "Loading model"}})

    report = asyncio.run(_audit(handler))
    assert report.exit_status == 2 and "answered 503 ('Loading model') for 0 s: it is not ready" in report.stopped


def test_never_more_in_flight_than_told() -> None:
    async def go() -> int:
        async with (
            Standin("", 1, Traits()).server() as server,
            Client(ClientSettings(server.url, MODEL, concurrency=3), Budget(Allowance())) as client,
        ):
            await client.ask_all([Ask(f"prompt {number}") for number in range(20)])
            return client.in_flight_peak

    assert asyncio.run(go()) == 3


@pytest.mark.parametrize("allowance", [Allowance(requests=60), Allowance(tokens=3_000), Allowance(minutes=0.01)])
def test_a_spent_budget_ends_the_audit_and_says_so(allowance: Allowance) -> None:
    report = asyncio.run(_run_standin("", allowance=allowance, timeout_s=3.0))
    assert report.requests <= allowance.requests and report.tokens <= allowance.tokens
    assert "budget" in report.stopped + "".join(result.skipped + "".join(result.unproven) for result in report.results)
    assert not report.findings and report.exit_status == 2  # A part of an audit is no clean one.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize(("how", "status"), [("unknown", 2), ("insecure", 0), ("ca", 0)])
def test_tls_is_verified_unless_told_otherwise(certificate: tuple[Path, Path], how: str, status: int) -> None:
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    how_to: dict[str, Any] = {"unknown": {}, "insecure": {"verify": False}, "ca": {"ca_file": str(cert)}}[how]

    async def go() -> Report:
        async with RawServer(Standin("", 1, Traits()).handle, context) as server:
            return await audit(_settings(server.url, only=("limits",), timeout_s=5.0, client=how_to))

    report = asyncio.run(go())
    assert report.exit_status == status
    if status:
        assert "certificate" in report.stopped.lower()


def test_what_the_end_of_the_budget_cuts_off_is_no_hang() -> None:
    """Every probe gets its share of the minutes, and what the auditor itself gives up is held against nobody."""
    first, numbers = iter(range(8)), itertools.count()  # So many requests are answered at once, for discovery.

    async def handler(http: Exchange) -> None:
        if http.path == "/metrics":
            await http.reply(200, b"vllm:num_requests_running 0\n", kind="text/plain")
            return
        if await _models_first(http):
            return
        body = http.json
        quick = next(first, None) is not None or (body["max_tokens"] == 1 and len(http.body) < 200)
        if not quick:
            await http.gone.wait()
        elif body.get("stream"):
            await http.reply(400, {"error": {"message": "no streams"}})
        else:
            words = len(str(body.get("prompt") or body["messages"][0]["content"]).split())
            usage = {"prompt_tokens": words + 1, "completion_tokens": 1, "total_tokens": words + 2}
            choice = {"text": "a", "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
            await http.reply(200, {"id": str(next(numbers)), "choices": [choice], "usage": usage})

    only = ("limits", "leak", "reuse", "isolation", "aborts", "offline")
    report = asyncio.run(_audit(handler, timeout_s=60.0, allowance=Allowance(minutes=0.1), only=only))
    assert [finding.rule for result in report.results for finding in result.findings] == []
    probes = [result for result in report.results if result.probe not in ("answers", "offline")]
    assert not any(result.skipped for result in probes), [(result.probe, result.skipped) for result in probes]
    assert not report.stopped
    assert "this probe's share of the budget of 0.1 minutes is spent" in str(probes[0].unproven)


def test_a_probe_that_its_share_cut_off_gets_what_the_others_left() -> None:
    """The first probe asks most; what it could not finish in its share of the requests it does in what is left at the end."""
    only = ("leak", "isolation", "honesty")
    report = asyncio.run(_run_standin("", allowance=Allowance(requests=280), timeout_s=10.0, only=only))
    results = {result.probe: result for result in report.results}
    assert results["leak"].proved and not any("not finished" in text for text in results["leak"].unproven)
    assert report.requests <= 280 and report.findings == []


def test_a_kept_connection_that_the_server_closes_is_no_fault() -> None:
    """Some servers say that they keep a connection, and close it: a request that meets this goes out again on a fresh one."""
    used: list[object] = []

    async def handler(http: Exchange) -> None:
        if http.writer in used:
            http.slam()
            return
        used.append(http.writer)
        await http.reply(400, {"error": {"message": "no"}})

    async def go() -> list[int]:
        async with RawServer(handler) as server, Client(ClientSettings(server.url, timeout_s=5.0), Budget(Allowance())) as client:
            plain = [(await client.post("/completions", {})).status for _ in range(4)]
            return plain + [(await client.ask(Ask("x"))).status for _ in range(4)]

    assert asyncio.run(go()) == [400] * 8
