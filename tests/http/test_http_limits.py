"""One limit, the same number everywhere: advertised, enforced to the token, and named when it is exceeded (L1)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers import ServerProcess

LIMIT = 256


def test_the_limit_is_the_same_number_in_all_places(narrow: ServerProcess) -> None:
    assert narrow.client.get("/v1/models").json()["data"][0]["max_model_len"] == LIMIT
    assert narrow.client.get("/version").json()["report"]["served_context_tokens"] == LIMIT
    assert narrow.metrics()["kvseal_max_servable_tokens"] == LIMIT
    assert narrow.client.get("/version").json()["sampling_defaults"] == {"temperature": 0.2, "top_p": 0.9}
    assert f"{LIMIT} tokens per request, prompt and output together (what the pool holds)" in narrow.text
    assert "8192 tokens promised by the model" in narrow.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("output_tokens", [1, 56])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_limit_minus_one_limit_limit_plus_one(narrow: ServerProcess, over: int, output_tokens: int, stream: bool) -> None:
    prompt_tokens = LIMIT + over - output_tokens
    body = {"prompt": [19556] * prompt_tokens, "max_tokens": output_tokens, "temperature": 0, "stream": stream}
    free = narrow.metrics()["kvseal_kv_pages[leased]"]
    answer = narrow.client.post("/v1/completions", json=body)
    if over <= 0:
        assert answer.status_code == 200
        if not stream:
            assert answer.json()["usage"]["prompt_tokens"] == prompt_tokens
    else:
        _assert_context_error(answer, prompt_tokens, output_tokens, "prompt")
        assert narrow.metrics()["kvseal_kv_pages[leased]"] == free, "nothing was reserved"


def test_a_chat_at_the_limit(narrow: ServerProcess) -> None:
    def ask(words: int, **more: Any) -> Any:
        return narrow.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": " the" * words}], **more})

    frame = narrow.client.post("/tokenize", json={"messages": [{"role": "user", "content": " the"}]}).json()["count"] - 1
    fits = ask(LIMIT - frame - 1)
    assert fits.status_code == 200, "no max_tokens: the answer may have what is left, here one token"
    assert fits.json()["usage"]["prompt_tokens"] == LIMIT - 1
    assert fits.json()["usage"]["completion_tokens"] == 1
    _assert_context_error(ask(LIMIT - frame), LIMIT, 1, "messages")
    _assert_context_error(ask(LIMIT - frame - 1, max_completion_tokens=2), LIMIT - 1, 2, "messages")


def _assert_context_error(answer: Any, prompt_tokens: int, output_tokens: int, where: str) -> None:
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "context_length_exceeded", where)
    total = prompt_tokens + output_tokens
    assert error["message"].startswith(
        f"This model's maximum context length is {LIMIT} tokens. However, you requested {total} tokens "
        f"({prompt_tokens} in the {where}, {output_tokens} in the completion):"
    )
    assert error["message"].endswith("(context_length_exceeded).")
    assert error["details"] == {
        "prompt_tokens": prompt_tokens,
        "max_output_tokens": output_tokens,
        "max_servable_tokens": LIMIT,
        "pool_tokens": LIMIT,
    }


def test_what_is_only_long_does_not_wait_for_what_is_huge(narrow: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        huge = pool.submit(narrow.client.post, "/tokenize", json={"prompt": "1" * 1_500_000})
        time.sleep(0.3)
        assert narrow.client.post("/tokenize", json={"prompt": "1" * 20_000}).json()["count"] == 20_000
        assert not huge.done(), "the long one did not overtake: what the test is about was not seen"
        assert huge.result().json()["count"] == 1_500_000
