"""The wire: everything that crosses it comes back as it was, and what is no message is refused."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvseal.core import errors
from kvseal.core.batch import TokenLogprobs
from kvseal.core.config import EngineConfig
from kvseal.core.events import EndedEvent, TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.laws import Law
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Refused, Usage
from kvseal.core.request import Request, SamplingParams
from kvseal.lab.rig import SCOPE
from kvseal.node import messages as m

USAGE = Usage(10, 4, 8)
INTEGRITY = errors.BrokenSeal(Law.L4, page=7, ordinal=2, layer=11, check="scope")


def one_of_each() -> list[errors.KVSealError]:
    """An instance of every error of the tree that may cross the wire."""
    made: list[errors.KVSealError] = [INTEGRITY]
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if kind in (errors.RateLimited, errors.Overloaded):
            made.append(kind("wait", retry_after_s=2.5))
        elif issubclass(kind, errors.RequestError):
            made.append(kind("no", param="prompt", details={"prompt_tokens": 3}))
        elif issubclass(kind, errors.Unavailable | errors.SetupError):
            made.append(kind("later"))
    return made


@pytest.mark.parametrize("error", one_of_each(), ids=lambda error: type(error).__name__)
def test_every_error_keeps_its_class_text_and_fields(error: errors.KVSealError) -> None:
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(m.pack_error(error)), type=m.WireError)
    again = m.unpack_error(wire)
    assert type(again) is type(error) and str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    "outcome",
    [
        Completed(FinishReason.STOP, USAGE, 2),
        Completed(FinishReason.LENGTH, USAGE),
        Cancelled(USAGE),
    ],
)
def test_outcomes(outcome: Completed | Cancelled) -> None:
    assert m.unpack_outcome(m.pack_outcome(outcome)) == outcome


def test_outcomes_with_errors() -> None:
    failed = m.unpack_outcome(m.pack_outcome(Failed(INTEGRITY)))
    assert isinstance(failed, Failed) and isinstance(failed.error, errors.BrokenSeal) and failed.error.page == 7
    refused = m.unpack_outcome(m.pack_outcome(Refused(errors.InvalidRequest("no", param="x"))))
    assert isinstance(refused, Refused) and isinstance(refused.error, errors.InvalidRequest) and refused.error.param == "x"


@pytest.mark.parametrize(
    "wire",
    [
        m.WireOutcome("completed"),
        m.WireOutcome("completed", USAGE),
        m.WireOutcome("cancelled"),
        m.WireOutcome("failed"),
        m.WireOutcome("failed", error=m.WireError("InvalidRequest", "x", {"param": None, "details": {}})),
        m.WireOutcome("refused", error=m.pack_error(INTEGRITY)),
        m.WireOutcome("nonsense", USAGE),
        m.WireOutcome("failed", error=m.WireError("SystemExit", "x")),
        m.WireOutcome("failed", error=m.WireError("BrokenSeal", "", {"law": "L99"})),
    ],
)
def test_half_an_outcome_is_none(wire: m.WireOutcome) -> None:
    with pytest.raises(m.ProtocolBroken):
        m.unpack_outcome(wire)


def test_events() -> None:
    logprobs = (TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.5))),)
    for event in (
        TokensEvent(RequestId("a"), (5,)),
        TokensEvent(RequestId("a"), (5,), logprobs, (None, *logprobs), 16),
        EndedEvent(RequestId("a"), Completed(FinishReason.STOP, USAGE, 2)),
    ):
        body = m.frame(m.pack_events(3, (event,)))[4:]
        message = m.decode_from_engine(body)
        assert isinstance(message, m.Events) and message.steps == 3
        assert [*message.tokens, *map(m.unpack_ended, message.ended)] == [event]


def test_events_of_a_step_keep_the_tokens_of_a_request_before_its_end() -> None:
    a, b = TokensEvent(RequestId("a"), (5,)), TokensEvent(RequestId("b"), (6,))
    end = EndedEvent(RequestId("a"), Completed(FinishReason.STOP, USAGE, 2))
    packed = m.pack_events(3, (a, end, b))
    assert packed.tokens == (a, b) and [m.unpack_ended(wire) for wire in packed.ended] == [end]


def test_requests_and_configuration() -> None:
    sampling = SamplingParams(
        temperature=0.7, logit_bias={5: -1.0}, allowed_token_ids=(1, 2), stop_token_ids=frozenset({2, 7}), seed=2**64 - 1
    )
    request = Request(request_id=RequestId("a"), prompt_tokens=(1, 2), max_output_tokens=3, scope=SCOPE, sampling=sampling, deadline_s=1.5)
    config = EngineConfig(model=Path("/models/some model.gguf"), pool_tokens=512, wipe_pages=True)
    assert m.decode_to_engine(m.frame(m.Submit(request))[4:]) == m.Submit(request)
    assert m.decode_to_engine(m.frame(m.Hello(1, config))[4:]) == m.Hello(1, config)


@given(st.binary(max_size=200))
def test_noise_is_no_message(noise: bytes) -> None:
    for decode in (m.decode_to_engine, m.decode_from_engine):
        try:
            message = decode(noise)
        except m.ProtocolBroken:
            continue
        assert isinstance(message, msgspec.Struct)


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_frames_come_out_whole_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    frames, found, at, turn = m.Frames(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found += list(frames.feed(stream[at : at + size]))
        at, turn = at + size, turn + 1
    assert found == bodies


def test_frame_that_announces_too_much_is_refused_at_once() -> None:
    with pytest.raises(m.ProtocolBroken, match="announces"):
        list(m.Frames().feed((m.MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


def test_frame_that_would_be_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_FRAME_BYTES", 8)
    with pytest.raises(m.ProtocolBroken, match="larger"):
        m.frame(m.Cancel(RequestId("a long id")))
