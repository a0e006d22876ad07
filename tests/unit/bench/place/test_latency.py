"""Latency models: their forms, their files, and the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvseal.bench.place.latency import DecodeLine, Phases, Step, load, published, save
from kvseal.core.errors import ConfigError

from .conftest import COST, kind_of, latency_of


def test_knots_run_straight_and_go_on() -> None:
    def at(tokens: int) -> float:
        return COST.step_s(Step(1, tokens, 0.0, 0, 0, 0))

    assert at(1) == 0.008 and at(8) == 0.012
    assert at(260) == pytest.approx((0.012 + 0.5) / 2)
    assert at(1_016) == pytest.approx(0.5 + 0.488)  # twice the last stretch
    assert COST.step_s(Step(0, 0, 0.0, 8, 1_000, 8)) == pytest.approx(0.012 + 0.001 + 8 * 0.0002 + 1_000 * 1e-7)
    assert COST.step_s(Step(1, 8, 1e6, 0, 0, 0)) == pytest.approx(0.012 + 0.06)


def test_phases_add_up_and_change_with_the_rows() -> None:
    cost = Phases(0.016, 0.0001, 1e-8, (DecodeLine(1, 0.020, 1e-6, 0.0001), DecodeLine(95, 0.007, 1e-6, 0.0002)))
    assert cost.step_s(Step(1, 100, 5_050, 0, 0, 1)) == pytest.approx(0.016 + 0.01 + 5_050e-8)
    assert cost.step_s(Step(0, 0, 0.0, 94, 1_000, 94)) == pytest.approx(0.020 + 0.001 + 0.0094)
    assert cost.step_s(Step(0, 0, 0.0, 95, 1_000, 95)) == pytest.approx(0.007 + 0.001 + 0.019)
    assert cost.step_s(Step(1, 100, 0, 1, 0, 2)) == pytest.approx(0.026 + 0.0201)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    phases = Phases(0.016, 0.0001, 1e-8, (DecodeLine(1, 0.020, 1e-6, 0.0001),))
    latency = latency_of(kind_of(), kind_of(name="wide", width=4, stages=2, cost=phases, step_s=None), direct_tokens=0, notes={"a": 1})
    save(latency, tmp_path / "deep" / "one.json")
    assert load(tmp_path / "deep" / "one.json") == latency


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), "other", "'format' is 'other'"),
        (("model",), "", "'model' of the file"),
        (("kv_token_bytes",), 0, "'kv_token_bytes' of the file"),
        (("handoff_bytes_per_s",), -1, "'handoff_bytes_per_s'"),
        (("kinds",), [], "'kinds' of the file"),
        (("kinds", 0, "pool_tokens"), "many", "'pool_tokens' of kind 1"),
        (("kinds", 0, "chunk_tokens"), [0], "a chunk size is 0"),
        (("kinds", 0, "cost", "form"), "magic", "'knots' or 'phases'"),
        (("kinds", 0, "cost", "tokens"), [8, 1, 512], "that rise"),
        (("kinds", 0, "cost", "seconds"), [1.0], "as many times"),
        (("kinds", 0, "cost", "pair_s"), float("nan"), "'pair_s'"),
        (("kinds", 0, "cost"), 5, "no JSON object"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, path: tuple[str | int, ...], value: object, words: str) -> None:
    save(latency_of(), tmp_path / "one.json")
    whole = json.loads((tmp_path / "one.json").read_text())
    inner = whole
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    (tmp_path / "one.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "one.json")
    assert words in str(caught.value) and "one.json" in str(caught.value)


def test_a_file_that_is_not_there_names_what_is() -> None:
    with pytest.raises(ConfigError, match=r"kvseal bench fit.*distserve-a100-opt-13b"):
        load(Path("nowhere"))


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        load(tmp_path / "x.json")


@pytest.mark.parametrize("name", published())
def test_published_models_load(name: str) -> None:
    assert load(Path(name)).kinds


def test_the_published_profile_is_the_source_s() -> None:
    """DistServe's profile of OPT-13B on two A100 for a prompt of 1,000 tokens and a batch of 10 with 10,000 tokens, in its own formula."""
    kind = next(kind for kind in load(Path("distserve-a100-opt-13b")).kinds if kind.name == "tp 2")
    overhead_ms = 2 + 0.0001 * 1_000 + 1
    prefill_ms = 13.402703359246601 + 0.06234291581603636 * 1_000 + 2.226884309113053e-06 * 1_000**2
    assert kind.cost.step_s(Step(1, 1_000, 500_500, 0, 0, 1)) == pytest.approx((prefill_ms + overhead_ms) / 1_000, rel=1e-3)
    decode_ms = 13.294796350285385 + 0.00034109219700723494 * 10_000 + 0.06296393225243659 * 10 + 2 + 0.0001 * 10_000
    assert kind.cost.step_s(Step(0, 0, 0.0, 10, 10_000, 10)) == pytest.approx(decode_ms / 1_000, rel=1e-4)
    assert kind.pool_tokens == 163_008 and kind.width == 2
