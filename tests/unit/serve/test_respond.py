"""When bytes go out: headers only after the engine has spoken, pings while it is silent, nothing to a client who has gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvseal.core.errors import BrokenSeal, EngineDied, Overloaded
from kvseal.core.ids import RequestId, Scope
from kvseal.core.laws import Law
from kvseal.core.outcome import Completed, Failed, FinishReason, Refused, Usage
from kvseal.core.request import Request
from kvseal.serve import respond
from kvseal.serve.answers import Answer
from kvseal.serve.metrics import Metrics
from kvseal.serve.parse import read_completion
from kvseal.serve.record import Record, put_record
from kvseal.serve.respond import GenerationResponse
from kvseal.serve.served import ServedModel

from .fake_engine import FakeEngine

DONE = Completed(FinishReason.LENGTH, Usage(1, 1, 0))


class Wire:
    """One HTTP exchange seen from the server."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def _exchange(model: ServedModel, engine: FakeEngine, wire: Wire, **fields: Any) -> tuple[asyncio.Task[None], Record]:
    ask = await read_completion({"prompt": "x", "stream": True} | fields, model, strict=False, obfuscate=False)
    request = Request(request_id=RequestId("r"), prompt_tokens=(5,), max_output_tokens=9, scope=Scope(b"s" * 16), sampling=ask.sampling)
    response = GenerationResponse(Answer(ask, model, "cmpl-1", 1), engine, [request], Metrics())
    record = Record("req-1", "POST")
    scope: dict[str, Any] = {"type": "http"}
    put_record(scope, record)
    task = asyncio.create_task(response(scope, wire.receive, wire.send))
    await asyncio.sleep(0.01)
    return task, record


def test_no_header_before_the_engine_speaks(model: ServedModel) -> None:
    async def run() -> None:
        engine, wire = FakeEngine(), Wire()
        task, record = await _exchange(model, engine, wire)
        assert wire.sent == []
        engine.streams[0].tokens(261)
        engine.streams[0].end(DONE)
        await task
        assert wire.sent[0]["status"] == 200
        assert wire.body.endswith(b"data: [DONE]\n\n")
        assert record.outcome == "completed"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_refusals_become_the_request_s_error(model: ServedModel, stream: bool) -> None:
    async def run() -> None:
        engine, wire = FakeEngine(), Wire()
        task, record = await _exchange(model, engine, wire, stream=stream)
        engine.streams[0].end(Refused(Overloaded("full")))
        with pytest.raises(Overloaded):
            await task
        assert wire.sent == []
        assert record.outcome == "refused"

    asyncio.run(run())


def test_pings_while_the_engine_is_silent(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "FIRST_EVENT_WAIT_S", 0.02)
    monkeypatch.setattr(respond, "PING_EVERY_S", 0.02)

    async def run() -> None:
        engine, wire = FakeEngine(), Wire()
        task, _ = await _exchange(model, engine, wire)
        await asyncio.sleep(0.15)
        assert wire.body.count(b": ping\n\n") >= 2
        engine.streams[0].tokens(261)
        engine.streams[0].end(DONE)
        await task
        assert b"hell" in wire.body
        assert wire.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineDied("gone"), b"engine_died"), (BrokenSeal(Law.L3, page=1, ordinal=0, layer=0, check="nonce"), b"kv_integrity_error")],
)
def test_an_error_in_the_middle_is_an_event_and_no_done(model: ServedModel, error: Any, code: bytes) -> None:
    async def run() -> None:
        engine, wire = FakeEngine(), Wire()
        task, record = await _exchange(model, engine, wire)
        engine.streams[0].tokens(261)
        await asyncio.sleep(0.01)
        engine.streams[0].end(Failed(error))
        await task
        last = wire.body.rstrip().split(b"\n\n")[-1]
        assert last.startswith(b'data: {"error":{')
        assert code in last
        assert b"[DONE]" not in wire.body
        assert wire.sent[-1]["more_body"] is False
        assert record.outcome == "failed"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_a_token", [True, False])
def test_a_client_who_goes_stops_the_engine(model: ServedModel, stream: bool, after_a_token: bool) -> None:
    async def run() -> None:
        engine, wire = FakeEngine(), Wire()
        task, record = await _exchange(model, engine, wire, stream=stream)
        if after_a_token:
            engine.streams[0].tokens(261)
            await asyncio.sleep(0.01)
        wire.gone.set()
        await asyncio.wait_for(task, 1.0)
        assert engine.streams[0].cancelled
        assert record.outcome == "cancelled"
        assert b"[DONE]" not in wire.body

    asyncio.run(run())
