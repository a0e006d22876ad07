"""Any JSON at all in any field: a request, or an error of the request. Nothing else, ever."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvseal.core.errors import RequestError
from kvseal.serve.answers import Answer
from kvseal.serve.chat_template import ChatTemplate
from kvseal.serve.errors_http import error_body
from kvseal.serve.jsonbody import parse_json_object
from kvseal.serve.parse import read_chat, read_completion
from kvseal.serve.schemas import REFUSED_FIELDS, UNSERVED_FIELDS, ChatBody, CompletionBody
from kvseal.serve.served import ServedModel
from kvseal.serve.tokenizer_files import from_gguf_metadata

from .tiny_model import TEMPLATE, start_report, tiny_metadata

_TOKENIZER = from_gguf_metadata(tiny_metadata())
_MODEL = ServedModel(
    name="tiny", tokenizer=_TOKENIZER, template=ChatTemplate(TEMPLATE, _TOKENIZER.special_texts), report=start_report(), created_s=1
)

numbers = st.integers() | st.integers(-2, 130) | st.floats(allow_nan=False, allow_infinity=False)
anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | anything,
        "content": st.text(max_size=20)
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": anything}), max_size=2)
        | anything,
        "tool_calls": anything,
        "name": anything,
    },
)


def _fields(kind: type[msgspec.Struct], required: dict[str, Any]) -> Any:
    names = [*kind.__struct_fields__, *REFUSED_FIELDS, *UNSERVED_FIELDS, "unknown"]
    return st.fixed_dictionaries(required, optional=dict.fromkeys((n for n in names if n not in required), anything))


@settings(max_examples=80, deadline=None)
@given(fields=_fields(ChatBody, {"messages": st.lists(message, max_size=3) | anything}), strict=st.booleans())
def test_chats(fields: dict[str, Any], strict: bool) -> None:
    _check(read_chat, fields, strict)


@settings(max_examples=80, deadline=None)
@given(
    fields=_fields(CompletionBody, {"prompt": st.text(max_size=9) | st.lists(st.integers(-1, 300), max_size=5) | anything}),
    strict=st.booleans(),
)
def test_completions(fields: dict[str, Any], strict: bool) -> None:
    _check(read_completion, fields, strict)


@settings(max_examples=500, deadline=None)
@given(body=st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | anything.map(msgspec.json.encode))
def test_bodies(body: bytes) -> None:
    try:
        assert isinstance(parse_json_object(body), dict)
    except RequestError as error:
        msgspec.json.encode(error_body(error))


def _check(read: Any, fields: dict[str, Any], strict: bool) -> None:
    try:
        ask = asyncio.run(read(fields, _MODEL, strict=strict, obfuscate=False))
    except RequestError as error:
        assert error.status in (400, 403, 404)
        msgspec.json.encode(error_body(error))
        return
    assert ask.prompts
    assert all(
        len(prompt.tokens) + budget <= _MODEL.report.served_context_tokens
        for prompt, budget in zip(ask.prompts, ask.max_output_tokens, strict=True)
    )
    Answer(ask, _MODEL, "id", 1).chunk([])
