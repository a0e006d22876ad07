"""``kvseal place``: what it prints, and its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvseal.bench.place.latency import save
from kvseal.cli import main

from .conftest import kind_of, latency_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(latency_of(kind_of(chunk_tokens=(256,))), tmp_path / "model.json")
    return tmp_path / "model.json"


def place(model: Path, *arguments: str) -> int:
    return main(["place", "--latency", str(model), "--requests", "40", *arguments])


def test_a_recommendation(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert place(model, "--lengths", "300,20", "--slo", "ttft=4x,tpot=4x", "--workers", "2") == 0
    out, err = capsys.readouterr()
    assert "recommended" in out and "why" in out and "searched in" in out
    phases = ["requests alone", "colocated workers", "each side of a split by itself", "whole splits", "more finely", "scheduler itself"]
    places = [err.find(phase) for phase in phases]
    assert places == sorted(places) and places[0] >= 0, "a line for each phase, in order"
    assert "\x1b" not in err, "no terminal, no cursor movements"


def test_json(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("t_s,input_tokens,output_tokens\n" + "".join(f"{at},{100 + at},9\n" for at in range(20)))
    assert place(model, "--trace", str(trace), "--slo", "ttft=2,tpot=0.5", "--workers", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"]["workers"] <= 2 and found["arrivals"] == "trace" and found["impossible"] is None


def test_limits_that_cannot_be_met_end_with_1(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert place(model, "--lengths", "300,20", "--slo", "ttft=1ms", "--workers", "2") == 1
    assert "ttft=0.001 s cannot be met" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "300,20", "--slo", "speed=1", "--workers", "2"], "--slo has 'speed=1'"),
        (["--lengths", "300", "--slo", "ttft=1", "--workers", "2"], "--lengths is '300'"),
        (["--lengths", "300,0", "--slo", "ttft=1", "--workers", "2"], "--lengths"),
        (["--lengths", "300,2", "--slo", "ttft=1", "--workers", "0"], "--workers is 0"),
        (["--lengths", "300,2", "--slo", "ttft=1", "--workers", "2", "--target", "1.5"], "--target is 1.5"),
        (["--lengths", "300,2", "--slo", "ttft=1", "--workers", "2", "--chunk-tokens", "a"], "--chunk-tokens is 'a'"),
        (["--lengths", "300,2", "--slo", "ttft=1", "--workers", "2", "--link", "0"], "--link is 0"),
        (["--lengths", "300,2", "--slo", "ttft=1", "--workers", "2", "--requests", "3"], "--requests is 3"),
        (["--trace", "nowhere.csv", "--slo", "ttft=1", "--workers", "2"], "nowhere.csv cannot be read"),
    ],
)
def test_what_is_wrong_ends_with_2(model: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert place(model, *arguments) == 2
    assert words in capsys.readouterr().err


def test_an_unmeasured_machine_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSEAL_CACHE", str(tmp_path / "cache"))
    assert main(["place", "--lengths", "300,2", "--slo", "ttft=1", "--workers", "2"]) == 2
    assert "kvseal bench fit" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_said_before_measuring_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSEAL_CACHE", str(tmp_path / "cache"))
    assert main(["place", "--trace", "nowhere.csv", "--slo", "ttft=1", "--workers", "2"]) == 2
    assert "nowhere.csv cannot be read" in capsys.readouterr().err


def test_on_a_terminal_one_line_says_what_is_simulated(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert place(model, "--lengths", "300,20", "--slo", "ttft=4x,tpot=4x", "--workers", "2") == 0
    err = capsys.readouterr().err
    assert "1 prefill + 1 decode" in err and "\n" not in err and err.endswith("\r\x1b[K")
