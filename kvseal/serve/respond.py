"""From a running generation to bytes on the wire: one JSON body, or server-sent events.

Owns `GenerationResponse`. Laws: L11 (a 200 without an error event means that every choice completed). Headers are sent only when the engine
has answered something, or has taken the request and been silent for `FIRST_EVENT_WAIT_S`; until then every error still has its own HTTP
status. A client that goes away, at whatever moment, stops the engine's work at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from kvseal.core.errors import BrokenSeal, Draining, Overloaded, RequestError, Unavailable
from kvseal.core.request import Request
from kvseal.serve.answers import Answer, ChoiceText, as_event, obfuscation
from kvseal.serve.connection import RawBody, raw_body_of
from kvseal.serve.errors_http import ServedError, error_event
from kvseal.serve.gate import send_json
from kvseal.serve.generation import Delta, Generation, Submitter, TextRules
from kvseal.serve.metrics import Metrics
from kvseal.serve.record import Record, record_of

FIRST_EVENT_WAIT_S = 10.0
PING_EVERY_S = 10.0
IGNORED_FIELDS_HEADER = "x-kvseal-ignored-fields"
_PING = b": ping\n\n"
_DONE = b"data: [DONE]\n\n"
_SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class GenerationResponse:
    """An ASGI response that generates while it answers."""

    def __init__(self, answer: Answer, engine: Submitter, requests: list[Request], metrics: Metrics) -> None:
        self._answer = answer
        self._ask = answer.ask
        self._engine = engine
        self._requests = requests
        self._metrics = metrics
        self._scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        record = record_of(scope)
        record.outcome = "cancelled"  # Until it is known to have ended otherwise.
        record.prompt_tokens = sum(len(prompt.tokens) for prompt in self._ask.prompts)
        ask = self._ask
        rules = TextRules(stop=ask.stop, include_stop=ask.include_stop, skip_special_tokens=ask.skip_special_tokens)
        meter = _Meter(self._metrics, record)
        try:
            async with Generation(self._engine, self._answer.model.tokenizer, self._requests, rules) as generation:
                try:
                    work = self._stream(generation, meter, send) if ask.stream else self._whole(generation, meter, send)
                    await _unless_gone(work, receive)
                finally:
                    record.completion_tokens = sum(choice.completion_tokens for choice in generation.choices)
                    record.cached_tokens = sum(choice.cached_tokens for choice in generation.choices[:: ask.drawn])
        except (RequestError, Unavailable, BrokenSeal) as error:
            meter.failed(error)
            raise

    # --- in one piece ---

    async def _whole(self, generation: Generation, meter: _Meter, send: Send) -> None:
        texts = [ChoiceText() for _ in generation.choices]
        async for delta in generation.deltas():
            meter.saw(delta)
            texts[delta.index].add(delta)
        meter.completed()
        await send_json(send, 200, self._answer.whole(texts, generation.choices), self._headers())

    # --- in chunks ---

    async def _stream(self, generation: Generation, meter: _Meter, send: Send) -> None:
        await generation.wait_first(FIRST_EVENT_WAIT_S)
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**_SSE_HEADERS, **self._headers()}.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        line = _Line(send, raw_body_of(self._scope))
        pinger = asyncio.create_task(line.keep_alive())
        try:
            await self._events(generation, meter, line)
        except (RequestError, Unavailable, BrokenSeal) as error:
            meter.failed(error, begun=True)
            await line.send(error_event(error), more=False)
        finally:
            pinger.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pinger

    async def _events(self, generation: Generation, meter: _Meter, line: _Line) -> None:
        chunks = _Chunks(self._answer, generation, meter)

        def push() -> bool:
            """In the moment in which a token arrives, with no task woken: as long as the client keeps up and nothing has ended."""
            if line.busy:
                return False
            data = chunks.write(generation.taken())
            if data:
                line.push(data)
            return bool(generation.open_choices)

        try:
            while generation.open_choices:
                data = chunks.write(await generation.more())
                if data:
                    await line.send(data)
                generation.sink = push if line.direct else None
        finally:
            generation.sink = None
        meter.completed()
        answer = self._answer
        closing = as_event(answer.chunk([], answer.usage(generation.choices))) if self._ask.include_usage else b""
        await line.send(closing + _DONE, more=False)

    def _headers(self) -> dict[str, str]:
        ignored = self._ask.ignored_fields
        return {IGNORED_FIELDS_HEADER: ", ".join(ignored[:32])} if ignored else {}


class _Chunks:
    """Writes deltas as server-sent events. What all chunks of a choice share is encoded once."""

    def __init__(self, answer: Answer, generation: Generation, meter: _Meter) -> None:
        self._answer = answer
        self._generation = generation
        self._meter = meter
        ask = answer.ask
        self._offsets = [len(answer.prompt_text(i // ask.drawn)) if ask.echo else 0 for i in range(len(generation.choices))]
        self._templates: dict[int, tuple[bytes, ...] | None] = {}
        """Of the choices that have been opened."""

    def write(self, deltas: Sequence[Delta]) -> bytes:
        events: list[bytes] = []
        for delta in deltas:
            self._meter.saw(delta)
            first = delta.index not in self._templates
            if first:
                self._templates[delta.index] = self._answer.template(delta.index)
                if self._answer.ask.chat:
                    events.append(as_event(self._answer.first_chunk(delta.index)))
            around = self._templates[delta.index]
            if around is None:
                self._write_whole(delta, first, events)
            elif delta.text:
                events += (around[0], msgspec.json.encode(delta.text), around[1])
                if len(around) > 2:
                    events += (msgspec.json.encode(obfuscation(len(delta.text))), around[2])
            if delta.finish is not None:
                answer = self._answer
                events.append(as_event(answer.chunk([answer.last_choice(delta.index, delta.finish)], self._usage())))
        return b"".join(events)

    def _write_whole(self, delta: Delta, first: bool, events: list[bytes]) -> None:
        answer, ask = self._answer, self._answer.ask
        echoes = first and ask.echo
        if delta.text or echoes or (delta.tokens and (ask.return_token_ids or ask.logprobs is not None)):
            choice = answer.delta_choice(delta, 0 if echoes else self._offsets[delta.index], with_echo=echoes)
            chunk = answer.chunk([choice], self._usage())
            if ask.obfuscate:
                chunk["obfuscation"] = obfuscation(len(delta.text))
            events.append(as_event(chunk))
            self._offsets[delta.index] += len(delta.text)

    def _usage(self) -> dict[str, Any] | None:
        return self._answer.usage(self._generation.choices) if self._answer.ask.continuous_usage else None


class _Line:
    """The open stream. Says ``: ping`` when nothing else has been said for a while."""

    def __init__(self, send: Send, raw: RawBody | None) -> None:
        self._send = send
        self._raw = raw
        self._sending = False
        self._sent_at_s = time.monotonic()

    @property
    def direct(self) -> bool:
        """Whether `push` is there at all."""
        return self._raw is not None

    @property
    def busy(self) -> bool:
        """`push` may not be used now: something is on its way through `send`, or the client does not keep up."""
        return self._sending or self._raw is None or self._raw.paused

    def push(self, data: bytes) -> None:
        self._sent_at_s = time.monotonic()
        if self._raw is not None:
            self._raw.write(data)

    async def send(self, data: bytes, *, more: bool = True) -> None:
        self._sent_at_s = time.monotonic()
        self._sending = True
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._sending = False

    async def keep_alive(self) -> None:
        while True:
            await asyncio.sleep(PING_EVERY_S)
            if time.monotonic() - self._sent_at_s >= PING_EVERY_S:
                await self.send(_PING)


class _Meter:
    """Times of one request's tokens."""

    def __init__(self, metrics: Metrics, record: Record) -> None:
        self._metrics = metrics
        self._record = record
        self._last_at_s: dict[int, float] = {}

    def saw(self, delta: Delta) -> None:
        if not delta.tokens and not delta.text:
            return
        now_s = time.monotonic()
        if self._record.first_token_s is None:
            self._record.first_token_s = now_s - self._record.started_at_s
            self._metrics.first_token_s.observe(self._record.first_token_s)
        last_s = self._last_at_s.get(delta.index)
        if last_s is not None:
            self._metrics.inter_token_s.observe((now_s - last_s) / max(1, len(delta.tokens)))
        self._last_at_s[delta.index] = now_s

    def completed(self) -> None:
        self._record.outcome = "completed"
        self._metrics.end_to_end_s.observe(self._record.age_s)

    def failed(self, error: ServedError, *, begun: bool = False) -> None:
        """`begun`: part of the answer has been given, so whatever the reason is, nothing was refused."""
        refused = isinstance(error, RequestError | Overloaded | Draining) and not begun
        self._record.outcome = "refused" if refused else "failed"


async def _unless_gone(work: Any, receive: Receive) -> None:
    """Runs `work` to its end, or drops it as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
