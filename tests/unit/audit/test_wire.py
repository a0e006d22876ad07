"""Bodies and events of strangers: what reads is read, what does not becomes an answer that says so."""

from __future__ import annotations

import json

import pytest

from kvseal.audit.wire import Answer, Ask, End, dig, read_error, read_event, read_whole, whole


def test_bodies_are_greedy_and_hold_what_was_asked_for() -> None:
    chat = Ask("hi", max_tokens=3, chat=True, stream=True, logprobs=4, salt="s").body("m")
    assert chat["messages"] == [{"role": "user", "content": "hi"}] and chat["temperature"] == 0
    assert (chat["logprobs"], chat["top_logprobs"], chat["cache_salt"]) == (True, 4, "s")
    assert chat["stream_options"] == {"include_usage": True}
    text = Ask((1, 2, 3), logprobs=2).body("m")
    assert text["prompt"] == [1, 2, 3] and text["logprobs"] == 2 and "stream" not in text and "cache_salt" not in text


def test_a_completion_with_logprobs() -> None:
    answer = Answer(Ask("x"), status=200)
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, None], "top_logprobs": [{"a": -0.5, "z": -1}, None]}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    read_whole(answer, {"id": "i", "choices": [{"text": "ab", "finish_reason": "stop", "logprobs": logprobs}], "usage": usage})
    assert answer.ok and answer.text == "ab" and answer.finish_reason == "stop" and answer.tokens == ("a",)
    assert dict(answer.steps[0].top) == {"a": -0.5, "z": -1.0}
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (4, 2, 3)


def test_a_chat_stream_with_an_error_in_the_middle() -> None:
    answer = Answer(Ask("x", chat=True, stream=True), status=200)
    content = [{"token": "he", "logprob": -0.1, "top_logprobs": [{"token": "he", "logprob": -0.1}]}]
    read_event(answer, json.dumps({"id": "i", "choices": [{"delta": {"content": "he"}, "logprobs": {"content": content}}]}))
    read_event(answer, json.dumps({"error": {"message": "no more pages"}}))
    assert answer.text == "he" and answer.tokens == ("he",)
    assert answer.end is End.REFUSED and answer.error_in_stream and answer.error_message == "no more pages"


@pytest.mark.parametrize(
    "body",
    [
        None,
        3,
        [],
        "text",
        {},
        {"choices": []},
        {"choices": [3]},
        {"choices": [{"text": 3}]},
        {"choices": [{"text": {}}]},
        {"choices": {"0": 1}},
    ],
)
def test_what_is_no_answer_is_malformed(body: object) -> None:
    answer = Answer(Ask("x"), status=200)
    read_whole(answer, body)
    assert answer.end is End.MALFORMED and not answer.ok and answer.note


@pytest.mark.parametrize("data", ["{", "[]", "3", "null", '"x"'])
def test_events_that_are_no_objects(data: str) -> None:
    answer = Answer(Ask("x", stream=True), status=200)
    read_event(answer, data)
    assert answer.end is End.MALFORMED


@pytest.mark.parametrize(
    ("body", "message", "shape"),
    [
        ({"error": {"message": "a", "type": "t"}}, "a", True),
        ({"error": "Unauthorized"}, "Unauthorized", False),
        ({"object": "error", "message": "flat"}, "flat", False),
        ({"detail": "missing"}, "missing", False),
        (None, "raw text", False),
    ],
)
def test_error_bodies_of_every_known_shape(body: object, message: str, shape: bool) -> None:
    answer = Answer(Ask("x"), status=400)
    read_error(answer, body, b"raw text")
    assert answer.error_message == message and answer.error_shape is shape and answer.end is End.REFUSED


def test_digging_never_raises() -> None:
    assert dig({"a": [1, {"b": 2}]}, "a", 1, "b") == 2
    for path in (("a", 5), ("a", "b"), (0,), ("a", 1, "b", "c")):
        assert dig({"a": [1, {"b": 2}]}, *path) is None
    assert whole(True) is None and whole(-1) is None and whole(2.0) is None and whole(7) == 7


def test_a_server_that_can_is_told_not_to_reuse_and_others_see_no_strange_field() -> None:
    assert Ask("x", reuse=False).body("m")["cache_prompt"] is False
    assert "cache_prompt" not in Ask("x").body("m")
