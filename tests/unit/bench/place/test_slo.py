"""Limits: how they are written, and what meets them."""

from __future__ import annotations

import math

import pytest

from kvseal.bench.place.slo import SLO, Record, attainment, parse_slo, quantile, seconds
from kvseal.bench.place.tally import Stop, Tally
from kvseal.bench.place.trace import Job
from kvseal.core.errors import ConfigError


def test_seconds_milliseconds_and_multiples() -> None:
    asked = parse_slo(" TTFT=200ms, tpot=.1 ,tbt=3x")
    resolved = asked.resolved(SLO(ttft_s=9.0, tpot_s=9.0, tbt_s=0.02))
    assert (resolved.ttft_s, resolved.tpot_s) == (0.2, 0.1) and resolved.tbt_s == pytest.approx(0.06)
    assert str(SLO(ttft_s=0.2, tpot_s=1.5)) == "TTFT <= 200 ms, TPOT <= 1.5 s"


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=1m", "speed=1", "ttft=1,ttft=2", "tpot=nan", "ttft=1 2"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


def record_of(*times: float, outputs: int | None = None, arrived_s: float = 0.0) -> Record:
    tally = Tally([Job(arrived_s, 5, outputs or len(times))], None, None)
    for at_s in times:
        tally.token(0, at_s)
    return tally.records[0]


def test_times_of_a_request() -> None:
    record = record_of(2.0, 2.5, 3.0, 6.0, arrived_s=1.0)
    assert (record.ttft_s, record.tpot_s, record.tbt_s) == (1.0, pytest.approx(4 / 3), 3.0)
    one = record_of(2.0)
    assert (one.tpot_s, one.tbt_s) == (0.0, 0.0)
    open_ = record_of(2.0, 2.5, outputs=9)
    assert open_.tpot_s == open_.tbt_s == math.inf and SLO(tpot_s=100.0).missed(open_) == ("tpot",)


def test_the_longest_tenth_of_the_gaps() -> None:
    times = [0.0]
    for number in range(30):
        times.append(times[-1] + (1.0 if number in (3, 9, 20) else 0.1))
    assert record_of(*times).tbt_s == pytest.approx(1.0)
    tally = Tally([Job(0.0, 5, 31)], None, None)
    tally.token(0, 0.0)
    tally.tokens(0, 2.7, 27)
    tally.tokens(0, 5.7, 3)
    assert tally.records[0].tbt_s == pytest.approx(1.0)


def test_attainment_counts_refused_and_unfinished_as_missed() -> None:
    refused = record_of(1.0)
    refused.refused = True
    slo = SLO(ttft_s=2.0, tpot_s=0.6)
    records = [record_of(1.0, 1.5), record_of(3.0, 3.5), record_of(1.0, 2.0), refused, record_of(1.0, outputs=3)]
    assert attainment(records, slo) == 0.2
    assert [slo.missed(record) for record in records] == [(), ("ttft",), ("tpot",), ("ttft", "tpot"), ("ttft", "tpot")]


def test_each_request_misses_once() -> None:
    tally = Tally([Job(0.0, 5, 2)] * 3, SLO(ttft_s=1.0, tpot_s=0.1), 1)
    tally.token(0, 2.0)
    tally.token(0, 9.0)
    tally.ended(0)  # late twice, missed once
    tally.token(1, 0.5)
    tally.token(1, 0.55)
    tally.ended(1)
    tally.token(2, 0.5)
    tally.token(2, 5.0)
    with pytest.raises(Stop):
        tally.ended(2)


def test_quantiles_and_words() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0 and quantile([1.0], 0.9) == 1.0
    assert [seconds(value) for value in (0.0123, 2.0, None, math.inf)] == ["12.3 ms", "2 s", "-", "never"]
