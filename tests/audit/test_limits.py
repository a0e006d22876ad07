"""The limits probe at the limit itself: both ways of answering are tried, paid for in the plan, and claimed only as far as seen."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from kvseal.audit.budget import Allowance, Budget
from kvseal.audit.canary import Aviary
from kvseal.audit.client import Client, ClientSettings
from kvseal.audit.findings import Confidence, Finding, ProbeResult, Report
from kvseal.audit.probes import limits
from kvseal.audit.probes.base import Depth, Scene
from kvseal.audit.probes.limit_findings import judge_inside, say_served
from kvseal.audit.probes.patience import Patient
from kvseal.audit.prompts import Gauge
from kvseal.audit.target import Target
from kvseal.audit.wire import Answer, Ask, End

from .rates import run_one
from .rawhttp import Exchange
from .standin import Standin, Traits
from .test_nasty import _audit

LIMIT = 256


def _audited(traits: Traits, fault: str = "") -> Report:
    return asyncio.run(run_one(fault, 3, traits=traits, only=("limits",), depth=Depth.QUICK, timeout_s=10.0))


@pytest.mark.parametrize("fault", ["", "pool-below-context", "truncate-head"])
def test_what_is_sent_stays_within_the_plan(fault: str) -> None:
    traits = Traits()
    (result, *_) = _audited(traits, fault).results
    planned = limits.cost(Target("toy", context_tokens=traits.context, completions=True, chat=True), Depth.QUICK, 4)
    assert 0 < result.requests <= planned.requests and 0 < result.tokens <= planned.tokens


def test_each_endpoint_is_asked_at_the_limit_both_ways() -> None:
    standin = Standin("", 1, Traits())
    asked: set[tuple[str, bool, int]] = set()

    async def handler(http: Exchange) -> None:
        if http.path.endswith("completions"):
            body, tokens = standin._parse(http, http.path.endswith("chat/completions"))
            asked.add((http.path, bool(body.get("stream")), len(tokens) + int(body["max_tokens"])))
        await standin.handle(http)

    report = _audit(handler, only=("limits",))
    assert report.findings == []
    for path in ("/v1/completions", "/v1/chat/completions"):
        for stream in (False, True):
            assert {(path, stream, standin.traits.context + more) for more in (-1, 0)} <= asked


def test_a_context_that_only_the_user_states_proves_nothing_against_the_pool() -> None:
    for stated, sure in (({}, Confidence.PROVEN), ({"context_tokens": Traits().context}, Confidence.SUSPECTED)):
        (finding, *_) = [
            one
            for one in _audit(Standin("pool-below-context", 1, Traits()).handle, only=("limits",), **stated).findings
            if one.rule == "limits.pool-below-context"
        ]
        assert finding.confidence is sure


def test_streams_that_are_not_counted_are_not_claimed_to_be() -> None:
    """Many servers do not know `stream_options`: that is no fault, and no proof. The comparison of both ways is one."""
    (counted, *_), (uncounted, *_) = (_audited(Traits(stream_usage=there)).results for there in (True, False))
    assert uncounted.findings == [] and any(said.endswith("counted in full, without streaming") for said in uncounted.proved)
    assert any("answered as streams but not counted although usage was asked for" in said for said in uncounted.unproven)
    assert any(said.startswith("as a stream, a prompt of") for said in uncounted.proved)
    assert any(said.endswith("counted in full, without streaming and as streams") for said in counted.proved) and not counted.unproven


def test_a_stream_without_logprobs_is_not_claimed_to_be_the_same() -> None:
    (result, *_) = _audited(Traits(logprobs=False)).results
    assert result.findings == [] and not any(said.startswith("as a stream") for said in result.proved)


def test_where_streams_do_not_work_nothing_is_said_about_them() -> None:
    standin = Standin("", 1, Traits())

    async def handler(http: Exchange) -> None:
        if b'"stream": true' in http.body:
            await http.reply(400, {"error": {"message": "no streams here", "type": "x", "param": None, "code": None}})
        else:
            await standin.handle(http)

    (result, *_) = _audit(handler, only=("limits",)).results
    assert (
        result.findings == []
        and "streams do not work for completions and chat" in str(result.unproven)
        and "as streams" not in str(result.proved)
    )


def _judged(stream: bool, **answer: object) -> tuple[list[Finding], bool]:
    """What is found in one answer to a prompt of limit-1 tokens, and whether it is held to be right."""
    draw = random.Random(1)
    target = Target("m", context_tokens=LIMIT, completions=True, gauge=Gauge({False: 0.0}, 1.0, "test"))
    scene = Scene(Client(ClientSettings("http://127.0.0.1:9/v1"), Budget(Allowance())), target, Aviary(draw), draw)
    whole = Answer(Ask("x", max_tokens=1, stream=stream, prompt_tokens=LIMIT - 1), status=200, text="a", finish_reason="length")
    whole.prompt_tokens, whole.completion_tokens = LIMIT - 1, 1
    whole.done_seen = True
    scene.client.answers.append(Answer(Ask("small", stream=True), status=200, text="a", finish_reason="length", done_seen=True))
    result = ProbeResult("limits", "")
    good = judge_inside(scene, result, Patient(replace(whole, **answer)), LIMIT, LIMIT - 1)  # type: ignore[arg-type]
    return result.findings, good


@pytest.mark.parametrize(
    ("answer", "rule", "confidence"),
    [
        ({"text": "", "completion_tokens": 0}, "limits.empty-answer", "proven"),
        ({"text": "", "completion_tokens": None, "prompt_tokens": None}, "limits.empty-answer", "suspected"),
        ({"prompt_tokens": LIMIT // 2}, "limits.silent-truncation", "proven"),
        ({"end": End.CUT, "finish_reason": None}, "limits.broken-answer", "proven"),
        ({"end": End.MALFORMED}, "limits.broken-answer", "proven"),
        ({"done_seen": False}, "limits.broken-answer", "proven"),
        ({"end": End.TIMEOUT}, "limits.hang", "likely"),
        ({"end": End.REFUSED, "status": 500}, "limits.server-error", "proven"),
        ({"end": End.REFUSED, "error_in_stream": True, "error_message": "no pages"}, "limits.advertised-not-servable", "proven"),
        ({"end": End.REFUSED, "error_in_stream": True, "error_message": f"at most {LIMIT - 4}"}, "limits.late-refusal", "proven"),
    ],
)
def test_what_a_stream_at_the_limit_can_do_wrong(answer: dict[str, object], rule: str, confidence: str) -> None:
    (found,), good = _judged(True, **answer)
    assert not good and (found.rule, found.confidence.value) == (rule, confidence)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"text": ""},  # Half a letter of several bytes is a token, too.
        {"text": "", "completion_tokens": 0, "finish_reason": "stop"},  # The model had nothing to say.
        {"prompt_tokens": None, "completion_tokens": None},
        {"end": End.REFUSED, "status": 400, "error_message": f"at most {LIMIT - 4} tokens"},
    ],
)
def test_what_is_no_fault_at_the_limit(answer: dict[str, object]) -> None:
    assert _judged(True, **answer) == ([], True)


def test_an_answer_that_had_begun_is_not_called_silent() -> None:
    (found,), _ = _judged(True, end=End.TIMEOUT, note="no end within 5 s")
    assert found.title == "the answer to a prompt at the limit never ends" and "after 1 letters and finish_reason 'length'" in found.proof


def test_one_fault_takes_the_claim_from_its_way_alone() -> None:
    plain, stream = (Answer(Ask("x", stream=way), status=200, prompt_tokens=9) for way in (False, True))
    result = ProbeResult("limits", "")
    say_served(result, [(plain, True), (stream, True), (stream, False)], LIMIT)
    assert len(result.proved) == 1 and result.proved[0].endswith("in full, without streaming") and result.unproven == []
