"""What a server says about itself, before anything is tested: models, context, pool, engine, and what its answers hold.

Owns discovery. Reads every place where servers of this kind state their limits. Never judges; a probe may find that what stands here is
untrue.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass, field

from kvseal.audit.backoff import BUSY
from kvseal.audit.client import Client, Reply
from kvseal.audit.metrics import Samples, parse_metrics
from kvseal.audit.prompts import Gauge, filler
from kvseal.audit.redact import key_name
from kvseal.audit.wire import MOST_ERROR_CHARS, Answer, Ask, End, Json, dig, whole

FIRST_ASKS = ("first contact", "first stream", "counting tokens")
"""Labels of the requests by which a server is got to know: what it refuses there is not yet known to be wrong."""

BUSY_S = 30.0
"""So long is a server waited for that says at first that it is busy."""


class CannotAudit(Exception):
    """Nothing can be audited at this address; the message says why and what to do."""


@dataclass(slots=True)
class Target:
    """`context_tokens` is what one request may use (prompt and output) by the server's own word; `said_by` is where it stood."""

    model: str
    engine: str = "unknown"
    version: str = ""
    context_tokens: int | None = None
    said_by: str = ""
    pool_tokens: int | None = None
    pool_said_by: str = ""
    completions: bool = False
    chat: bool = False
    logprobs: dict[bool, int] = field(default_factory=dict)  # chat? -> alternatives per position that the server gives
    streamed: tuple[bool, ...] = (False, True)  # Of which endpoints streams work, as values of `Ask.chat`.
    cached_counts: bool = False
    metrics: bool = False
    health: bool = False
    gauge: Gauge = field(default_factory=lambda: Gauge({}))
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The endpoints that answer, as values of `Ask.chat`; completions first, since no template stands between."""
        return tuple(kind for kind, there in ((False, self.completions), (True, self.chat)) if there)

    @property
    def plain(self) -> bool:
        """The `Ask.chat` of tests that may use either."""
        return self.kinds[0]

    @property
    def streams(self) -> bool:
        """Do streams work for tests that may use either?"""
        return self.plain in self.streamed

    def limits(self) -> list[int]:
        return [limit for limit in (self.context_tokens, self.pool_tokens) if limit is not None]

    def describe(self) -> dict[str, str]:
        limit = f"{self.context_tokens} tokens ({self.said_by})" if self.context_tokens else "not said"
        pool = f"{self.pool_tokens} tokens ({self.pool_said_by})" if self.pool_tokens else "not said"
        ends = ", ".join(name for name, there in (("completions", self.completions), ("chat", self.chat)) if there)
        return {
            "model": self.model,
            "engine": f"{self.engine} {self.version}".strip(),
            "context": limit,
            "KV pool": pool,
            "endpoints": ends,
            "logprobs": ", ".join(f"{'chat' if chat else 'completions'}: {count}" for chat, count in self.logprobs.items() if count)
            or "none",
            "token counts": f"by {self.gauge.source}",
            "cached-token counts": "yes" if self.cached_counts else "no",
            "metrics": "yes" if self.metrics else "no",
        }


async def survey(client: Client, *, model: str, context_tokens: int | None) -> Target:
    """Reads what the server publishes; generates nothing. Raises `CannotAudit`."""
    began_s = time.monotonic()
    models = await _models(client)
    if models.status == 0:
        raise CannotAudit(f"{client.settings.url}/models: {models.note}. Is the server running, and does the address end in /v1?")
    if models.status in (401, 403):
        raise CannotAudit(f"{client.settings.url}/models answered {models.status}: give a key with --keys")
    listed = dig(models.json, "data")
    entries = [entry for entry in listed if isinstance(dig(entry, "id"), str)] if isinstance(listed, list) else []
    if not model and not entries:
        raise CannotAudit(_no_models(client, models, time.monotonic() - began_s))
    target = Target(model=model or str(dig(entries[0], "id")))
    if models.status != 200:
        target.notes.append(f"/models answered {models.status}")
    if not model and len(entries) > 1:
        target.notes.append(f"{len(entries)} models are listed; the first, {target.model!r}, is audited (choose with --model)")
    mine = next((entry for entry in entries if dig(entry, "id") == target.model), None)
    if entries and mine is None:
        names = ", ".join(str(dig(entry, "id"))[:60] for entry in entries[:5])
        target.notes.append(f"{model!r} is not among the models that the server lists: {names}")
    for path in (("max_model_len",), ("context_length",), ("context_window",), ("max_context_length",), ("meta", "n_ctx")):
        if target.context_tokens is None and (limit := whole(dig(mine, *path))):
            target.context_tokens, target.said_by = limit, f"/models {'.'.join(path)}"
    owner = dig(mine, "owned_by")
    target.engine = owner.lower() if isinstance(owner, str) and owner.lower() in ("vllm", "sglang", "llamacpp", "kvseal") else "unknown"
    await _ask_around(client, target)
    if context_tokens is not None:
        target.context_tokens, target.said_by = context_tokens, "--context"
    return target


def _no_models(client: Client, models: Reply, waited_s: float) -> str:
    """Why no model is known, and what to do."""
    where = f"{client.settings.url}/models answered {models.status}"
    if 300 <= models.status < 400:
        return f"{where} {models.note}: redirects are not followed, so give the address that it points to"
    if models.status in BUSY:
        asked = f", and asks to come back in {models.retry_after_s:.0f} s" if models.retry_after_s else ""
        said = str(dig(models.json, "error", "message") or "")[:160]
        said = f" ({said!r})" if said else ""
        return f"{where}{said} for {waited_s:.0f} s{asked}: it is not ready, or refuses everybody; try again later, or give more --timeout"
    if models.status != 200:
        return f"{where}: does the address end in /v1? If the server lists no models, name one with --model"
    if models.json is None:
        said = f"{models.content_type or 'no content type'}, which is no JSON {models.note}".rstrip()
        return f"{where} with {said}: is this the address of an API, the one that ends in /v1?"
    return f"{client.settings.url}/models lists no model (status 200): give one with --model"


async def _models(client: Client) -> Reply:
    """What /models says. A server that says 503 since it loads its model is waited for as long as a request may take, another that is busy
    for half a minute, and none that asks to come back later than that."""
    began_s = time.monotonic()
    while True:
        reply = await client.get("/models", timeout_s=client.settings.timeout_s)
        loads = reply.status == 503 and "load" in reply.text[:MOST_ERROR_CHARS].lower()
        until_s = began_s + client.settings.timeout_s if loads else began_s + min(BUSY_S, client.settings.timeout_s)
        wait_s = max(0.05, reply.retry_after_s if reply.retry_after_s is not None else 1.0)
        if reply.status not in BUSY or time.monotonic() + wait_s > until_s:
            return reply
        await client.sleep(wait_s)


async def _ask_around(client: Client, target: Target) -> None:
    """The pages that only some engines have: each is asked for once, and its absence means nothing."""
    props = (await client.get("/props", root=True)).json
    if whole(dig(props, "default_generation_settings", "n_ctx")):
        target.engine = "llamacpp"
        target.version = str(dig(props, "build_info") or "")[:60]
        target.context_tokens, target.said_by = whole(dig(props, "default_generation_settings", "n_ctx")), "/props n_ctx (one slot)"
    info = (await client.get("/get_server_info", root=True)).json
    pool = whole(dig(info, "max_total_num_tokens")) or whole(dig(info, "internal_states", 0, "max_total_num_tokens"))
    if pool:
        target.engine, target.pool_tokens, target.pool_said_by = "sglang", pool, "/get_server_info max_total_num_tokens"
        target.context_tokens = target.context_tokens or whole(dig(info, "context_length"))
        target.said_by = target.said_by or "/get_server_info context_length"
    tokenizer = (await client.get("/tokenizer_info", root=True)).json
    if target.context_tokens is None and (limit := whole(dig(tokenizer, "model_max_length"))) and limit < 1 << 30:
        target.context_tokens, target.said_by = limit, "/tokenizer_info model_max_length"
    version = (await client.get("/version", root=True)).json
    if isinstance(dig(version, "version"), str):
        target.version = target.version or str(dig(version, "version"))[:60]
    target.health = (await client.get("/health", root=True)).status == 200
    samples = await read_metrics(client)
    target.metrics = bool(samples)
    _pool_of_metrics(target, samples)


async def read_metrics(client: Client) -> Samples:
    """The server's metrics now; empty when it has none to show."""
    reply = await client.get("/metrics", root=True)
    return parse_metrics(reply.text) if reply.status == 200 and "html" not in reply.content_type else Samples(())


def _pool_of_metrics(target: Target, samples: Samples) -> None:
    pool = samples.pool_tokens()
    if pool is not None and target.pool_tokens is None:
        target.pool_tokens, target.pool_said_by = pool, "/metrics"
    if target.engine == "unknown" and (engine := samples.engine()):
        target.engine = engine


async def meet(client: Client, target: Target, draw: random.Random, *, logprobs: bool = True) -> None:
    """Asks a few small questions: which endpoints answer, with logprobs, in streams, and how prompts are counted. Raises `CannotAudit`,
    and `TurnedAway` where only a busy server was heard."""
    client.model = target.model
    refusals: list[str] = []
    answer: Answer | None = None
    for chat in (False, True):
        answer = await _try_one(client, target, chat, draw, (5, 1, 0) if logprobs else (0,))
        if answer is None or not answer.ok:
            if answer is not None:
                refusals.append(f"{name_of(chat)}: {answer.status or answer.end.value} {answer.error_message or answer.note}"[:200])
            continue
        if chat:
            target.chat = True
        else:
            target.completions = True
        target.cached_counts = target.cached_counts or answer.cached_tokens is not None
    if not target.kinds and answer is not None and answer.status in BUSY:
        raise client.backoff.turned_away(answer)
    if not target.kinds:
        hint = ". Is the key right (--keys)?" if any(": 401 " in said or ": 403 " in said for said in refusals) else ""
        raise CannotAudit("no endpoint generates: " + "; ".join([*refusals, *target.notes]) + hint)
    await _other_keys(client, target, draw)
    await _calibrate(client, target, draw)
    await _try_stream(client, target, draw)


async def _try_one(client: Client, target: Target, chat: bool, draw: random.Random, counts: tuple[int, ...]) -> Answer | None:
    """One small request with as many logprobs as the server gives."""
    answer = None
    for count in counts:
        ask = Ask(filler(8, draw).lstrip(), max_tokens=2, chat=chat, logprobs=count, prompt_tokens=16, label=FIRST_ASKS[0])
        answer = await client.ask(ask)
        if answer.ok or answer.end not in (End.REFUSED, End.MALFORMED) or answer.status in (401, 403, 404, 405, *BUSY):
            break
    if answer is not None and answer.ok:
        target.logprobs[chat] = max((len(step.top) for step in answer.steps), default=0) or int(bool(answer.steps))
    return answer


async def _other_keys(client: Client, target: Target, draw: random.Random) -> None:
    """Each further key must be let in, or what strangers may see cannot be tried. Raises `CannotAudit`."""
    for tenant in range(1, len(client.settings.keys)):
        text = filler(8, draw).lstrip()
        answer = await client.ask(Ask(text, max_tokens=1, chat=target.plain, tenant=tenant, prompt_tokens=16, label=FIRST_ASKS[0]))
        if answer.status in (401, 403):
            name = key_name(client.settings.keys[tenant])
            raise CannotAudit(f"the server refuses key {tenant + 1} of --keys ({name}) with {answer.status}")


async def _try_stream(client: Client, target: Target, draw: random.Random) -> None:
    for chat in target.kinds:
        ask = Ask(filler(8, draw).lstrip(), max_tokens=4, chat=chat, stream=True, prompt_tokens=16, label=FIRST_ASKS[1])
        answer = await client.ask(ask)
        if answer.end in (End.MALFORMED, End.REFUSED):
            target.streamed = tuple(kind for kind in target.streamed if kind is not chat)
            target.notes.append(f"streams do not work for {name_of(chat)}: {answer.note or answer.error_message}"[:200])


async def _calibrate(client: Client, target: Target, draw: random.Random) -> None:
    """Learns how many tokens the server counts for filler words: the tokeniser if it shows one, else its usage figures."""
    few, many = 16, max(24, min([144, *(limit // 2 - 24 for limit in target.limits())]))  # Not more than a small context takes.
    usage: dict[bool, tuple[int, int] | None] = {}
    for chat in target.kinds:
        counts = []
        for words in (few, many):
            text = filler(words, draw).lstrip()
            answer = await client.ask(Ask(text, max_tokens=1, chat=chat, prompt_tokens=words + 32, label=FIRST_ASKS[2]))
            counts.append(answer.prompt_tokens if answer.ok else None)
        usage[chat] = (counts[0], counts[1]) if counts[0] is not None and counts[1] is not None else None
    slope = await _by_tokenizer(client, target, draw, few, many)
    base, by_usage = dict(_USUAL_BASE), 0.0
    guessed = set(target.kinds)
    for chat, pair in usage.items():
        own = (pair[1] - pair[0]) / (many - few) if pair is not None else 0.0
        if pair is None or not (slope or own > 0):
            continue
        by_usage = max(by_usage, own)
        base[chat] = pair[0] - few * (slope or own)
        guessed.discard(chat)
        if slope is not None and abs(own - slope) * many > 2 + 0.03 * many:
            target.notes.append(f"usage counts {own:.3f} tokens a word where the server's own tokeniser counts {slope:.3f}")
    if per_word := slope or by_usage:
        source = "tokeniser" if len(guessed) == len(target.kinds) else "usage" if slope is None else "tokeniser and usage"
        target.gauge = Gauge(base, per_word, source, bool(guessed))
    if guessed and target.gauge.known:
        names = " and ".join(name_of(chat) for chat in target.kinds if chat in guessed)
        target.notes.append(f"what stands around a prompt is counted nowhere for {names}, so sizes there are guesses")
    if not target.gauge.known:
        target.notes.append("nobody counts tokens here: neither usage nor a tokeniser; sizes are guesses of one token a word")


_USUAL_BASE = {False: 1.0, True: 24.0}
"""Tokens around a prompt where nobody counts them: a first token, and a chat template."""


async def _by_tokenizer(client: Client, target: Target, draw: random.Random, few: int, many: int) -> float | None:
    """Tokens a word by the server's own tokeniser, in whichever of three shapes it takes requests."""
    texts = [filler(words, draw) for words in (few, many)]
    shapes: tuple[tuple[str, bool, str], ...] = (
        ("/tokenize", True, "prompt"),
        ("/tokenize", True, "content"),
        ("/extras/tokenize", True, "input"),
    )
    for path, root, name in shapes:
        counts = []
        for text in texts:
            body: dict[str, Json] = {name: text}
            if name == "prompt":
                body |= {"model": target.model, "add_special_tokens": False}
            reply = await client.post(path, body, root=root, timeout_s=10.0)
            tokens = dig(reply.json, "tokens") if reply.status == 200 else None
            if not isinstance(tokens, list):
                break
            counts.append(len(tokens))
        if len(counts) == 2 and counts[1] > counts[0]:
            return (counts[1] - counts[0]) / (many - few)
    return None


def name_of(chat: bool) -> str:
    """How a report calls an endpoint."""
    return "chat" if chat else "completions"


_NUMBER = re.compile(r"\d[\d,_]*")


def numbers_in(text: str) -> list[int]:
    """The whole numbers of a message, with their separators taken out."""
    return [int(re.sub(r"[,_]", "", match)) for match in _NUMBER.findall(text) if len(match) < 16]
