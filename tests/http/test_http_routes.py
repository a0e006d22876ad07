"""Every route's shape, and what is no route."""

from __future__ import annotations

import pytest
from servers import ServerProcess


def test_models(echo: ServerProcess) -> None:
    body = echo.client.get("/v1/models").json()
    assert body["object"] == "list"
    (card,) = body["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("demo", "model", "kvseal", 8192)
    assert echo.client.get("/v1/models/demo").json() == card
    assert echo.client.get("/models").json() == body
    missing = echo.client.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_probes(echo: ServerProcess) -> None:
    assert echo.client.get("/livez").json() == {"status": "alive"}
    for route in ("/readyz", "/health"):
        body = echo.client.get(route).json()
        assert body["status"] == "ready"
        assert body["last_progress_age_s"] < 10


def test_version_states_the_numbers_that_must_agree(echo: ServerProcess) -> None:
    body = echo.client.get("/version").json()
    assert body["report"]["pool_tokens"] == body["report"]["pool_pages"] * body["report"]["page_tokens"]
    assert body["limits"]["max_servable_tokens"] == body["report"]["served_context_tokens"] == 8192
    assert "8192 tokens per request" in echo.text, "the start report says the same"


def test_tokenize_and_back(echo: ServerProcess) -> None:
    body = echo.client.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True}).json()
    assert body == {"count": 2, "max_model_len": 8192, "tokens": [19556, 905], "token_strs": ["Hello", " world"]}
    assert echo.client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "Hello world"}
    chat = echo.client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["count"] == 31
    assert chat["tokens"][-4:] == [198, 1, 520, 9531] or chat["tokens"][-3:] == [520, 9531, 198]
    assert echo.client.post("/tokenize", json={}).status_code == 400
    assert echo.client.post("/tokenize", json={"prompt": "a", "messages": []}).status_code == 400
    assert echo.client.post("/detokenize", json={"tokens": [-1]}).status_code == 400
    assert echo.client.post("/detokenize", json={"tokens": [10**30]}).status_code == 400


def test_tokenizer_info_is_what_lm_eval_looks_for(echo: ServerProcess) -> None:
    body = echo.client.get("/tokenizer_info").json()
    assert body["eos_token"] == "<|im_end|>"
    assert "messages" in body["chat_template"]


def test_lm_evals_scoring_request(echo: ServerProcess) -> None:
    context, continuation = [19556], [905, 28]
    body = {"prompt": context + continuation, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "model": "demo"}
    logprobs = echo.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"][len(context) : -1]) == len(continuation)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None


def test_unprefixed_aliases(echo: ServerProcess) -> None:
    assert echo.client.post("/completions", json={"prompt": "x"}).json()["object"] == "text_completion"
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert echo.client.post("/chat/completions", json=chat).json()["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)]
)
def test_no_route(echo: ServerProcess, method: str, path: str, status: int) -> None:
    answer = echo.client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]


def test_request_ids(echo: ServerProcess) -> None:
    assert echo.client.get("/livez", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("x" * 200, "a b", "semi;colon"):
        assert echo.client.get("/livez", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req-")


def test_metrics(echo: ServerProcess) -> None:
    echo.client.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
    seen = echo.metrics()
    assert seen["kvseal_kv_pool_tokens"] == 65536
    assert seen["kvseal_max_servable_tokens"] == 8192
    assert seen["kvseal_http_outcomes_total[completed]"] >= 1
    assert seen["kvseal_time_to_first_token_seconds_count"] >= 1
    assert seen["kvseal_broken_seals_total[L3]"] == 0
