"""Every field of a request: honoured within its bounds, named when ignored, refused when it would change the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvseal.core.errors import ContextLengthExceeded, Forbidden, InvalidRequest, ModelNotServed, RequestError
from kvseal.serve.parse import GenerationAsk, read_chat, read_completion
from kvseal.serve.schemas import REFUSED_FIELDS
from kvseal.serve.served import ServedModel

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def chat(model: ServedModel) -> Any:
    def read(strict: bool = False, **fields: Any) -> GenerationAsk:
        return asyncio.run(read_chat({"messages": MESSAGES} | fields, model, strict=strict, obfuscate=False))

    return read


@pytest.fixture
def completion(model: ServedModel) -> Any:
    def read(strict: bool = False, **fields: Any) -> GenerationAsk:
        return asyncio.run(read_completion({"prompt": "hi"} | fields, model, strict=strict, obfuscate=False))

    return read


def test_defaults(chat: Any, completion: Any, model: ServedModel) -> None:
    ask = chat()
    assert ask.sampling.temperature == 1.0
    assert ask.sampling.stop_token_ids == {2}
    assert ask.max_output_tokens == (128 - len(ask.prompts[0].tokens),), "all that the context leaves"
    assert completion().max_output_tokens == (16,)
    assert chat().sampling.seed != chat().sampling.seed, "no seed given: a fresh one each time"


def test_null_is_legal_for_every_optional_field(chat: Any, completion: Any) -> None:
    from kvseal.serve.schemas import UNSERVED_FIELDS, ChatBody, CompletionBody

    for read, body in ((chat, ChatBody), (completion, CompletionBody)):
        names = {*body.__struct_fields__, *UNSERVED_FIELDS, *REFUSED_FIELDS} - {"messages", "prompt"}
        assert read(**dict.fromkeys(names)).ignored_fields == ()


BAD_SHARED: list[tuple[dict[str, Any], str | None]] = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.5}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"bad_words": ["not one token"]}, "bad_words[0]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a" * 100_000]}, "bad_words[0]"),
    ({"bad_words": ["hell"] * 513}, "bad_words"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": "x" * 2000}, "cache_salt"),
    ({"model": 5}, "model"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"chat_template": "x"}, "chat_template"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_SHARED, ids=[str(next(iter(f.items())))[:40] for f, _ in BAD_SHARED])
def test_bad_fields_are_named(chat: Any, completion: Any, fields: dict[str, Any], param: str) -> None:
    for read in (chat, completion):
        with pytest.raises(RequestError) as caught:
            read(**fields)
        assert caught.value.param == param
        assert caught.value.status in (400, 403)


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
def test_bad_chat_fields_are_named(chat: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [[1], [2.0]]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [262]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 10, "n": 128}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": 1}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION, ids=[str(f)[:40] for f, _ in BAD_COMPLETION])
def test_bad_completion_fields_are_named(completion: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_fields_that_would_change_the_answer_are_refused(chat: Any, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not served") as caught:
        chat(**{name: {"something": "real"}})
    assert caught.value.param == name
    for neutral in REFUSED_FIELDS[name]:
        chat(**{name: neutral})


def test_unknown_fields_are_listed_or_refused(chat: Any) -> None:
    assert chat(foo=1, bar=None, metadata={"a": "b"}).ignored_fields == ("foo", "bar", "metadata")
    assert chat(**{"x\r\nevil: 1": 1}).ignored_fields == ("x??evil??1",), "names go into a header"
    with pytest.raises(InvalidRequest) as caught:
        chat(strict=True, foo=1)
    assert caught.value.param == "foo"
    chat(strict=True, metadata={"a": "b"})


def test_operators_fields_are_forbidden(chat: Any) -> None:
    with pytest.raises(Forbidden):
        chat(chat_template="{{ x }}")


def test_models(chat: Any) -> None:
    assert chat(model="tiny").prompts
    with pytest.raises(ModelNotServed) as caught:
        chat(model="gpt-5")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_the_budget_is_exact(completion: Any) -> None:
    assert completion(prompt=[5] * 100, max_tokens=28).max_output_tokens == (28,)
    with pytest.raises(ContextLengthExceeded) as caught:
        completion(prompt=[5] * 100, max_tokens=29)
    assert caught.value.details == {"prompt_tokens": 100, "max_output_tokens": 29, "max_servable_tokens": 128, "pool_tokens": 256}
    assert "maximum context length is 128 tokens" in str(caught.value)


def test_a_chat_as_long_as_the_context_is_refused(chat: Any) -> None:
    # 26 tokens of template around the content.
    frame = len(chat(messages=[{"role": "user", "content": "x"}]).prompts[0].tokens) - 1
    assert chat(messages=[{"role": "user", "content": "x" * (127 - frame)}]).max_output_tokens == (1,)
    with pytest.raises(ContextLengthExceeded, match="129 tokens"):
        chat(messages=[{"role": "user", "content": "x" * (128 - frame)}])


def test_newer_names_win(chat: Any, completion: Any) -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_output_tokens == (7,)
    assert completion(max_tokens=5, max_completion_tokens=7).max_output_tokens == (7,)


def test_sampling_corners(chat: Any, completion: Any) -> None:
    assert chat(top_p=0).sampling.top_p > 0
    assert chat(top_k=-1).sampling.top_k == 0
    assert chat(seed=-1).sampling.seed == 2**64 - 1
    assert chat(ignore_eos=True).sampling.stop_token_ids == frozenset()
    assert chat(stop_token_ids=[5]).sampling.stop_token_ids == {2, 5}
    assert chat(bad_words=["hell"]).sampling.logit_bias == {261: -100.0}
    assert chat(logit_bias={"5": 1.5}).sampling.logit_bias == {5: 1.5}
    assert chat(logprobs=True).sampling.logprobs == 0
    assert completion(echo=True, logprobs=2).sampling.prompt_logprobs == 2
    assert completion(best_of=3).sampling.logprobs == 0
    assert completion(max_tokens=0, echo=True).scoring_only


def test_salts_cannot_imitate_each_other(chat: Any) -> None:
    salts = [
        chat().salt,
        chat(cache_salt="a").salt,
        chat(prompt_cache_key="a").salt,
        chat(cache_salt="a", prompt_cache_key="b").salt,
        chat(cache_salt="a|1:b").salt,
        chat(prompt_cache_key="").salt,
    ]
    assert len(set(salts)) == len(salts)


def test_text_parts_and_roles(chat: Any, model: ServedModel) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = chat(messages=[{"role": "developer", "content": parts}]).prompts[0].tokens
    assert model.tokenizer.decode(joined).startswith("<|im_start|>system\na\nb<|im_end|>")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "ok"}]
    assert chat(messages=history).prompts


def test_prompts_of_all_four_kinds(completion: Any, model: ServedModel) -> None:
    assert [p.text for p in completion(prompt="hell").prompts] == ["hell"]
    assert [p.tokens for p in completion(prompt=[261, 5]).prompts] == [(261, 5)]
    assert [p.tokens for p in completion(prompt=["hell", "he"]).prompts] == [(261,), (259,)]
    assert [p.tokens for p in completion(prompt=[[5], [6, 7]]).prompts] == [(5,), (6, 7)]
