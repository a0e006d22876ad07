"""A request body to a `GenerationAsk`: every field checked, bounded, and either honoured, named as ignored, or refused.

Owns the meaning of the fields. Never silence: a field that would change the answer and is not served is a 400; a field that nobody knows is
listed in ``x-kvseal-ignored-fields`` (400 under ``--strict-fields``). Errors name the field. L1: the budget is checked here with the same
numbers that the engine enforces.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvseal.core.errors import Forbidden, InvalidRequest, ModelNotServed
from kvseal.core.request import MAX_CHOICES, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS, SamplingParams
from kvseal.serve.messages import read_messages
from kvseal.serve.schemas import FORBIDDEN_FIELDS, REFUSED_FIELDS, UNSERVED_FIELDS, ChatBody, CompletionBody
from kvseal.serve.served import Rendering, ServedModel

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_SEQUENCES = 1024
"""Prompts times choices of one request."""
DEFAULT_COMPLETION_TOKENS = 16
MAX_PRIORITY = 2**31 - 1
MAX_TOKENS = 2**31 - 1
MAX_SALT_CHARS = 1024
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 256
"""Longer than any token. Each word is encoded twice while everybody else waits, so both their number and their length are bounded first."""
REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+=-]{0,127}")
_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    text: str | None
    """As the caller gave it; None for ids and chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAsk:
    """What one HTTP request wants generated, and how the answer is to be written."""

    chat: bool
    prompts: tuple[Prompt, ...]
    choices: int
    """Per prompt, shown."""
    drawn: int
    """Per prompt, generated (best_of)."""
    max_output_tokens: tuple[int, ...]
    """Per prompt."""
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    scoring_only: bool = False
    """max_tokens 0 with echo: nothing generated is shown."""
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    obfuscate: bool = False
    priority: int = 0
    salt: str = ""
    caller_request_id: str | None = None
    service_tier: str | None = None
    ignored_fields: tuple[str, ...] = ()


def read_fields(fields: Mapping[str, Any], kind: type[Body], *, strict: bool) -> tuple[Body, tuple[str, ...]]:
    """The typed body and the names that nobody reads. Raises `InvalidRequest` naming the first field of the wrong type."""
    for name in FORBIDDEN_FIELDS:
        if fields.get(name) is not None:
            raise Forbidden(f"{name} is the operator's to set, not the caller's", param=name)
    for name, neutral in REFUSED_FIELDS.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            raise InvalidRequest(f"{name} is not served here, and leaving it out would change the answer", param=name)
    try:
        body = msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _named(error) from None
    known = set(kind.__struct_fields__)
    unknown = [name for name in fields if name not in known and name not in REFUSED_FIELDS and name not in UNSERVED_FIELDS]
    unknown = [name for name in unknown if name not in FORBIDDEN_FIELDS]
    if strict and unknown:
        raise InvalidRequest("the request has fields that this server does not know (--strict-fields)", param=_printable(unknown[0]))
    unserved = [name for name in UNSERVED_FIELDS if fields.get(name) is not None]
    return body, tuple(_printable(name) for name in [*unknown, *unserved])


def _printable(name: str) -> str:
    """Names go into a header: anything but plain letters is replaced, and long ones are cut."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) or "?"


def _named(error: msgspec.ValidationError) -> InvalidRequest:
    text = str(error)
    found = _AT.search(text)
    what = text[: found.start()] if found else text
    param = found[1] if found else None
    if missing := re.search(r"missing required field `(\w+)`", what):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequest(f"{param} is missing", param=param)
    return InvalidRequest(f"{param or 'the body'}: {what.replace('`', '').replace(' | ', ' or ')}", param=param)


# --- chat --------------------------------------------------------------------------------------------------


async def read_chat(fields: Mapping[str, Any], model: ServedModel, *, strict: bool, obfuscate: bool) -> GenerationAsk:
    """The ask of a /v1/chat/completions body."""
    body, ignored = read_fields(fields, ChatBody, strict=strict)
    check_model(body.model, model)
    messages = read_messages(body.messages, developer_as_system=not model.prefers_developer_role)
    tokens = await model.encode_chat(messages, rendering(body.add_generation_prompt, body.continue_final_message, _variables(body)))
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = _bounded("top_logprobs", body.top_logprobs or 0, 0, MAX_TOP_LOGPROBS) if body.logprobs else None
    name, asked = _asked_tokens(body)
    if asked is not None:
        _bounded(name, asked, 1, MAX_TOKENS)
    budget = model.output_budget(len(tokens), asked, where="messages")
    choices = _bounded("n", 1 if body.n is None else body.n, 1, MAX_CHOICES)
    return GenerationAsk(
        chat=True,
        prompts=(Prompt(tuple(tokens), None),),
        choices=choices,
        drawn=choices,
        max_output_tokens=(budget,),
        sampling=_sampling(body, model, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs),
        logprobs=logprobs,
        **_shared(body, ignored, obfuscate),
    )


def rendering(add_generation_prompt: bool | None, continue_final: bool | None, variables: Mapping[str, Any] | None) -> Rendering:
    """How to run the template; an unfinished final message and a new turn exclude each other."""
    if continue_final and add_generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt exclude each other", param="continue_final_message")
    add = not continue_final if add_generation_prompt is None else add_generation_prompt
    return Rendering(add, bool(continue_final), variables)


def _variables(body: ChatBody) -> Mapping[str, Any]:
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return effort | (body.chat_template_kwargs or {})


# --- completions -------------------------------------------------------------------------------------------


async def read_completion(fields: Mapping[str, Any], model: ServedModel, *, strict: bool, obfuscate: bool) -> GenerationAsk:
    """The ask of a /v1/completions body."""
    body, ignored = read_fields(fields, CompletionBody, strict=strict)
    check_model(body.model, model)
    add_special = body.add_special_tokens is not False
    prompts = [await _prompt(one, model, where, add_special) for where, one in _prompts(body.prompt)]
    name, given = _asked_tokens(body)
    asked = DEFAULT_COMPLETION_TOKENS if given is None else given
    echo = bool(body.echo)
    _bounded(name, asked, 0 if echo else 1, MAX_TOKENS)
    # The engine always computes one token; with max_tokens 0 it is not shown.
    budgets = tuple(model.output_budget(len(prompt.tokens), max(1, asked), where="prompt") for prompt in prompts)
    logprobs = None if body.logprobs is None else _bounded("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    choices = _bounded("n", 1 if body.n is None else body.n, 1, MAX_CHOICES)
    drawn = _bounded("best_of", choices if body.best_of is None else body.best_of, choices, MAX_CHOICES)
    if drawn > choices and body.stream:
        raise InvalidRequest("best_of cannot be streamed: the best is known only at the end", param="best_of")
    if drawn * len(prompts) > MAX_SEQUENCES:
        raise InvalidRequest(f"{len(prompts)} prompts with {drawn} choices each are more than {MAX_SEQUENCES} sequences", param="prompt")
    scored = logprobs if logprobs is not None else 0 if drawn > choices else None
    prompt_logprobs = body.prompt_logprobs if body.prompt_logprobs is not None else logprobs if echo else None
    return GenerationAsk(
        chat=False,
        prompts=tuple(prompts),
        choices=choices,
        drawn=drawn,
        max_output_tokens=budgets,
        sampling=_sampling(body, model, logprobs=scored, prompt_logprobs=prompt_logprobs),
        echo=echo,
        scoring_only=asked == 0,
        logprobs=logprobs,
        **_shared(body, ignored, obfuscate),
    )


def _prompts(prompt: str | list[Any]) -> list[tuple[str, str | list[Any]]]:
    """Each prompt with the place that errors name."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise InvalidRequest("prompt is an empty list; it needs at least one prompt or token", param="prompt")
    if type(prompt[0]) is int:
        return [("prompt", prompt)]
    if len(prompt) > MAX_SEQUENCES:
        raise InvalidRequest(f"prompt lists {len(prompt)} prompts; at most {MAX_SEQUENCES}", param="prompt")
    return [(f"prompt[{i}]", each) for i, each in enumerate(prompt)]


async def _prompt(prompt: object, model: ServedModel, where: str, add_special: bool) -> Prompt:
    if isinstance(prompt, str):
        tokens: Sequence[int] = await model.encode(prompt, add_special_tokens=add_special)
        text: str | None = prompt
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens, text = prompt, None
    else:
        raise InvalidRequest(f"{where} must be a string or a list of token ids", param=where)
    if not tokens:
        raise InvalidRequest(f"{where} is empty; a prompt needs at least one token", param=where)
    vocab_size = model.report.vocab_size
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise InvalidRequest(f"{where} holds a token id outside 0..{vocab_size - 1}", param=where)
    return Prompt(tuple(tokens), text)


# --- shared ------------------------------------------------------------------------------------------------


def check_model(name: str | None, model: ServedModel) -> None:
    """A missing or null name means the one model that there is."""
    if name is not None and name != model.name:
        raise ModelNotServed(f"the model that was asked for is not served here; this server serves {model.name!r}", param="model")


def _asked_tokens(body: ChatBody | CompletionBody) -> tuple[str, int | None]:
    """The output budget under its newer name, else under its older one."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _shared(body: ChatBody | CompletionBody, ignored: tuple[str, ...], obfuscate: bool) -> dict[str, Any]:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    wanted = options.include_obfuscation if options is not None else None
    return {
        "stop": _stop_strings(body.stop),
        "include_stop": bool(body.include_stop_str_in_output),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "prompt_logprobs": body.prompt_logprobs,
        "return_token_ids": bool(body.return_token_ids),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "obfuscate": obfuscate if wanted is None else wanted,
        "priority": _bounded("priority", body.priority or 0, -MAX_PRIORITY, MAX_PRIORITY),
        "salt": _salt(body),
        "caller_request_id": body.request_id if body.request_id and REQUEST_ID.fullmatch(body.request_id) else None,
        "service_tier": body.service_tier,
        "ignored_fields": ignored,
    }


def _sampling(body: ChatBody | CompletionBody, model: ServedModel, *, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    usual = model.defaults
    stop_ids = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else model.end_tokens)
    if body.stop_token_ids and len(body.stop_token_ids) > MAX_TOP_LOGPROBS * 100:
        raise InvalidRequest("stop_token_ids has more than 2000 entries", param="stop_token_ids")
    # 0 is legal in OpenAI's range and means "the most likely token only"; -1 is vLLM's "off".
    top_p = usual.top_p if body.top_p is None else body.top_p or 1e-9
    top_k = usual.top_k if body.top_k is None else 0 if body.top_k == -1 else body.top_k
    return SamplingParams(
        temperature=_given(body.temperature, usual.temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=_given(body.min_p, usual.min_p),
        presence_penalty=_given(body.presence_penalty, usual.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, usual.frequency_penalty),
        repetition_penalty=_given(body.repetition_penalty, usual.repetition_penalty),
        seed=_seed(body.seed),
        logit_bias=_logit_bias(body.logit_bias) | _banned(body.bad_words, model),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=stop_ids,
        min_tokens=_bounded("min_tokens", body.min_tokens or 0, 0, MAX_TOKENS),
    ).checked(model.report.vocab_size)


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(64)
    return _bounded("seed", seed, -(2**63), 2**64 - 1) % 2**64


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop lists {len(strings)} strings; at most {MAX_STOP_STRINGS}", param="stop")
    if "" in strings:
        raise InvalidRequest("stop holds an empty string, which would stop every answer before it starts", param="stop")
    return strings


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not re.fullmatch(r"\d{1,9}", key, re.ASCII):
            raise InvalidRequest("logit_bias must be keyed by token ids, such as {'123': -100}", param="logit_bias")
        result[int(key)] = value
    return result


def _banned(words: Sequence[str] | None, model: ServedModel) -> dict[int, float]:
    """Words of one token, with or without a space in front, get the strongest bias that there is."""
    if words and len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words lists {len(words)} words; at most {MAX_BAD_WORDS}", param="bad_words")
    banned: dict[int, float] = {}
    for i, word in enumerate(words or ()):
        written = (word, f" {word}") if len(word) <= MAX_BAD_WORD_CHARS else ()
        forms = (model.tokenizer.encode(form, add_special_tokens=False) for form in written)
        single = [form[0] for form in forms if len(form) == 1]
        if not single or not word:
            raise InvalidRequest(f"bad_words[{i}] is not a single token; only single tokens can be banned", param=f"bad_words[{i}]")
        banned |= dict.fromkeys(single, -100.0)
    return banned


def _salt(body: ChatBody | CompletionBody) -> str:
    """Both ways of narrowing who may share a prefix, in an encoding that no pair of other values can imitate."""
    for name, value in (("cache_salt", body.cache_salt), ("prompt_cache_key", body.prompt_cache_key)):
        if value is not None and len(value) > MAX_SALT_CHARS:
            raise InvalidRequest(f"{name} has {len(value)} characters; at most {MAX_SALT_CHARS}", param=name)
    if body.cache_salt is None and body.prompt_cache_key is None:
        return ""
    return "|".join("-" if value is None else f"{len(value)}:{value}" for value in (body.cache_salt, body.prompt_cache_key))


def _bounded(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be from {low} to {high}", param=name)
    return value
