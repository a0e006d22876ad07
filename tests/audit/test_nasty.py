"""Servers that answer nonsense where an audit begins, promise the impossible, or flood: it ends with a message that says what to do."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from kvseal.audit.budget import Allowance, Budget
from kvseal.audit.client import Client, ClientSettings
from kvseal.audit.findings import Grade, ProbeResult, Report
from kvseal.audit.probes.aborts import _judge_silent
from kvseal.audit.probes.base import Depth
from kvseal.audit.runner import AuditSettings, Plan, audit, plan
from kvseal.audit.wire import Answer, Ask, End

from .rawhttp import Exchange, RawServer
from .standin import MODEL, Standin, Traits


def _audit(handler: Any, *, host: str = "127.0.0.1", model: str = "", **changes: Any) -> Report:
    async def go() -> Report:
        async with RawServer(handler, host=host) as server:
            keys, concurrency = changes.pop("keys", ()), changes.pop("concurrency", 4)
            client = ClientSettings(server.url, timeout_s=5.0, keys=keys, concurrency=concurrency)
            return await audit(AuditSettings(client, model, depth=Depth.QUICK, seed=5, **changes))

    return asyncio.run(go())


def _instead(path: str, status: int, body: Any, **how: Any) -> Any:
    """An honest server that answers at `path` with something else."""
    standin = Standin("", 1, Traits())

    async def handler(http: Exchange) -> None:
        if http.path == path:
            await http.reply(status, body, **how)
        else:
            await standin.handle(http)

    return handler


@pytest.mark.parametrize(
    ("status", "body", "how", "said"),
    [
        (301, b"", {"headers": {"Location": "https://b/v1/models"}}, "(to https://b/v1/models): redirects are not followed, so give"),
        (200, b"<html>Log in</html>", {"kind": "text/html"}, "200 with text/html, which is no JSON: is this the address of an API"),
        (200, gzip.compress(b"0" * 50_000_000), {"headers": {"Content-Encoding": "gzip"}}, "it is compressed, 'gzip'"),
        (200, b'{"data": [{"id": "\xff"}]}', {}, "which is no JSON"),
        (200, {"data": []}, {}, "lists no model"),
        (404, {"error": {"message": "no such route"}}, {}, "answered 404: does the address end in /v1?"),
        (500, b"boom", {}, "answered 500"),
        (401, {"error": {"message": "no"}}, {}, "give a key with --keys"),
    ],
)
def test_what_is_no_list_of_models_is_named(status: int, body: Any, how: Any, said: str) -> None:
    report = _audit(_instead("/v1/models", status, body, **how))
    assert report.exit_status == 2 and said in report.stopped


def test_a_model_that_is_not_listed_is_said() -> None:
    report = _audit(_instead("/none", 404, {}), model="no-such")
    assert report.exit_status == 2 and f"'no-such' is not among the models that the server lists: {MODEL}" in report.stopped


def test_a_key_that_is_refused_is_named_by_its_digest() -> None:
    standin = Standin("", 1, Traits(keys=("first-key", "another")))
    for keys, said in ((("first-key", "wrong-key"), "refuses key 2 of --keys (key-"), (("wrong-key",), "give a key with --keys")):
        report = _audit(standin.handle, keys=keys)
        assert report.exit_status == 2 and said in report.stopped and "wrong-key" not in report.stopped


def test_an_address_of_ipv6() -> None:
    try:
        report = _audit(Standin("", 1, Traits()).handle, host="::1", only=("limits",))
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert report.exit_status == 0


@pytest.mark.parametrize(("tokens", "said"), [(10**18, "longer than any"), (12_000, "do not fit"), (5, "cannot be sized")])
def test_a_context_that_cannot_be_sent_is_not_made(tokens: int, said: str) -> None:
    models = {"object": "list", "data": [{"id": MODEL, "max_model_len": tokens}]}
    report = _audit(_instead("/v1/models", 200, models), only=("limits",), allowance=Allowance(tokens=6_000))
    assert said in str(report.results[0].unproven)
    assert not any(finding.rule == "limits.advertised-not-servable" for finding in report.findings)


def test_a_pool_below_a_context_that_the_budget_cannot_reach_is_found_all_the_same() -> None:
    """The incident: a context of a million tokens, a pool of two thirds. A budget of less must not hide it."""
    standin = Standin("", 1, Traits())

    async def handler(http: Exchange) -> None:
        if http.path == "/v1/models":
            await http.reply(200, {"object": "list", "data": [{"id": MODEL, "max_model_len": 12_000}]})
        elif http.path == "/metrics":
            await http.reply(200, b"sglang:max_total_num_tokens 8000\n", kind="text/plain")
        else:
            await standin.handle(http)

    report = _audit(handler, only=("limits",), allowance=Allowance(tokens=6_000))
    assert any(finding.rule == "limits.pool-below-context" for finding in report.findings)


def test_metrics_that_are_no_numbers_end_nothing() -> None:
    text = b'kvseal_kv_pool_tokens +Inf\nkvseal_max_servable_tokens NaN\nkvseal_kv_pages{state="leased"} NaN\n'
    report = _audit(_instead("/metrics", 200, text, kind="text/plain"), only=("aborts", "offline"), concurrency=1)
    assert report.findings == [] and not report.stopped


def test_a_context_beyond_all_numbers_is_not_said() -> None:
    models = {"object": "list", "data": [{"id": MODEL, "max_model_len": 9 * 10**4299}]}

    async def go() -> Plan:
        async with RawServer(_instead("/v1/models", 200, models)) as server:
            return await plan(AuditSettings(ClientSettings(server.url), only=("limits",)))

    made = asyncio.run(go())
    assert str(made.total.tokens) and made.guessed == "the server does not say its context"


async def _count_nothing(http: Exchange, chat: bool) -> None:
    """From now on `http` counts no tokens where it is of that endpoint."""
    reply, event = http.reply, http.event

    def without(body: Any) -> Any:
        counts = isinstance(body, dict) and http.path.endswith("/chat/completions") is chat
        return {name: value for name, value in body.items() if name != "usage"} if counts else body

    http.reply = lambda status, body, **how: reply(status, without(body), **how)  # type: ignore[method-assign]
    http.event = lambda body: event(without(body))  # type: ignore[method-assign]


async def _first_then(event: Any, first: dict[str, Any], body: Any) -> None:
    """An event without an id before all others, as a large service sends it."""
    if first:
        await event(dict(first))
        first.clear()
    await event(body)


def _odd(oddity: str) -> Any:
    """An honest server that lacks something, or does it in its own way."""
    contexts = {"tiny": Traits(context=100, pool=200), "no tokeniser, no counts in chat": Traits(tokenizer=False)}
    standin = Standin("", 1, contexts.get(oddity, Traits()))

    async def handler(http: Exchange) -> None:
        chat = http.path.endswith("/chat/completions")
        if oddity == "no streams in chat" and chat and http.json.get("stream"):
            await http.reply(400, {"error": {"message": "no streams here"}})
            return
        if oddity == "letters of its own":
            start, event = http.start_stream, http.event
            http.start_stream = lambda kind="": start("Text/Event-Stream; charset=UTF-8")  # type: ignore[method-assign]
            first = {"id": "", "choices": [], "created": 0, "model": "", "object": "", "prompt_filter_results": []}
            http.event = lambda body: _first_then(event, first, body)  # type: ignore[method-assign]
        if oddity in ("no counts in chat", "no counts", "no tokeniser, no counts in chat"):
            await _count_nothing(http, chat=True)
        if oddity in ("no counts in completions", "no counts"):
            await _count_nothing(http, chat=False)
        await standin.handle(http)

    return handler


@pytest.mark.parametrize(
    "oddity",
    ["no streams in chat", "letters of its own", "no counts in chat", "no counts in completions", "no counts", "tiny",
     "no tokeniser, no counts in chat"],
)  # fmt: skip
def test_an_honest_server_of_an_unusual_shape_is_accused_of_nothing(oddity: str) -> None:
    """A chat template that nobody counts, streams of one endpoint only: prompts at the limit are sized with what is not known in mind."""
    report = _audit(_odd(oddity), only=("limits",))
    assert report.findings == [] and report.exit_status == 0, report.findings
    assert ("streams do not work for chat" in str(report.results[0].unproven)) is (oddity == "no streams in chat")
    if oddity == "tiny":
        assert "refused with a 4xx, none was answered" in str(report.results[0].proved)


@pytest.mark.parametrize("flood", ["text", "error", "tokens", "alternatives", "stream"])
def test_a_flood_is_not_kept(flood: str) -> None:
    """Hundreds of answers are kept for the review at the end, so one that floods must be small."""
    many = {"tokens": ["a"] * 200_000, "token_logprobs": [-1] * 200_000, "top_logprobs": []}
    tops = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{str(number): -1 for number in range(3_000)}]}

    async def handler(http: Exchange) -> None:
        if flood == "error":
            await http.reply(400, {"error": {"message": "x" * 60_000}})
        elif flood == "stream":
            await http.start_stream()
            while not http.gone.is_set():
                await http.event({"choices": [{"text": "y" * 10_000}]})
        else:
            logprobs = {"tokens": many, "alternatives": tops}.get(flood)
            choice = {"text": "z" * (5_000_000 if flood == "text" else 1), "finish_reason": "stop", "logprobs": logprobs}
            await http.reply(200, {"choices": [choice]})

    async def go() -> Answer:
        async with RawServer(handler) as server, Client(ClientSettings(server.url, timeout_s=9.0), Budget(Allowance())) as client:
            return await client.ask(Ask("x", stream=flood == "stream", logprobs=5))

    answer = asyncio.run(go())
    alternatives = [name for step in answer.steps for name, _ in step.top]
    assert len(answer.text) < 200_000 and len(answer.error_message) <= 4_000 and len(answer.steps) <= 32 and len(alternatives) <= 20
    assert (answer.end is End.OVERSIZE) == (flood in ("text", "tokens", "stream"))


def test_retry_after_may_be_a_date() -> None:
    async def handler(http: Exchange) -> None:
        due = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
        await http.reply(429, {"error": {"message": "slow down"}}, headers={"Retry-After": due if http.json["max_tokens"] == 8 else "soon"})

    async def go() -> list[float | None]:
        async with RawServer(handler) as server, Client(ClientSettings(server.url, timeout_s=5.0), Budget(Allowance())) as client:
            return [(await client.ask(Ask("x", max_tokens=count), retry=False)).retry_after_s for count in (8, 9)]

    date, nonsense = asyncio.run(go())
    assert date is not None and 60 < date <= 90 and nonsense is None


def test_numbers_that_are_none_are_no_logprobs() -> None:
    body = b'{"choices":[{"text":"a","finish_reason":"stop","logprobs":{"tokens":["a","b"],"token_logprobs":[-Infinity,-0.5],'
    body += b'"top_logprobs":[{"a":NaN},{"b":-0.5,"c":-Infinity,"d":1' + b"0" * 400 + b"}]}}]}"

    async def handler(http: Exchange) -> None:
        await http.reply(200, body)

    async def go() -> Answer:
        async with RawServer(handler) as server, Client(ClientSettings(server.url, timeout_s=5.0), Budget(Allowance())) as client:
            return await client.ask(Ask("x", logprobs=5))

    (step,) = asyncio.run(go()).steps
    assert step.token == "b" and step.top == (("b", -0.5),)
    json.dumps(step.logprob, allow_nan=False)


@pytest.mark.parametrize(("rounds", "alone_s", "found"), [(1, 0.2, False), (2, 0.2, True), (3, 4.0, False)])
def test_a_silent_neighbour_is_found_when_it_is_a_habit(rounds: int, alone_s: float, found: bool) -> None:
    """A machine that has no time for a moment, and a server whose neighbours are slow by themselves, are not accused."""
    result = ProbeResult("aborts", "t")
    _judge_silent(result, [Answer(Ask("x"), End.TIMEOUT, total_s=20.0)] * rounds, [alone_s, alone_s])
    assert [finding.grade for finding in result.findings] == [Grade.HANG] * found
    assert bool(result.unproven) is not found


def test_what_was_shown_before_the_budget_ended_stands() -> None:
    report = _audit(Standin("", 1, Traits()).handle, only=("leak",), allowance=Allowance(requests=80))
    leak = report.results[0]
    assert any("planted canaries held none of them" in text for text in leak.proved) and "not finished" in str(leak.unproven)


def test_answers_that_no_probe_could_hear_are_heard_at_the_end() -> None:
    """Each request is answered with the prompts of all before it; the budget ends before the first crowd is looked at."""
    said: list[str] = []
    standin = Standin("", 1, Traits())

    async def handler(http: Exchange) -> None:
        if http.path != "/v1/completions" or b"code words are" not in http.body:
            await standin.handle(http)
            return
        answer = " ".join(said)
        said.append(str(http.json["prompt"])[:120])
        choice = {"text": answer, "finish_reason": "length"}
        await http.reply(200, {"id": str(len(said)), "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 9}})

    report = _audit(handler, only=("leak",), allowance=Allowance(requests=60))
    assert "not finished" in str(report.results[0].unproven)
    assert any(finding.rule == "leak.canary" for finding in report.findings)


def test_what_may_have_been_sent_before_is_not_held_against_a_cache() -> None:
    """The second audit with one seed is told of cached tokens that it has not sent itself, by an honest server."""
    honest = Standin("", 1, Traits(pool=8_192))
    cut = Allowance(requests=60)
    audits = [_audit(honest.handle, only=("leak",), fresh=fresh, allowance=cut) for fresh in (True, True, False)]
    assert [any(finding.rule == "reuse.never-sent" for finding in report.findings) for report in audits] == [False, True, False]
    assert "may have been sent before" in str(audits[2].results[-1].unproven)


def _redraw(body: Any, draw: random.Random) -> Any:
    """`body` of a completion with its tokens drawn by lot among the likely ones, as a server answers that heeds no temperature."""
    for choice in body.get("choices", ()) if isinstance(body, dict) else ():
        odds = (choice.get("logprobs") or {}).get("top_logprobs") or []
        tokens = [draw.choice(sorted(top)) for top in odds]
        if tokens:
            choice["text"] = "".join(tokens)
            choice["logprobs"] |= {"tokens": tokens, "token_logprobs": [top[token] for top, token in zip(odds, tokens, strict=True)]}
    return body


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_server_that_draws_its_tokens_by_lot_is_not_called_corrupt(logprobs: bool) -> None:
    standin, draw = Standin("", 1, Traits()), random.Random(1)

    async def handler(http: Exchange) -> None:
        reply, event = http.reply, http.event
        if http.path == "/v1/completions":
            http.body = json.dumps({**http.json, "logprobs": 5}).encode()

        def redrawn(body: Any) -> Any:
            body = _redraw(body, draw)
            for choice in () if logprobs or not isinstance(body, dict) else body.get("choices", ()):
                choice.pop("logprobs", None)
            return body

        http.reply = lambda status, body, **how: reply(status, redrawn(body), **how)  # type: ignore[method-assign]
        http.event = lambda body: event(redrawn(body))  # type: ignore[method-assign]
        await standin.handle(http)

    report = _audit(handler, only=("limits", "reuse"))
    assert report.findings == [] and not report.stopped, report.findings
    assert "does not repeat even the answers" in str([result.unproven for result in report.results if result.probe == "reuse"])
