"""What a reader sees: ratios through the same door, verdicts, who is absent and why, loud repetitions."""

from __future__ import annotations

import json
from pathlib import Path

from kvseal.bench.peers import report
from kvseal.bench.peers.catalogue import Place, catalogue
from kvseal.bench.peers.figures import Measurement, Results
from kvseal.bench.peers.machine import Usage
from kvseal.bench.peers.schedule import Runner
from kvseal.bench.peers.workload import SCENARIOS

NAMES = ("kvseal-serve-auto", "kvseal-python-auto", "llama.cpp", "openvino-int8", "vllm")
SPEEDS = {"kvseal-serve-auto": 300.0, "kvseal-python-auto": 330.0, "llama.cpp": 100.0, "openvino-int8": 110.0}


def story(*, digest: str = "same", others_cores: float | None = 0.0) -> report.Story:
    peers = [peer for peer in catalogue() if peer.name in NAMES]
    batch = next(scenario for scenario in SCENARIOS if scenario.name == "batch")
    usage = Usage(wall_s=1.0, own_cores=2.0, others_cores=others_cores)
    measured = [
        Measurement(name, "batch", repetition, speed, usage, digest=digest if name == "kvseal-serve-auto" else "same")
        for name, speed in SPEEDS.items()
        for repetition in range(3)
    ]
    return report.Story(
        place=Place(directory=Path("peers"), model=Path("model.gguf"), threads=2),
        peers=peers,
        runners=[Runner(peer.name, lambda: None, about={"version": "9"}) for peer in peers],  # type: ignore[arg-type,return-value]
        absent={"vllm": "needs g++ <here>"},
        scenarios=[batch],
        results=Results(measured),
    )


def test_ratios_go_through_the_same_door() -> None:
    (table,) = report.tables(story())
    cells = {row[0]: row for row in table.rows}
    assert cells["llama.cpp server"][-1].startswith("3.00") and cells["llama.cpp server"][3] == "HTTP"
    assert cells["OpenVINO GenAI"][-1].startswith("3.00") and cells["OpenVINO GenAI"][3] == "Python"
    assert cells["KVSeal server, as stored"][-1] == ""


def test_the_verdict_is_against_the_best_peer() -> None:
    (table,) = report.tables(story())
    (verdict,) = table.verdicts
    assert "openvino-int8, the best peer: 3.00 (3.00-3.00)x; target 4x: missed by 1.33x" in verdict


def test_text_says_who_is_absent_and_why_and_that_tokens_are_equal() -> None:
    text = report.text(story())
    assert "vllm: does not run here: needs g++" in text
    assert "the same tokens in all 3 repetitions compared" in text
    assert "loud" not in text.split("notes")[1]


def test_different_tokens_void_the_figures() -> None:
    assert "DIFFERENT TOKENS in batch" in report.text(story(digest="other"))


def test_noise_is_said() -> None:
    assert "12 of 12 repetitions were loud" in report.text(story(others_cores=1.0))
    assert "nobody knows" in report.text(story(others_cores=None))


def test_json_and_page_hold_the_same_and_the_page_is_escaped() -> None:
    content = json.loads(report.as_json(story()))
    assert len(content["measurements"]) == 12
    assert {engine["name"]: engine["absent"] for engine in content["engines"]}["vllm"] == "needs g++ <here>"
    page = report.as_html(story())
    assert "needs g++ &lt;here&gt;" in page and "<script" not in page and "300 (300-300)" in page
