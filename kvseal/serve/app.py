"""The HTTP application: which route does what.

Owns the routes and `Deps`, all that they need. Each route reads its body, asks, and answers; meaning is `parse`'s, text is
`generation`'s, shapes are `answers`', authentication and errors are the `gate`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kvseal.core.errors import (
    BodyTooLarge,
    EngineDied,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotServed,
    NotFound,
    RequestError,
    Unavailable,
)
from kvseal.core.ids import RequestId
from kvseal.core.request import Request
from kvseal.node.client import EngineClient, EngineState
from kvseal.node.stream import RequestStream
from kvseal.node.transfer_desk import FIELD as TRANSFER_FIELD
from kvseal.serve.answers import Answer
from kvseal.serve.auth import KeyRing, Scopes
from kvseal.serve.errors_http import error_body, error_headers, error_status
from kvseal.serve.gate import Gate, new_id
from kvseal.serve.jsonbody import parse_json_object
from kvseal.serve.messages import read_messages
from kvseal.serve.metrics import CONTENT_TYPE, Metrics
from kvseal.serve.parse import GenerationAsk, check_model, read_chat, read_completion, read_fields, rendering
from kvseal.serve.record import record_of
from kvseal.serve.respond import GenerationResponse
from kvseal.serve.sampling_defaults import describe
from kvseal.serve.schemas import DetokenizeBody, TokenizeBody
from kvseal.serve.served import ServedModel

if TYPE_CHECKING:  # See `server`.
    from kvseal.node.router import Router
    from kvseal.node.transfer_desk import Source, TransferDesk

Reader = Callable[..., Awaitable[GenerationAsk]]
Endpoint = Callable[[HttpRequest], Awaitable[Any]]

BODY_TIMEOUT_S = 60.0
STATS_TIMEOUT_S = 5.0
"""The engine answers between two steps; one that hangs must not make a scrape hang."""
DISCARD_BYTES, DISCARD_PAUSE_S = 64 * 2**20, 0.5
"""How much of a body that is too large is read and thrown away, and the pause that ends it, so that the client gets to read the answer."""
THREAD_ABOVE_BYTES = 64 * 2**10
"""Larger bodies are parsed on a thread: a million tiny arrays take seconds, and streams go on meanwhile."""
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Deps:
    """Everything that the routes share. Made once."""

    model: ServedModel
    engine: EngineClient | Router
    keys: KeyRing
    scopes: Scopes
    metrics: Metrics
    strict_fields: bool
    max_body_bytes: int
    request_timeout_s: float | None
    transfers: TransferDesk | None = None
    """On a worker: hand-offs that a front arranges with ``kv_transfer_params``."""


def build_app(deps: Deps) -> Starlette:
    """The ASGI application."""
    routes = _Routes(deps)
    table: list[tuple[str, Endpoint, str]] = [
        ("/v1/chat/completions", routes.chat, "POST"),
        ("/chat/completions", routes.chat, "POST"),
        ("/v1/completions", routes.completions, "POST"),
        ("/completions", routes.completions, "POST"),
        ("/v1/models", routes.models, "GET"),
        ("/models", routes.models, "GET"),
        ("/v1/models/{id:path}", routes.one_model, "GET"),
        ("/models/{id:path}", routes.one_model, "GET"),
        ("/tokenize", routes.tokenize, "POST"),
        ("/detokenize", routes.detokenize, "POST"),
        ("/tokenizer_info", routes.tokenizer_info, "GET"),
        ("/health", routes.ready, "GET"),
        ("/readyz", routes.ready, "GET"),
        ("/livez", routes.live, "GET"),
        ("/version", routes.version, "GET"),
        ("/metrics", routes.metrics, "GET"),
    ]
    return Starlette(
        routes=[Route(path, endpoint, methods=[method]) for path, endpoint, method in table],
        middleware=[Middleware(Gate, keys=deps.keys, metrics=deps.metrics)],
        exception_handlers={HTTPException: _http_exception},
    )


@dataclass(frozen=True, slots=True)
class Fetching:
    """Submits to this worker what another has computed the prompt of."""

    transfers: TransferDesk
    source: Source

    def submit(self, request: Request) -> RequestStream:
        return self.transfers.submit(request, self.source)


class _Routes:
    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    @property
    def _model(self) -> ServedModel:
        """With the limits of the engine that runs now: one that was started again may have found less memory."""
        model, report = self._deps.model, self._deps.engine.report
        return model if report is model.report else replace(model, report=report)

    # --- generation ---

    async def chat(self, request: HttpRequest) -> GenerationResponse:
        return await self._generate(request, read_chat, "chatcmpl")

    async def completions(self, request: HttpRequest) -> GenerationResponse:
        return await self._generate(request, read_completion, "cmpl")

    async def _generate(self, request: HttpRequest, read: Reader, prefix: str) -> GenerationResponse:
        self._check_alive()
        fields = await self._body(request)
        model, transfers = self._model, self._deps.transfers
        asked = fields.get(TRANSFER_FIELD)
        source = transfers.read(fields) if transfers is not None else None
        # Padding against eavesdroppers is on by default where strangers share a server.
        ask = await read(fields, model, strict=self._deps.strict_fields, obfuscate=self._deps.keys.required)
        record = record_of(request.scope)
        if ask.caller_request_id is not None:
            record.request_id = ask.caller_request_id
        offer = transfers.offer(asked) if transfers is not None else None
        extra = {} if offer is None else {TRANSFER_FIELD: offer}
        answer = Answer(ask, model, new_id(prefix), int(time.time()), extra)
        requests = self._requests(ask, answer.id, record.tenant)
        engine = self._deps.engine if transfers is None or source is None else Fetching(transfers, source)
        return GenerationResponse(answer, engine, requests, self._deps.metrics)

    def _requests(self, ask: GenerationAsk, answer_id: str, tenant: str) -> list[Request]:
        scope = self._deps.scopes.scope(tenant, ask.salt)
        requests: list[Request] = []
        for prompt, budget in zip(ask.prompts, ask.max_output_tokens, strict=True):
            for draw in range(ask.drawn):
                request = Request(
                    request_id=RequestId(f"{answer_id}-{len(requests)}"),
                    prompt_tokens=prompt.tokens,
                    max_output_tokens=budget,
                    scope=scope,
                    # The first choice draws what it would draw alone; each further one has its own sequence.
                    sampling=replace(ask.sampling, seed=(ask.sampling.seed + draw * _SEED_STEP) % _SEEDS) if draw else ask.sampling,
                    priority=ask.priority,
                    deadline_s=self._deps.request_timeout_s,
                )
                requests.append(request.checked(self._model.report.vocab_size))
        return requests

    # --- models ---

    async def models(self, request: HttpRequest) -> Response:
        self._check_alive()
        return _json({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: HttpRequest) -> Response:
        self._check_alive()
        if request.path_params["id"] != self._model.name:
            raise ModelNotServed(f"no such model here; this server serves {self._model.name!r}", param="model")
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "kvseal",
            "root": self._model.name,
            "parent": None,
            "max_model_len": self._model.report.served_context_tokens,
        }

    # --- tokens ---

    async def tokenize(self, request: HttpRequest) -> Response:
        body, _ = read_fields(await self._body(request), TokenizeBody, strict=self._deps.strict_fields)
        check_model(body.model, self._model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is not None:
            messages = read_messages(body.messages, developer_as_system=not self._model.prefers_developer_role)
            how = rendering(body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs)
            tokens = await self._model.encode_chat(messages, how)
        else:
            tokens = await self._model.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        texts = await self._model.texts_of(tokens) if body.return_token_strs else None
        limit = self._model.report.served_context_tokens
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, request: HttpRequest) -> Response:
        body, _ = read_fields(await self._body(request), DetokenizeBody, strict=self._deps.strict_fields)
        check_model(body.model, self._model)
        vocab_size = self._model.report.vocab_size
        if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < vocab_size):
            raise InvalidRequest(f"tokens holds an id outside 0..{vocab_size - 1}", param="tokens")
        return _json({"prompt": await self._model.decode(body.tokens)})

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        tokenizer = self._model.tokenizer
        return _json(
            {
                "tokenizer_class": tokenizer.source,
                **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
                **tokenizer.special_texts,
                "bos_token_id": tokenizer.bos_token,
                "eos_token_id": tokenizer.eos_tokens[0] if tokenizer.eos_tokens else None,
                "add_bos_token": tokenizer.adds_bos,
                "vocab_size": self._model.report.vocab_size,
                "model_max_length": self._model.report.served_context_tokens,
                "chat_template": tokenizer.chat_template,
            }
        )

    # --- the server itself ---

    async def live(self, request: HttpRequest) -> Response:
        """The HTTP process answers. Says nothing of the engine: that is `ready`'s."""
        return _json({"status": "alive"})

    async def ready(self, request: HttpRequest) -> Response:
        """200 only while the engine makes progress."""
        engine = self._deps.engine
        state, age_s = engine.state, engine.last_progress_age_s
        ok = state is EngineState.READY
        body = {"status": "ready" if ok else "unavailable", "engine": state.value, "last_progress_age_s": round(age_s, 3)}
        return _json(body, 200 if ok else 503, {} if ok else {"retry-after": "1"})

    async def version(self, request: HttpRequest) -> Response:
        deps = self._deps
        limits = {
            "max_servable_tokens": self._model.report.served_context_tokens,
            "max_running": self._model.report.max_running,
            "max_queued": self._model.report.max_queued,
            "max_body_bytes": deps.max_body_bytes,
            "request_timeout_s": deps.request_timeout_s,
        }
        report, sampling = msgspec.to_builtins(self._model.report), describe(self._model.defaults)
        return _json(
            {"version": metadata_version(), "model": self._model.name, "report": report, "limits": limits, "sampling_defaults": sampling}
        )

    async def metrics(self, request: HttpRequest) -> Response:
        engine = self._deps.engine
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await engine.stats()
        except (Unavailable, TimeoutError):
            stats = None
        ready = engine.state is EngineState.READY
        text = self._deps.metrics.render(self._model.report, stats, ready=ready, restarts=engine.restarts)
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE})

    # --- shared ---

    def _check_alive(self) -> None:
        """An engine that is gone or stalled would only let requests hang: better to say so, and let a router go elsewhere."""
        state = self._deps.engine.state
        if state is EngineState.STALLED:
            raise EngineDied(f"the engine has made no progress for {self._deps.engine.last_progress_age_s:.0f} s")
        if state not in (EngineState.READY, EngineState.DRAINING):
            raise EngineDied("the engine stopped and is being started again; try again in a moment")

    async def _body(self, request: HttpRequest) -> dict[str, Any]:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read_body(request, self._deps.max_body_bytes)
        except TimeoutError:
            raise InvalidRequest(f"the request body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
        if len(body) < THREAD_ABOVE_BYTES:
            return parse_json_object(body)
        return await asyncio.to_thread(parse_json_object, body)


async def _read_body(request: HttpRequest, limit_bytes: int) -> bytes:
    """The body, never holding more than the limit. Raises `BodyTooLarge`, before the body comes if its length is declared."""
    parts: list[bytes] = []
    left_bytes = limit_bytes - int(request.headers.get("content-length", 0))
    stream = request.stream()
    if left_bytes >= 0:
        left_bytes = limit_bytes
        async for part in stream:
            left_bytes -= len(part)
            if left_bytes < 0:
                break
            parts.append(part)
    if left_bytes < 0:
        if "expect" not in request.headers:  # Who expects to be told to go on has not sent anything, and is not told to.
            await _discard(stream)
        raise BodyTooLarge(f"the request body is larger than {limit_bytes} bytes, the limit of this server (--max-body)")
    return b"".join(parts)


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Reads on until nothing comes: a client that is still sending would find the connection gone before it reads its answer."""
    gone_bytes = 0
    with contextlib.suppress(TimeoutError):
        while gone_bytes < DISCARD_BYTES:
            async with asyncio.timeout(DISCARD_PAUSE_S):
                part = await anext(stream, None)
            if part is None:
                return
            gone_bytes += len(part)


async def _http_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals, in our shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    named: RequestError
    if status == 404:
        named = NotFound("no such route; see /v1/models, /v1/chat/completions and /v1/completions")
    elif status == 405:
        named = MethodNotAllowed(f"this route does not take {request.method}")
    else:
        named = InvalidRequest("the request cannot be read")
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return _json(error_body(named), error_status(named), headers | error_headers(named))


def metadata_version() -> str:
    """The installed version, or "unknown" in a source tree that was never installed."""
    try:
        return metadata.version("kvseal")
    except metadata.PackageNotFoundError:
        return "unknown"


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")
