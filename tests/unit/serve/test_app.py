"""The routes over an engine whose state a test sets: what is said when it stalls, dies, or is starting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvseal.core.errors import EngineDied
from kvseal.node.client import EngineState
from kvseal.node.report import EngineStats
from kvseal.serve import app
from kvseal.serve.app import Deps, build_app
from kvseal.serve.auth import KeyRing, Scopes
from kvseal.serve.metrics import Metrics
from kvseal.serve.served import ServedModel
from kvseal.serve.tokenizer import Tokenizer

from .fake_engine import FakeEngine
from .tiny_model import start_report


class StateEngine(FakeEngine):
    """As much of `EngineClient` as the routes read."""

    def __init__(self, state: EngineState) -> None:
        super().__init__()
        self.state = state
        self.last_progress_age_s = 33.0
        self.restarts = 0
        self.report = start_report()

    async def stats(self) -> EngineStats:
        raise EngineDied("no engine")


def _get(model: ServedModel, engine: Any, method: str, path: str, *, max_body_bytes: int = 10_000, **options: Any) -> httpx.Response:
    deps = Deps(
        model=model,
        engine=engine,
        keys=KeyRing(None),
        scopes=Scopes(b"weights"),
        metrics=Metrics(),
        strict_fields=False,
        max_body_bytes=max_body_bytes,
        request_timeout_s=None,
    )

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(deps))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize("state", [EngineState.STALLED, EngineState.DEAD, EngineState.STARTING])
def test_an_engine_that_cannot_serve(model: ServedModel, state: EngineState) -> None:
    engine = StateEngine(state)
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/tiny", None),
        ("POST", "/v1/completions", {"prompt": "x"}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = _get(model, engine, method, path, json=body)
        assert answer.status_code == 503, path
        assert answer.json()["error"]["code"] == "engine_died"
        assert answer.headers["retry-after"] == "1"
    assert engine.streams == [], "nothing was submitted"
    for path in ("/readyz", "/health"):
        answer = _get(model, engine, "GET", path)
        assert (answer.status_code, answer.json()["engine"]) == (503, state.value)
    assert _get(model, engine, "GET", "/livez").status_code == 200
    metrics = _get(model, engine, "GET", "/metrics").text
    assert "kvseal_engine_ready 0.0" in metrics
    assert "kvseal_requests_running" not in metrics


def test_what_needs_no_engine_works_without_one(model: ServedModel) -> None:
    engine = StateEngine(EngineState.DEAD)
    assert _get(model, engine, "POST", "/tokenize", json={"prompt": "hell"}).json()["tokens"] == [261]
    assert _get(model, engine, "GET", "/version").json()["model"] == "tiny"


def test_an_engine_that_came_back_smaller_is_advertised_as_it_is(model: ServedModel) -> None:
    engine = StateEngine(EngineState.READY)
    engine.report = start_report(pool_pages=4, pool_tokens=64, served_context_tokens=64)
    assert _get(model, engine, "GET", "/v1/models").json()["data"][0]["max_model_len"] == 64
    assert _get(model, engine, "GET", "/version").json()["limits"]["max_servable_tokens"] == 64
    assert "kvseal_max_servable_tokens 64.0" in _get(model, engine, "GET", "/metrics").text
    refused = _get(model, engine, "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 64})
    assert refused.json()["error"]["details"]["max_servable_tokens"] == 64


def test_large_work_leaves_the_event_loop_alone(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs seconds is done on threads: parsing large bodies, and turning many tokens into text."""
    loop_thread = threading.get_ident()
    seen: dict[str, bool] = {}

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            seen[name] = threading.get_ident() != loop_thread
            return work(*arguments, **options)

        return run

    for owner, name in ((app, "parse_json_object"), (Tokenizer, "decode"), (Tokenizer, "text_of"), (Tokenizer, "encode")):
        monkeypatch.setattr(owner, name, watched(name, vars(owner)[name]))
    engine = StateEngine(EngineState.READY)

    def post(path: str, **body: Any) -> Any:
        return _get(model, engine, "POST", path, json=body, max_body_bytes=2**20).json()

    tokens = post("/tokenize", prompt="hell" * 20_000, return_token_strs=True)["tokens"]
    assert post("/detokenize", tokens=tokens)["prompt"] == "hell" * 20_000
    assert seen == dict.fromkeys(("parse_json_object", "decode", "text_of", "encode"), True)
    seen.clear()
    post("/tokenize", prompt="hell", return_token_strs=True)
    post("/detokenize", tokens=tokens[:1])
    assert not any(seen.values()), "what is small does not pay for a thread"


def test_a_bug_of_ours_says_nothing_of_the_content(model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StateEngine):
        def submit(self, request: Any) -> Any:
            raise RuntimeError(f"secret {request.prompt_tokens}")

    answer = _get(model, Broken(EngineState.READY), "POST", "/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] in caplog.text, "the log and the answer share the id"
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text + answer.text
