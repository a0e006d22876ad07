"""What goes over the wire, as plain values: an `Ask` becomes a request body, a response becomes an `Answer`.

Owns the reading of OpenAI's bodies and events, strictly: what does not read becomes an answer that says so, never an exception. No I/O.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MOST_ERROR_CHARS = 4_000
MOST_ALTERNATIVES = 20  # A position: more is never asked for.

Json = Any
"""Parsed JSON of a stranger: anything at all may stand in it."""


class End(StrEnum):
    """How a request ended for us."""

    ANSWERED = "answered"
    REFUSED = "refused"  # 4xx or 5xx with a readable body, or an error in a stream.
    TIMEOUT = "timeout"
    CUT = "cut"  # The connection broke, or a stream stopped without its end.
    MALFORMED = "malformed"
    OVERSIZE = "oversize"
    CANCELLED = "cancelled"  # By us.


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation request. `prompt` is text, or token ids for completions. `tenant` is the index of a key."""

    prompt: str | tuple[int, ...]
    max_tokens: int = 8
    chat: bool = False
    stream: bool = False
    logprobs: int = 0
    tenant: int = 0
    salt: str = ""
    reuse: bool = True  # False asks llama.cpp to compute the whole prompt anew; no other server knows the field.
    cancel_after_s: float | None = None
    cancel_after_chunks: int | None = None
    prompt_tokens: int = 0  # What we think it is, for the budget.
    label: str = ""

    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, model: str) -> dict[str, Json]:
        """The JSON body: greedy, fixed seed, and only fields that servers know."""
        body: dict[str, Json] = {"model": model, "max_tokens": self.max_tokens, "temperature": 0, "seed": 1}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = list(self.prompt) if isinstance(self.prompt, tuple) else self.prompt
        if self.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        if self.logprobs and self.chat:
            body["logprobs"], body["top_logprobs"] = True, self.logprobs
        elif self.logprobs:
            body["logprobs"] = self.logprobs
        if self.salt:
            body["cache_salt"] = self.salt
        if not self.reuse:
            body["cache_prompt"] = False
        return body


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token with its logprob and the tokens that were likely beside it."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class Answer:
    """What came back for an `Ask`. Token counts are None when the server did not say."""

    ask: Ask
    end: End = End.ANSWERED
    status: int = 0
    text: str = ""
    steps: tuple[Step, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error_message: str = ""
    error_shape: bool = False  # An OpenAI error body: {"error": {"message": ...}}.
    note: str = ""  # Why it is malformed, oversize or cut.
    done_seen: bool = False
    error_in_stream: bool = False
    response_id: str = ""
    header_id: str = ""
    model: str = ""
    retry_after_s: float | None = None
    first_s: float | None = None
    total_s: float = 0.0
    number: int = 0
    ids_seen: set[str] = field(default_factory=set)

    @property
    def ok(self) -> bool:
        return self.end is End.ANSWERED and self.status == 200

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(step.token for step in self.steps)

    @property
    def server_id(self) -> str:
        return self.response_id or self.header_id


def dig(value: Json, *path: str | int) -> Json:
    """`value` at `path`, or None where the path leaves it."""
    for key in path:
        if isinstance(key, int) and isinstance(value, list) and -len(value) <= key < len(value):
            value = value[key]
        elif isinstance(key, str) and isinstance(value, dict):
            value = value.get(key)
        else:
            return None
    return value


def whole(value: Json) -> int | None:
    """`value` if it is a count: what takes more than 63 bits counts nothing, and no float holds what is computed of it."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def parse_json(data: bytes) -> Json:
    """Parsed JSON, or None when it is not JSON (or deep enough to break the parser)."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def read_error(answer: Answer, body: Json, raw: bytes = b"") -> None:
    """Takes the message out of an error body, whichever of the known shapes it has."""
    answer.end = End.REFUSED
    error = dig(body, "error")
    answer.error_shape = isinstance(dig(error, "message"), str)
    for candidate in (dig(error, "message"), error, dig(body, "message"), dig(body, "detail")):
        if isinstance(candidate, str):
            answer.error_message = candidate[:MOST_ERROR_CHARS]
            return
    answer.error_message = json.dumps(body)[:500] if body is not None else raw[:200].decode("utf-8", "replace")


def read_whole(answer: Answer, body: Json) -> None:
    """Reads a response that is not a stream."""
    if not isinstance(body, dict):
        answer.end, answer.note = End.MALFORMED, "the body is not a JSON object"
        return
    if body.get("error") is not None:
        read_error(answer, body)
        return
    choice = dig(body, "choices", 0)
    if not isinstance(choice, dict):
        answer.end, answer.note = End.MALFORMED, "there is no choice in the body"
        return
    text = dig(choice, "message", "content") if answer.ask.chat else choice.get("text")
    if text is not None and not isinstance(text, str):
        answer.end, answer.note = End.MALFORMED, "the text of the choice is not a string"
        return
    answer.text = (text or "") if not answer.ask.chat else (text or "") or _reasoning(dig(choice, "message"))
    _read_common(answer, body, choice)
    answer.done_seen = True


def read_event(answer: Answer, data: str) -> None:
    """Reads one event of a stream into `answer`."""
    if data.strip() == "[DONE]":
        answer.done_seen = True
        return
    body = parse_json(data.encode())
    if not isinstance(body, dict):
        answer.end, answer.note = End.MALFORMED, "an event is not a JSON object"
        return
    if body.get("error") is not None:
        read_error(answer, body)
        answer.error_in_stream = True
        return
    choice = dig(body, "choices", 0)
    if isinstance(choice, dict):
        piece = dig(choice, "delta", "content") if answer.ask.chat else choice.get("text")
        if isinstance(piece, str):
            answer.text += piece
        elif answer.ask.chat:
            answer.text += _reasoning(choice.get("delta"))
    _read_common(answer, body, choice if isinstance(choice, dict) else {})


def _reasoning(message: Json) -> str:
    for name in ("reasoning_content", "reasoning"):
        value = dig(message, name)
        if isinstance(value, str):
            return value
    return ""


def _read_common(answer: Answer, body: dict[str, Json], choice: dict[str, Json]) -> None:
    if isinstance(body.get("id"), str) and body["id"]:  # Some services begin a stream with an event that has none.
        answer.response_id = body["id"]
        answer.ids_seen.add(body["id"])
    if isinstance(body.get("model"), str):
        answer.model = body["model"]
    if isinstance(choice.get("finish_reason"), str):
        answer.finish_reason = choice["finish_reason"]
    usage = body.get("usage")
    if isinstance(usage, dict):
        answer.prompt_tokens = whole(usage.get("prompt_tokens"))
        answer.completion_tokens = whole(usage.get("completion_tokens"))
        answer.cached_tokens = whole(dig(usage, "prompt_tokens_details", "cached_tokens"))
    cached = whole(dig(body, "timings", "cache_n"))
    if answer.cached_tokens is None and cached is not None:  # llama.cpp says it here.
        answer.cached_tokens = cached
    like_chat = answer.ask.chat or isinstance(dig(choice, "logprobs", "content"), list)  # llama.cpp answers completions so, too.
    room = 2 * answer.ask.max_tokens + 16 - len(answer.steps)  # What a flood of tokens says beyond is not kept.
    answer.steps += tuple((_chat_steps(choice) if like_chat else _text_steps(choice))[: max(0, room)])


def _items(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _number(value: Json) -> float | None:
    """`value` if it is a finite number: servers do send NaN and infinities, and they spoil whatever is computed of them."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
    except OverflowError:  # An integer of hundreds of digits.
        return None


def _chat_steps(choice: dict[str, Json]) -> list[Step]:
    steps = []
    for entry in _items(dig(choice, "logprobs", "content")):
        token, logprob = dig(entry, "token"), _number(dig(entry, "logprob"))
        if isinstance(token, str) and logprob is not None:
            tops = [(dig(top, "token"), _number(dig(top, "logprob"))) for top in _items(dig(entry, "top_logprobs"))[:MOST_ALTERNATIVES]]
            steps.append(Step(token, logprob, tuple((name, value) for name, value in tops if isinstance(name, str) and value is not None)))
    return steps


def _text_steps(choice: dict[str, Json]) -> list[Step]:
    logprobs = choice.get("logprobs")
    tokens, values, tops = dig(logprobs, "tokens"), dig(logprobs, "token_logprobs"), dig(logprobs, "top_logprobs")
    if not isinstance(tokens, list) or not isinstance(values, list):
        return []
    steps = []
    for index, (token, value) in enumerate(zip(tokens, values, strict=False)):
        logprob = _number(value)
        if not isinstance(token, str) or logprob is None:
            continue
        top = dig(tops, index)
        pairs = [(name, _number(odds)) for name, odds in list(top.items())[:MOST_ALTERNATIVES]] if isinstance(top, dict) else []
        steps.append(Step(token, logprob, tuple((str(name), odds) for name, odds in pairs if odds is not None)))
    return steps
