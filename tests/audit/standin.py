"""A stand-in for an OpenAI-compatible server, with one switch for each published kind of fault. For tests only.

Behind HTTP stands a small engine: places, a waiting line, a page pool with a prefix cache, and the toy model. `Traits` are what honest
servers differ in; `fault` names one thing that is broken. The mechanisms follow the public fault catalogue; `FAULTS` says which rule of the
auditor must find each.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from .rawhttp import Exchange, RawServer
from .toy import Emitted, Reading, tokenize

PAGE = 16
MODEL = "toy"

# Switch -> the probe that must find it, and the rules of which at least one must be among its findings.
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "truncate-head": ("limits", ("limits.silent-truncation",)),
    "truncate-tail": ("limits", ("limits.silent-truncation",)),
    "truncate-half-full-usage": ("limits", ("limits.over-limit-accepted",)),
    "window-below-context": ("limits", ("limits.silent-truncation",)),
    "stub-on-oversize": ("limits", ("limits.silent-truncation", "limits.over-limit-accepted")),
    "length-empty": ("limits", ("limits.empty-answer",)),
    "oversize-500": ("limits", ("limits.server-error",)),
    "oversize-hang": ("limits", ("limits.hang",)),
    "oversize-stops-all": ("limits", ("limits.hang-takes-server", "limits.hang")),
    "oversize-ends-engine": ("limits", ("limits.hang-takes-server",)),
    "pool-below-context": ("limits", ("limits.pool-below-context",)),
    "unnamed-limit": ("limits", ("limits.unnamed",)),
    "advertised-too-much": ("limits", ("limits.advertised-not-servable",)),
    "late-refusal": ("limits", ("limits.late-refusal",)),
    "stream-empty-at-limit": ("limits", ("limits.empty-answer",)),
    "stream-short-at-limit": ("limits", ("limits.silent-truncation",)),
    "stream-truncated-full-usage": ("limits", ("limits.stream-differs",)),
    "stream-cut-at-limit": ("limits", ("limits.broken-answer",)),
    "stream-unended-at-limit": ("limits", ("limits.broken-answer",)),
    "stream-hangs-at-limit": ("limits", ("limits.hang",)),
    "stream-error-at-limit": ("limits", ("limits.advertised-not-servable",)),
    "slot-not-cleared": ("leak", ("leak.canary",)),
    "stale-tail": ("leak", ("leak.unsteady-alone", "leak.changed-after-others", "leak.changed-beside-others")),
    "wrong-row": ("leak", ("leak.wrong-row", "leak.canary")),
    "stale-answer": ("leak", ("leak.wrong-row", "leak.canary")),
    "weak-key": ("leak", ("reuse.never-sent", "leak.canary", "leak.changed-beside-others", "leak.changed-after-others")),
    "logprob-leak": ("leak", ("leak.canary",)),
    "crossed-stream": ("leak", ("leak.canary", "leak.changed-beside-others")),
    "late-writer-after-abort": ("leak", ("leak.canary", "leak.changed-after-others", "leak.changed-beside-others")),
    "preempt-corrupt": ("leak", ("leak.changed-beside-others",)),
    "batch-garble": ("leak", ("leak.changed-beside-others",)),
    "pool-overrun": ("leak", ("honesty.valid-request-failed",)),
    "publish-before-write": ("reuse", ("reuse.twins-differ",)),
    "stolen-page": ("reuse", ("reuse.load-differs", "reuse.warm-differs", "reuse.partial-hit-differs")),
    "short-retrieve": ("reuse", ("reuse.warm-differs", "reuse.partial-hit-differs")),
    "warm-requantised": ("reuse", ("reuse.warm-differs",)),
    "full-hit-off-by-one": ("reuse", ("reuse.warm-differs",)),
    "kept-checkpoint": ("reuse", ("reuse.warm-differs", "reuse.load-differs")),
    "usage-without-cached": ("reuse", ("reuse.usage-differs",)),
    "shared-across-keys": ("isolation", ("isolation.shared-across-keys",)),
    "shared-timing-only": ("isolation", ("isolation.shared-across-keys",)),
    "salt-ignored": ("isolation", ("isolation.salt-ignored",)),
    "pages-lost": ("aborts", ("aborts.pages-lost",)),
    "keeps-generating": ("aborts", ("aborts.keeps-generating", "aborts.pages-lost")),
    "abort-kills-neighbour": ("aborts", ("aborts.neighbour-killed",)),
    "abort-garbles-neighbour": ("aborts", ("aborts.neighbour-changed",)),
    "success-on-failure": ("honesty", ("honesty.success-on-failure",)),
    "crash-on-input": ("honesty", ("honesty.crash-on-input",)),
    "error-without-body": ("honesty", ("honesty.no-error-body",)),
    "any-model": ("honesty", ("honesty.any-model",)),
    "stream-cut": ("honesty", ("honesty.stream-cut",)),
    "overload-hang": ("honesty", ("honesty.overload-hang",)),
    "no-retry-after": ("honesty", ("honesty.no-retry-after",)),
    "crash-under-load": ("honesty", ("honesty.crash-under-load",)),
    "health-green-while-stuck": ("honesty", ("honesty.health-green-while-stuck", "honesty.overload-hang")),
    "id-reused": ("honesty", ("honesty.id-reused",)),
    "abort-as-finish": ("honesty", ("honesty.finish-reason",)),
    "over-max-tokens": ("honesty", ("honesty.over-max-tokens",)),
    "dies": ("honesty", ("audit.server-died",)),
}


@dataclass(frozen=True)
class Traits:
    """What honest servers differ in."""

    context: int = 384
    pool: int = 512
    places: int = 4
    queue: int = 64
    noise: float = 0.0
    logprobs: bool = True
    tokenizer: bool = True
    cached_counts: bool = True
    metrics: bool = True
    completions: bool = True
    keys: tuple[str, ...] = ()
    salts: bool = True
    prefill_s: float = 10e-6
    step_s: float = 0.0
    says_context: bool = True
    stream_usage: bool = True

    @staticmethod
    def drawn(seed: int) -> Traits:
        """One honest server of the many."""
        draw = random.Random(seed)
        return Traits(
            context=draw.choice((256, 384, 500)),
            pool=draw.choice((512, 1024, 4096)),
            places=draw.choice((2, 4, 8)),
            noise=draw.choice((0.0, 0.0, 1e-4, 2e-3, 2e-2)),
            logprobs=draw.random() < 0.8,
            tokenizer=draw.random() < 0.5,
            cached_counts=draw.random() < 0.7,
            metrics=draw.random() < 0.6,
            completions=draw.random() < 0.8,
            keys=("key-one", "key-two") if draw.random() < 0.6 else (),
            says_context=draw.random() < 0.9,
            step_s=draw.choice((0.0, 0.0, 1e-3)),
            stream_usage=draw.random() < 0.8,
        )


class Refusal(Exception):
    """An error answer."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


@dataclass(eq=False)
class Running:
    """One request in the engine."""

    number: int
    prompt: list[str]
    reading: Reading
    max_tokens: int
    cached: int = 0
    counted: int = 0
    emitted: list[Emitted] = field(default_factory=list)
    finish: str | None = None
    salt: str = ""
    near: bool = False  # Is this a stream near the limit?
    began_s: float = field(default_factory=time.monotonic)


class Standin:
    """One server with one fault (or none). All choices follow from the seed."""

    def __init__(self, fault: str = "", seed: int = 1, traits: Traits | None = None) -> None:
        self.fault = fault
        self.traits = traits or Traits()
        self.chance = random.Random(seed)
        self.active: list[Running] = []
        self.waiting = 0
        self.places = asyncio.Semaphore(self.traits.places)
        self.cache: OrderedDict[tuple[Any, ...], list[str]] = OrderedDict()
        self.contents: dict[tuple[Any, ...], list[str]] = {}
        self.previous: list[str] = []
        self.last_answer: list[Emitted] = []
        self.late_writer: list[str] = []
        self.asked: dict[tuple[str, ...], int] = {}
        self.lost_pages = 0
        self.count = 0
        self.stuck = False
        self.ended = False
        self.writing: dict[tuple[Any, ...], bool] = {}

    def server(self) -> RawServer:
        return RawServer(self.handle)

    async def handle(self, http: Exchange) -> None:
        try:
            await self._route(http)
        except Refusal as refusal:
            if self.fault == "success-on-failure" and refusal.status in (400, 404):
                await http.reply(200, {"error": {"message": refusal.message, "type": "x", "param": None, "code": None}})
            elif self.fault == "error-without-body" and refusal.status in (400, 404):
                await http.reply(refusal.status, b"", kind="text/plain")
            else:
                body = {"error": {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": None}}
                await http.reply(refusal.status, body, headers=refusal.headers)

    async def _route(self, http: Exchange) -> None:
        traits = self.traits
        if self.fault == "dies" and self.count > 14:
            http.slam()
            return
        if http.path == "/health":
            await http.reply(200, {"status": "ok"})
        elif http.path == "/metrics" and traits.metrics:
            await http.reply(200, self._metrics().encode(), kind="text/plain")
        elif http.path == "/v1/models":
            self._tenant(http)
            entry: dict[str, Any] = {"id": MODEL, "object": "model", "owned_by": "stand-in"}
            if traits.says_context:
                entry["max_model_len"] = traits.context * (2 if self.fault == "advertised-too-much" else 1)
            await http.reply(200, {"object": "list", "data": [entry]})
        elif http.path == "/tokenize" and traits.tokenizer and http.method == "POST":
            body = http.json
            if "prompt" not in body:
                raise Refusal(400, "prompt is missing")
            await http.reply(200, {"tokens": list(range(len(tokenize(body["prompt"]))))})
        elif http.path in ("/v1/completions", "/v1/chat/completions") and http.method == "POST":
            if http.path == "/v1/completions" and not traits.completions:
                raise Refusal(404, "no such route")
            await self._generate(http, chat=http.path.endswith("chat/completions"))
        else:
            raise Refusal(404, f"no such route: {http.path}")

    def _metrics(self) -> str:
        held = sum(len(one.prompt) + len(one.emitted) for one in self.active) / self.traits.pool + self.lost_pages * PAGE / self.traits.pool
        pool = int(self.traits.context * 0.66) if self.fault == "pool-below-context" else self.traits.pool
        return (
            "# HELP nothing\n"
            f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{pool}"}} 1.0\n'
            f"vllm:num_requests_running {len(self.active)}\nvllm:num_requests_waiting {self.waiting}\nvllm:kv_cache_usage_perc {held}\n"
        )

    def _tenant(self, http: Exchange) -> str:
        key = http.headers.get("authorization", "").removeprefix("Bearer ")
        if self.traits.keys and key not in self.traits.keys:
            raise Refusal(401, f"the key {key} is not known")
        return key

    def _parse(self, http: Exchange, chat: bool) -> tuple[dict[str, Any], list[str]]:
        """Checks the body as an honest server does. Raises `Refusal`."""
        crash = self.fault == "crash-on-input"
        try:
            body = json.loads(http.body)
        except ValueError:
            raise Refusal(500 if crash else 400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refusal(400, "the body is not an object")
        if body.get("model") != MODEL and self.fault != "any-model":
            raise Refusal(404, "no such model")
        prompt = body.get("messages") if chat else body.get("prompt")
        if chat and isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) and isinstance(prompt[0].get("content"), str):
            tokens = ["<user>", "\n", *tokenize(prompt[0]["content"]), "\n", "<assistant>"]
        elif not chat and isinstance(prompt, str):
            tokens = ["<s>", *tokenize(prompt)]
        else:
            raise Refusal(500 if crash else 400, "the prompt is not a text")
        for name, kinds in (("max_tokens", int), ("temperature", (int, float)), ("n", int)):
            if body.get(name) is not None and not isinstance(body[name], kinds):
                raise Refusal(500 if crash else 400, f"{name} has the wrong type")
        return body, tokens

    async def _admit(self, http: Exchange, tokens: list[str], max_tokens: int, stream: bool) -> list[str]:
        """The limit. Returns the tokens that the engine will read; for an honest server these are the tokens that were sent."""
        context, fault = self.traits.context, self.fault
        if fault == "window-below-context" and len(tokens) > context // 2 and len(tokens) + max_tokens <= context:
            return tokens[-(context // 2) :]
        pool = int(context * 0.66)
        if fault == "pool-below-context" and pool < len(tokens) <= context:
            return [*self.previous[-200:], *tokens[:PAGE]]
        if fault in ("stream-short-at-limit", "stream-truncated-full-usage") and self._near(tokens, max_tokens, stream):
            return tokens[-(context // 2) :]
        if fault == "stream-error-at-limit" and self._near(tokens, max_tokens, stream):
            await self._refuse_in_stream(http)
        if len(tokens) + max_tokens <= context:
            return tokens
        if fault in ("truncate-head", "odd-ids"):
            return tokens[-(context - max_tokens) :]
        if fault == "truncate-tail":
            return tokens[: context - max_tokens]
        if fault == "truncate-half-full-usage":
            return tokens[-(context // 2) :]
        if fault == "stub-on-oversize":
            return [*self.previous, tokens[0]]
        if fault == "oversize-500":
            raise Refusal(500, "assertion failed: out of pages")
        if fault in ("oversize-hang", "oversize-stops-all"):
            self.stuck = self.stuck or fault == "oversize-stops-all"
            await http.gone.wait()
        if fault == "oversize-ends-engine":
            self.ended = True
        if fault == "unnamed-limit":
            raise Refusal(400, "bad request")
        if fault == "late-refusal" and stream:
            await self._refuse_in_stream(http)
        raise Refusal(400, f"This model's maximum context length is {context} tokens. However, you requested {len(tokens) + max_tokens}.")

    def _near(self, tokens: list[str], max_tokens: int, stream: bool) -> bool:
        """Is this a stream whose prompt is within the limit, but not by much?"""
        return stream and 0.75 * self.traits.context < len(tokens) + max_tokens <= self.traits.context

    async def _refuse_in_stream(self, http: Exchange) -> None:
        await http.start_stream()
        message = f"the limit is {self.traits.context}"
        await http.event({"error": {"message": message, "type": "x", "param": None, "code": None}})
        await http.end_stream()
        raise ConnectionError

    async def _generate(self, http: Exchange, *, chat: bool) -> None:
        tenant = self._tenant(http)
        body, tokens = self._parse(http, chat)
        max_tokens, stream = int(body.get("max_tokens") or 16), bool(body.get("stream"))
        self.count += 1
        number = self.count
        near = self._near(tokens, max_tokens, stream)
        over = len(tokens) + max_tokens > self.traits.context
        if (over and self.fault == "length-empty") or (near and self.fault == "stream-empty-at-limit"):
            one = Running(number, tokens, Reading([]), max_tokens, counted=len(tokens), finish="length")
            await self._answer(http, body, chat, one)
            return
        if self.ended:
            raise Refusal(503, "the engine has ended", {"Retry-After": "0"})
        read = await self._admit(http, tokens, max_tokens, stream)
        if self.waiting >= self.traits.queue:
            if self.fault == "overload-hang":
                await http.gone.wait()
            raise Refusal(503, "overloaded", {} if self.fault == "no-retry-after" else {"Retry-After": "0.05"})
        if self.fault == "crash-under-load" and len(self.active) >= 2 and self.chance.random() < 0.3:
            raise Refusal(500, "CUDA error")
        full = ("truncate-half-full-usage", "window-below-context", "stream-truncated-full-usage")
        counted = len(tokens) if self.fault in full else min(len(read), len(tokens))
        if self.fault == "stub-on-oversize" and read is not tokens:
            counted = 1
        self.waiting += 1
        try:
            await self.places.acquire()
        finally:
            self.waiting -= 1
        one = Running(number, tokens, Reading(list(read), self.traits.noise, chance=self.chance), max_tokens, counted=counted)
        one.salt, one.near = str(body.get("cache_salt", "")), near
        self.active.append(one)
        ghost = False
        try:
            if self.stuck or (self.fault == "health-green-while-stuck" and self.count > 14):
                self.stuck = True
                await http.gone.wait()
            await self._prefill(one, tenant)
            await self._decode_and_answer(http, body, chat, one)
        finally:
            self.previous = [*one.prompt, *(step.token for step in one.emitted)]
            self.last_answer = one.emitted
            if http.gone.is_set() or (one.finish is None):
                ghost = self._aborted(one)
            if not ghost:
                self.active.remove(one)
                self.places.release()

    def _aborted(self, one: Running) -> bool:
        """The client has gone. True when the engine does not notice."""
        if self.fault == "pages-lost":
            self.lost_pages += 2
        if self.fault == "late-writer-after-abort":
            self.late_writer = list(one.prompt)
        for other in self.active:
            if other is not one and self.fault == "abort-garbles-neighbour":
                other.reading.taint(one.prompt)
            if other is not one and self.fault == "abort-kills-neighbour":
                other.finish = "killed"
        if self.fault == "keeps-generating":
            pace_s = (time.monotonic() - one.began_s) / max(1, len(one.emitted))
            asyncio.get_running_loop().call_later((one.max_tokens - len(one.emitted)) * pace_s, self._forget, one)
            return True
        return False

    def _forget(self, one: Running) -> None:
        self.active.remove(one)
        self.places.release()

    async def _prefill(self, one: Running, tenant: str) -> None:
        """Looks up the prefix cache, computes the rest, and publishes the pages."""
        fault, tokens = self.fault, one.reading.tokens[:]
        if fault == "pool-overrun" and sum(len(x.prompt) + x.max_tokens for x in self.active) > self.traits.pool:
            raise Refusal(500, "Context size has been exceeded.")
        shared = fault in ("shared-across-keys", "shared-timing-only")
        salt = one.salt if self.traits.salts and fault != "salt-ignored" else ""
        scope = ("", salt) if shared else (tenant, salt)
        keys = self._keys(scope, tokens)
        hits = 0
        for key in keys:
            if key not in self.cache or (hits + 1) * PAGE >= len(tokens):
                break
            hits += 1
            self.cache.move_to_end(key)
        one.cached = hits * PAGE
        full = one.cached + PAGE >= len(tokens) - 1 and hits > 0
        self._misread(one, keys, hits, full)
        for key in keys[hits:]:
            self.writing[key] = True
            if fault == "publish-before-write":
                self._publish(key, [])
        await asyncio.sleep((len(tokens) - one.cached) * self.traits.prefill_s)
        for index, key in enumerate(keys):
            self.writing.pop(key, None)
            self._publish(key, tokens[index * PAGE : (index + 1) * PAGE])

    def _keys(self, scope: tuple[str, str], tokens: list[str]) -> list[tuple[Any, ...]]:
        keys: list[tuple[Any, ...]] = []
        for index in range(len(tokens) // PAGE):
            if self.fault == "weak-key":
                text = "".join(tokens[index * PAGE : (index + 1) * PAGE])
                keys.append((index, sum(text.encode()) % 4))
            else:
                keys.append((scope, tuple(tokens[: (index + 1) * PAGE])))
        return keys

    def _publish(self, key: tuple[Any, ...], tokens: list[str]) -> None:
        if key in self.cache and self.fault == "weak-key":
            return
        self.cache[key] = tokens
        while len(self.cache) * PAGE > self.traits.pool:
            gone, _ = self.cache.popitem(last=False)
            if self.fault == "stolen-page":
                self.contents[gone] = tokens

    def _misread(self, one: Running, keys: list[tuple[Any, ...]], hits: int, full: bool) -> None:
        """The faults of reading: what stands in the pages is not what the request thinks."""
        fault, reading, chance = self.fault, one.reading, self.chance
        prompt = list(reading.tokens)
        asked = self.asked[tuple(prompt)] = self.asked.get(tuple(prompt), 0) + 1
        others = [other for other in self.active if other is not one]
        if fault == "slot-not-cleared" and len(prompt) < 40 and self.previous:
            one.reading = Reading([*self.previous, *prompt], reading.noise, chance=chance)
        elif fault == "stale-tail" and len(self.previous) > len(prompt):
            reading.taint(self.previous[len(prompt) :])
        elif fault == "wrong-row" and others and chance.random() < 0.3:
            one.reading = Reading(list(chance.choice(others).prompt), reading.noise, chance=chance)
        elif fault == "weak-key" and hits:
            foreign = [token for key in keys[:hits] for token in self.cache[key]]
            one.reading = Reading([*foreign, *prompt[hits * PAGE :]], reading.noise, chance=chance)
        elif fault == "late-writer-after-abort" and self.late_writer and chance.random() < 0.7:
            one.reading = Reading([*self.late_writer, *prompt], reading.noise, chance=chance)
            self.late_writer = []
        elif fault == "batch-garble" and len(others) >= 2 and chance.random() < 0.5:
            reading.taint(others[0].prompt)
        elif fault == "preempt-corrupt" and sum(len(x.prompt) + x.max_tokens for x in self.active) > self.traits.pool:
            reading.taint([others[0].prompt[0], "moved"])
        elif fault == "publish-before-write" and any(self.writing.get(key) for key in keys[:hits]):
            reading.taint(["unwritten"])
        elif fault == "stolen-page" and any(key in self.contents for key in keys):
            reading.taint(next(self.contents[key] for key in keys if key in self.contents))
        elif fault == "short-retrieve" and hits > 1:
            one.reading = Reading([*prompt[: (hits - 1) * PAGE], *prompt[hits * PAGE :]], reading.noise, chance=chance)
        elif fault == "warm-requantised" and hits:
            reading.shift = -0.4
        elif fault == "full-hit-off-by-one" and full:
            one.reading = Reading(prompt[:-1], reading.noise, chance=chance)
        elif fault == "kept-checkpoint" and asked >= 3:
            reading.taint(["checkpoint"])

    async def _decode_and_answer(self, http: Exchange, body: dict[str, Any], chat: bool, one: Running) -> None:
        if body.get("stream"):
            await self._stream(http, body, chat, one)
            return
        while one.finish is None and not self._gone(http):
            await asyncio.sleep(self.traits.step_s)
            self._step(one)
        if not self._gone(http):
            await self._answer(http, body, chat, one)

    def _gone(self, http: Exchange) -> bool:
        return http.gone.is_set()

    def _step(self, one: Running) -> None:
        if self.fault == "stale-answer" and not one.emitted and self.last_answer and self.chance.random() < 0.3:
            one.emitted = list(self.last_answer[: one.max_tokens])
            one.finish = "length"
            return
        step = one.reading.step()
        if self.fault == "logprob-leak" and self.previous:
            place = len(one.emitted) + 5
            step = replace(step, top={**step.top, **dict.fromkeys(self.previous[place : place + 1], -3.0)})
        one.emitted.append(step)
        limit = one.max_tokens * (2 if self.fault == "over-max-tokens" else 1)
        if len(one.emitted) >= limit:
            one.finish = "length"
        if self.fault == "abort-as-finish" and len(self.active) >= 3 and len(one.emitted) > 3 and self.chance.random() < 0.1:
            one.finish = "abort"

    def _id(self, one: Running, chat: bool) -> str:
        number = 7 if self.fault == "id-reused" and one.number % 5 == 0 else one.number
        odd = "\ud800<b>" if self.fault == "odd-ids" else ""
        return f"{'chatcmpl' if chat else 'cmpl'}-{odd}{number}"

    def _usage(self, one: Running) -> dict[str, Any]:
        counted = one.counted - (one.cached if self.fault == "usage-without-cached" else 0)
        usage: dict[str, Any] = {
            "prompt_tokens": counted,
            "completion_tokens": len(one.emitted),
            "total_tokens": counted + len(one.emitted),
        }
        if self.traits.cached_counts and self.fault != "shared-timing-only":
            usage["prompt_tokens_details"] = {"cached_tokens": one.cached}
        return usage

    def _choice(self, steps: list[Emitted], body: dict[str, Any], chat: bool, *, delta: bool, finish: str | None) -> dict[str, Any]:
        text = "".join(step.token for step in steps)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if chat:
            choice["delta" if delta else "message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self.traits.logprobs and body.get("logprobs") and chat:
            content = [
                {"token": s.token, "logprob": s.logprob, "top_logprobs": [{"token": t, "logprob": p} for t, p in s.top.items()]}
                for s in steps
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        elif self.traits.logprobs and body.get("logprobs"):
            choice["logprobs"] = {
                "tokens": [s.token for s in steps],
                "token_logprobs": [s.logprob for s in steps],
                "top_logprobs": [s.top for s in steps],
                "text_offset": [0] * len(steps),
            }
        return choice

    async def _answer(self, http: Exchange, body: dict[str, Any], chat: bool, one: Running) -> None:
        if one.finish == "killed":
            raise Refusal(500, "killed")
        if body.get("stream"):
            await self._stream(http, body, chat, one)
            return
        choice = self._choice(one.emitted, body, chat, delta=False, finish=one.finish)
        head = {"id": self._id(one, chat), "object": "x", "created": 1, "model": MODEL}
        await http.reply(200, {**head, "choices": [choice], "usage": self._usage(one)})

    async def _stream(self, http: Exchange, body: dict[str, Any], chat: bool, one: Running) -> None:
        await http.start_stream()
        head: dict[str, Any] = {"id": self._id(one, chat), "object": "x", "created": 1, "model": MODEL}
        sent = 0
        while True:
            if one.finish is None:
                await asyncio.sleep(self.traits.step_s)
                self._step(one)
            fresh = one.emitted[sent:]
            sent = len(one.emitted)
            if self._gone(http):
                return
            if one.finish == "killed" or (self.fault == "stream-cut" and len(self.active) >= 3 and sent > 4):
                one.finish = "cut"
                await http.end_stream()
                return
            others = [other for other in self.active if other is not one and other.emitted]
            if self.fault == "crossed-stream" and others and self.chance.random() < 0.2:
                other = self.chance.choice(others)
                foreign = {**head, "id": self._id(other, chat)}
                await http.event({**foreign, "choices": [self._choice(other.emitted[-8:], body, chat, delta=True, finish=None)]})
            for step in fresh:
                await http.event({**head, "choices": [self._choice([step], body, chat, delta=True, finish=None)], "usage": None})
            if one.finish is not None:
                break
        if self.fault == "stream-cut-at-limit" and one.near:
            await http.end_stream()
            return
        await http.event({**head, "choices": [self._choice([], body, chat, delta=True, finish=one.finish)], "usage": None})
        if self.fault == "stream-hangs-at-limit" and one.near:
            await http.gone.wait()
        if self.fault == "stream-unended-at-limit" and one.near:
            await http.end_stream()
            return
        if self.traits.stream_usage:
            await http.event({**head, "choices": [], "usage": self._usage(one)})
        await http.event("[DONE]")
        await http.end_stream()
