"""Choices from submission to their end: exactly one end each, and nothing left running when one fails or the reader goes."""

from __future__ import annotations

import asyncio

import pytest

from kvseal.core.errors import BrokenSeal, Overloaded, Unavailable
from kvseal.core.ids import RequestId, Scope
from kvseal.core.laws import Law
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused, Usage
from kvseal.core.request import Request, SamplingParams
from kvseal.serve.generation import Delta, Generation, TextRules
from kvseal.serve.tokenizer import Tokenizer

from .fake_engine import FakeEngine

USAGE = Usage(1, 1, 0)
DONE = Completed(FinishReason.LENGTH, USAGE)


def _requests(count: int = 1, **sampling: object) -> list[Request]:
    params = SamplingParams(stop_token_ids=frozenset({2}), **sampling)  # type: ignore[arg-type]
    scope = Scope(b"s" * 16)
    return [
        Request(request_id=RequestId(f"r{i}"), prompt_tokens=(5,), max_output_tokens=9, scope=scope, sampling=params) for i in range(count)
    ]


def _text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def test_a_choice_completes(tiny: Tokenizer) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with Generation(engine, tiny, _requests(), TextRules()) as generation:
            stream = engine.streams[0]
            stream.tokens(261, logprobs=True)
            stream.tokens(*tiny.encode("o"), 2, logprobs=True)
            stream.end(Completed(FinishReason.STOP, USAGE, 2))
            deltas = [delta async for delta in generation.deltas()]
        assert _text(deltas) == "hello"
        assert [token for delta in deltas for token in delta.tokens] == [261, *tiny.encode("o"), 2]
        assert [entry.token for delta in deltas for entry in delta.logprobs] == [261, *tiny.encode("o")], "the end has no text"
        finish = deltas[-1].finish
        assert finish is not None
        assert (finish.reason, finish.stopped_by) == (FinishReason.STOP, 2)
        assert generation.choices[0].completion_tokens == 3
        assert generation.choices[0].cached_tokens == 3

    asyncio.run(run())


def test_a_stop_string_stops_the_engine(tiny: Tokenizer) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with Generation(engine, tiny, _requests(), TextRules(stop=("lo",))) as generation:
            for text in ("hel", "l", "o", "ho"):
                engine.streams[0].tokens(*tiny.encode(text))
            deltas = [delta async for delta in generation.deltas()]
            assert engine.streams[0].finished, "which is no cancellation"
        assert _text(deltas) == "hel"
        assert deltas[-1].finish is not None
        assert deltas[-1].finish.stopped_by == "lo"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Refused(Overloaded("full")), Overloaded),
        (Failed(BrokenSeal(Law.L3, page=1, ordinal=0, layer=0, check="nonce")), BrokenSeal),
        (Cancelled(USAGE), Unavailable),
    ],
)
def test_whatever_is_not_completed_is_an_error(tiny: Tokenizer, outcome: Outcome, error: type[Exception]) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with Generation(engine, tiny, _requests(), TextRules()) as generation:
            engine.streams[0].end(outcome)
            with pytest.raises(error):
                await generation.wait_first(1.0)

    asyncio.run(run())


def test_one_failure_cancels_the_others(tiny: Tokenizer) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with Generation(engine, tiny, _requests(3), TextRules()) as generation:
            engine.streams[0].tokens(261)
            engine.streams[1].end(Failed(Unavailable("gone")))
            with pytest.raises(Unavailable):
                async for _ in generation.deltas():
                    pass
            assert engine.streams[0].cancelled
            assert engine.streams[2].cancelled

    asyncio.run(run())


def test_a_refusal_beside_a_first_token_is_seen_before_the_first_byte(tiny: Tokenizer) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with Generation(engine, tiny, _requests(2), TextRules()) as generation:
            engine.streams[1].end(Refused(Overloaded("full")))
            engine.streams[0].tokens(261)
            with pytest.raises(Overloaded):
                await generation.wait_first(1.0)

    asyncio.run(run())


def test_leaving_early_cancels_everything(tiny: Tokenizer) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with Generation(engine, tiny, _requests(2), TextRules()) as generation:
            await generation.wait_first(0.01)
        assert all(stream.cancelled for stream in engine.streams)

    asyncio.run(run())


def test_what_came_before_the_wait_is_not_lost(tiny: Tokenizer) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with Generation(engine, tiny, _requests(), TextRules()) as generation:
            engine.streams[0].tokens(261)
            await generation.wait_first(1.0)
            engine.streams[0].tokens(259)
            engine.streams[0].end(DONE)
            assert _text([delta async for delta in generation.deltas()]) == "hellhe"

    asyncio.run(run())
