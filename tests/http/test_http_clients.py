"""The clients that people really use: OpenAI's own package and LangChain's."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from servers import ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 16}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37
    assert answer.usage.prompt_tokens_details is not None
    assert isinstance(answer.usage.prompt_tokens_details.cached_tokens, int)
    assert answer._request_id


def test_openai_stream_equals_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, **GREEDY)
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "the same prompt came before"  # type: ignore[union-attr]


def test_openai_async(server: ServerProcess) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **GREEDY)
            return [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]

    assert "".join(asyncio.run(run()))


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=3, echo=True)
    choice = answer.choices[0]
    assert choice.text.startswith("The capital of France is Paris")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])


def test_openai_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, logprobs=True, top_logprobs=5, **GREEDY)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content
    for entry in content:
        assert len(entry.top_logprobs) == 5
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs), "greedy takes the most likely"


def test_seeds_repeat(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=1.5, seed=seed, max_completion_tokens=12)
        return answer.choices[0].message.content or ""

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_n_choices_differ_and_the_first_is_what_it_would_be_alone(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 1.5, "seed": 3, "max_completion_tokens": 12}
    alone = client.chat.completions.create(**options).choices[0].message.content
    several = [choice.message.content for choice in client.chat.completions.create(n=4, **options).choices]
    assert several[0] == alone
    assert len(set(several)) > 1


def test_openai_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="x")


def test_models_through_the_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_langchain(server: ServerProcess) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="demo", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_retries=0, max_tokens=16)  # type: ignore[call-arg,arg-type]
    answer = chat.invoke("What is the capital of France?")
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == 37
    streamed = list(chat.stream("What is the capital of France?"))
    assert "".join(str(chunk.content) for chunk in streamed) == answer.content


def test_langchain_recognises_a_context_overflow(server: ServerProcess) -> None:
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="demo", base_url=f"{server.url}/v1", api_key="none", max_retries=0)  # type: ignore[call-arg,arg-type]
    with pytest.raises(ContextOverflowError) as caught:
        chat.invoke("word " * 9000)
    assert type(caught.value).__name__ == "OpenAIContextOverflowError"
    with pytest.raises(ContextOverflowError):
        chat.bind(max_tokens=9000).invoke("a short prompt, but an answer that cannot fit")
