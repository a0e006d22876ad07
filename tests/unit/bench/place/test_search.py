"""The search: figures that can be worked out by hand, limits that cannot be met, and what is said of both."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvseal.bench.place import report
from kvseal.bench.place.curves import Curve, highest
from kvseal.bench.place.idle import Idle
from kvseal.bench.place.latency import DecodeLine, Phases
from kvseal.bench.place.search import Answer, Question, search
from kvseal.bench.place.slo import SLO, parse_slo
from kvseal.bench.place.trace import Job, Trace, fixed

from .conftest import kind_of, latency_of


def question(**changed: object) -> Question:
    values: dict[str, object] = {
        "latency": latency_of(kind_of(chunk_tokens=(128, 8_192))),
        "trace": fixed(600, 40),
        "asked": parse_slo("ttft=5x,tpot=4x"),
        "workers": 2,
        "requests": 60,
        "poisson": True,
    }
    return Question(**{**values, **changed})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def answer() -> Answer:
    return search(question())


def test_it_finds_both_ways_and_says_which_is_better(answer: Answer) -> None:
    best, shared, split = answer.found[0], answer.best(split=False), answer.best(split=True)
    assert shared is not None and split is not None and best in (shared, split)
    assert shared.promised and split.promised and min(shared.attainment, split.attainment) >= 0.9
    text = report.text(answer)
    assert best.placement.name in text and "runners-up" in text
    words = {True: "splitting gives", False: "splitting loses"}
    assert words[split.rate > shared.rate] in text or "splitting changes nothing" in text


def test_equal_questions_have_equal_answers(answer: Answer) -> None:
    assert json.dumps(report.as_json(answer)) == json.dumps(report.as_json(search(question())))


def test_decoding_that_prompts_may_not_disturb_is_split_off() -> None:
    """The longest gaps may be hardly longer than idle ones: beside whole prompts that cannot be."""
    found = search(question(asked=parse_slo("ttft=10x,tbt=2x"), trace=fixed(1_000, 60), chunk_tokens=(8_192,)))
    split, shared = found.best(split=True), found.best(split=False)
    assert split is not None and found.found[0] is split
    assert shared is None or shared.rate < 0.5 * split.rate
    assert "splitting gives" in report.text(found) or "no colocated placement" in report.text(found)


def test_splitting_loses_where_nothing_disturbs() -> None:
    found = search(question(asked=parse_slo("ttft=30x,tpot=50x")))
    assert found.found[0].placement.split is False
    assert "splitting loses here" in report.text(found)


def test_more_workers_sustain_more() -> None:
    two, four = (search(question(workers=workers, chunk_tokens=(128,))).found[0].rate for workers in (2, 4))
    assert 1.7 < four / two < 3.0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"asked": parse_slo("ttft=1ms,tpot=1")}, "ttft=0.001 s cannot be met"),
        ({"asked": parse_slo("ttft=100,tpot=1ms")}, "tpot=0.001 s cannot be met"),
        ({"trace": fixed(9_000, 10)}, "fit no worker: at most 8192 tokens"),
        ({"latency": latency_of(kind_of(width=4)), "workers": 3}, "takes 4 devices, and --workers is 3"),
    ],
)
def test_what_cannot_be_is_said_with_the_limit(changed: dict[str, object], words: str) -> None:
    found = search(question(**changed))
    assert not found.found and words in found.impossible
    assert words in report.text(found) and report.as_json(found)["recommended"] is None


def test_what_a_sample_has_missed_is_found_when_nothing_else_is() -> None:
    """Of 500 requests 80 fit no worker with their answers, though their prompts would, and the sample sees none of them."""
    jobs = [Job(0.0, 100, 10)] * 500
    for at in range(0, 400, 10):
        jobs[at + 1 : at + 3] = [Job(0.0, 6_000, 3_000)] * 2
    found = search(question(trace=Trace("mixed", tuple(jobs), timed=False), asked=parse_slo("ttft=1,tpot=1"), requests=300, workers=1))
    assert not found.found and "80 of 500 requests fit no worker" in found.impossible


def test_limits_are_met_together_or_not() -> None:
    idle = Idle(ttft_s=(1.0, 2.0, 1.0), tpot_s=(2.0, 1.0, 1.0), tbt_s=(9.0, 9.0, 9.0), life_s=1.0, refused=0)
    assert idle.met(SLO(ttft_s=1.5, tpot_s=1.5)) == 1 and idle.met(SLO(ttft_s=1.5)) == 2 and idle.met(SLO(tbt_s=8.0)) == 0


def test_one_worker_cannot_be_split() -> None:
    found = search(question(workers=1))
    assert all(not one.placement.split for one in found.found)
    assert "a split needs" in report.text(found)


def test_kinds_of_different_width_are_mixed() -> None:
    """Wide workers prefill fast, narrow ones decode as well: the split takes one of each."""
    wide = Phases(0.002, 0.0001, 0.0, (DecodeLine(1, 0.010, 0.0, 0.0),))
    narrow = Phases(0.002, 0.0008, 0.0, (DecodeLine(1, 0.010, 0.0, 0.0),))
    kinds = (
        kind_of(name="narrow", cost=narrow, step_s=None, chunk_tokens=(8_192,)),
        kind_of(name="wide", cost=wide, width=2, step_s=None, chunk_tokens=(8_192,)),
    )
    found = search(question(latency=latency_of(*kinds), trace=fixed(500, 20), asked=parse_slo("ttft=0.2,tbt=20ms"), workers=3))
    split = found.best(split=True)
    assert split is not None and split.placement.prefill_kind and split.placement.decode_kind
    assert (split.placement.prefill_kind.name, split.placement.decode_kind.name) == ("wide", "narrow")


def test_highest_finds_the_edge_from_anywhere() -> None:
    for edge in (-37, 0, 5, 99):
        for guess in (-60, 0, 7, 140):
            assert highest(lambda at, edge=edge: at <= edge, guess, 1_000) == edge
    assert highest(lambda at: True, 0, 50) == 50
    assert highest(lambda at: False, 0, 50) is None


def test_a_curve_is_simulated_once_for_each_rate() -> None:
    asked: list[float] = []

    def run(rate: float) -> float:
        asked.append(rate)
        return 1.0 if rate < 3 else 0.0

    curve = Curve(run, 1_000.0)
    assert curve.goodput(0.9, 0.1) == pytest.approx(3.0, rel=0.09)
    assert curve.reaches(0.9, 2.0) and not curve.reaches(0.9, 4.0)
    assert len(asked) == len(set(asked))


def test_trace_arrivals_and_poisson_are_told_apart() -> None:
    jobs = tuple(replace_at(number) for number in range(30))
    trace = Trace("timed", jobs, timed=True)
    assert "its own arrivals" in report.text(search(question(trace=trace, poisson=False, requests=30, chunk_tokens=(128,), workers=1)))


def replace_at(number: int):  # type: ignore[no-untyped-def]
    return fixed(100, 5).jobs[0]._replace(at_s=float(number))


def test_limits_in_seconds_and_in_multiples_agree(answer: Answer) -> None:
    absolute = parse_slo(f"ttft={answer.slo.ttft_s:.9f},tpot={answer.slo.tpot_s:.9f}")
    assert search(replace(question(), asked=absolute)).found[0].rate == pytest.approx(answer.found[0].rate)
