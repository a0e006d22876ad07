"""The offline engine: batches in one process, typed results, errors as exceptions."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvseal import LLM
from kvseal.core.config import EngineConfig
from kvseal.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest, ModelNotFound, SetupError, Unavailable
from kvseal.core.outcome import FinishReason
from kvseal.core.request import SamplingParams
from kvseal.serve.terminal import _print, answer_once

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(demo_model_path: Path) -> Iterator[LLM]:
    with LLM(demo_model_path, pool_tokens=1024) as model:
        yield model


def test_prompts_of_all_kinds(llm: LLM) -> None:
    (one,) = llm.generate("The capital of France is", max_tokens=3)
    assert one.text.startswith(" Paris")
    assert one.finish_reason is FinishReason.LENGTH
    assert len(one.tokens) == 3
    ids = [504, 3575, 282, 4649, 314]  # The same text.
    assert [g.text for g in llm.generate(ids, max_tokens=3)] == [one.text]
    assert [g.text for g in llm.generate([ids, ids], max_tokens=3)] == [one.text] * 2
    two = llm.generate(["The capital of France is", "1 2 3 4 5"], max_tokens=3)
    assert two[0].text == one.text, "the same alone and in a batch"


def test_a_batch_larger_than_the_pool_runs_to_its_end(llm: LLM) -> None:
    prompts = [f"Number {i} is" for i in range(100)]
    answers = llm.generate(prompts, max_tokens=2)
    assert len(answers) == 100
    assert all(len(answer.tokens) <= 2 for answer in answers)
    assert llm.stats().pages_leased == 0


def test_chat_and_stop(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, max_tokens=12)
    assert answer.prompt_tokens == 37
    several = llm.chat([QUESTION, QUESTION], max_tokens=12)
    assert [each.text for each in several] == [answer.text] * 2
    assert several[0].cached_tokens > 0
    cut = answer.text[2:5]
    (stopped,) = llm.chat(QUESTION, max_tokens=12, stop=cut)
    assert stopped.text == answer.text[: answer.text.index(cut)]
    assert stopped.finish_reason is FinishReason.STOP


def test_streaming_and_dropping(llm: LLM) -> None:
    pieces = llm.stream_chat(QUESTION, max_tokens=50)
    assert next(pieces).text
    pieces.close()  # type: ignore[attr-defined]
    whole = list(llm.stream_chat(QUESTION, max_tokens=8))
    assert whole[-1].finished is not None
    assert "".join(piece.text for piece in whole) == whole[-1].finished.text
    assert llm.stats().pages_leased == 0


def test_two_streams_taken_in_turns(llm: LLM) -> None:
    alone = ["".join(piece.text for piece in llm.stream_chat([{"role": "user", "content": q}], max_tokens=6)) for q in ("One?", "Two?")]
    streams = [llm.stream_chat([{"role": "user", "content": q}], max_tokens=6) for q in ("One?", "Two?")]
    first = next(streams[0]).text
    llm.generate("A batch in between", max_tokens=8)
    second = "".join(piece.text for piece in streams[1])
    assert [first + "".join(piece.text for piece in streams[0]), second] == alone


def test_a_stop_string_found_late(llm: LLM) -> None:
    """The engine had gone on, for the sake of another batch, past what turns out to be the end."""
    (alone,) = llm.chat(QUESTION, max_tokens=12)
    cut = alone.text[6:9]
    stream = llm.stream_chat(QUESTION, max_tokens=12, stop=cut)
    text = next(stream).text
    llm.generate("A batch in between", SamplingParams(temperature=0, min_tokens=12), max_tokens=12)
    text += "".join(piece.text for piece in stream)
    assert text == alone.text[: alone.text.index(cut)]
    assert llm.stats().pages_leased == 0


def test_logprobs(llm: LLM) -> None:
    (answer,) = llm.generate("One two", SamplingParams(temperature=0, logprobs=2, prompt_logprobs=0), max_tokens=2)
    assert len(answer.logprobs) == 2
    assert len(answer.prompt_logprobs) == answer.prompt_tokens
    assert answer.prompt_logprobs[0] is None


def test_errors(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate("")
    with pytest.raises(InvalidRequest):
        llm.generate("x", SamplingParams(temperature=-1))
    with pytest.raises(ContextLengthExceeded):
        llm.generate("x", max_tokens=2000)
    with pytest.raises(InvalidRequest):
        llm.chat([])
    assert llm.generate("Still", max_tokens=1), "an error leaves the engine as it was"


def test_what_cannot_start() -> None:
    with pytest.raises(ModelNotFound):
        LLM("/no/such/model.gguf")


def test_options_are_checked(demo_model_path: Path) -> None:
    with pytest.raises(ConfigError):
        LLM(demo_model_path, kv_dtype="float64")


def test_after_closing(demo_model_path: Path) -> None:
    llm = LLM(demo_model_path, pool_tokens=256)
    llm.close()
    llm.close()
    with pytest.raises(Unavailable):
        llm.generate("x")


def test_a_stream_that_outlives_its_engine(demo_model_path: Path) -> None:
    """Nothing is computed on memory that was given back, whether the stream had begun or not."""
    llm = LLM(demo_model_path, pool_tokens=256)
    begun, unbegun = (llm.stream_chat(QUESTION, max_tokens=8) for _ in range(2))
    next(begun)
    llm.close()
    for stream in (begun, unbegun):
        with pytest.raises(Unavailable):
            list(stream)


@pytest.mark.parametrize("prompts", [["text", 1], [1, "text"], [True, 1], [1.0], [None], b"ids", None, 5, {"a": 1}, "half a pair \ud800"])
def test_no_prompt_is_left_out_silently(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, max_tokens=1)


@pytest.mark.parametrize(
    "messages", [[*QUESTION, QUESTION], [QUESTION, None], "text", None, [["text"]], [{"role": "user", "content": "\ud800"}]]
)
def test_no_message_is_left_out_silently(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat(messages, max_tokens=1)


def test_an_empty_stop_string_is_refused_as_the_server_does(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate("x", max_tokens=1, stop=["", "a"])


def test_a_terminal_that_takes_no_more(demo_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=demo_model_path, pool_tokens=256)
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("this system has no device that is always full")
    with device.open("w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SetupError, match="standard output"):
            answer_once(config, "Say hello.", system=None, max_tokens=2, temperature=0.0, seed=0)
        with contextlib.suppress(OSError):
            full.close()


def test_a_terminal_without_the_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    _print("caf\u00e9 \U0001f31f")
    assert raw.getvalue() == b"caf? ?"


def test_one_answer_in_the_terminal(demo_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=demo_model_path, pool_tokens=512)
    assert answer_once(config, "Say hello.", system="Be brief.", max_tokens=8, temperature=0.0, seed=0) == 0
    assert capsys.readouterr().out.strip()
