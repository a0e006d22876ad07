"""The client and the processes: a server and a worker as scripts, then KVSeal itself through both doors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvseal.bench.peers import machine, worker
from kvseal.bench.peers.catalogue import Place, catalogue
from kvseal.bench.peers.engines import EngineFailed, TooSlow, start
from kvseal.bench.peers.workload import Call

from .fakes import fake_server, fake_worker, small_model

CALL = Call([[1_001, 1_002], [1_003, 1_004], [1_005, 1_006]], 4)


def test_all_requests_go_out_at_once_and_come_back(tmp_path: Path) -> None:
    engine = start(fake_server(tmp_path), tmp_path / "log")
    try:
        assert engine.start_s > 0 and engine.about == {"version": "b7"}
        answer = engine.ask(CALL, timeout_s=100.0)
        assert answer.seconds > 0
        assert answer.digest == engine.ask(CALL, timeout_s=100.0).digest != engine.ask(Call(CALL.prompts, 5), timeout_s=10.0).digest
    finally:
        engine.stop()
    assert machine.cpu_seconds([engine.pid]) == 0.0, "its process is gone"


@pytest.mark.parametrize(
    ("mode", "why"),
    [("broken", "status 400: too long for me"), ("short", "3 tokens came where 4 were asked for")],
)
def test_a_run_with_a_bad_answer_is_a_failure(tmp_path: Path, mode: str, why: str) -> None:
    engine = start(fake_server(tmp_path, mode), tmp_path / "log")
    try:
        with pytest.raises(EngineFailed, match=why):
            engine.ask(CALL, timeout_s=100.0)
    finally:
        engine.stop()


def test_an_answer_that_does_not_come_in_time(tmp_path: Path) -> None:
    engine = start(fake_server(tmp_path, "slow"), tmp_path / "log")
    try:
        with pytest.raises(TooSlow):
            engine.ask(CALL, timeout_s=0.2)
    finally:
        engine.stop()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="no such instructions"):
        start(fake_server(tmp_path, "dead"), tmp_path / "log")


def test_a_worker_answers_over_its_pipe(tmp_path: Path) -> None:
    engine = start(fake_worker(tmp_path), tmp_path / "log")
    try:
        assert engine.about == {"version": "1.2"}
        assert engine.ask(CALL, timeout_s=100.0).digest == "3"
        with pytest.raises(EngineFailed, match="unlucky"):
            engine.ask(Call(CALL.prompts, 13), timeout_s=100.0)
        with pytest.raises(EngineFailed, match=r"answered nothing|took no request"):
            engine.ask(CALL, timeout_s=100.0)
    finally:
        engine.stop()
    assert "a library says hello" in (tmp_path / "log").read_text()


class _Echo:
    def about(self) -> dict[str, str]:
        return {"version": "0"}

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[Any]:
        if output_tokens > 9:
            raise MemoryError("no room")
        return [prompt[:1] * output_tokens for prompt in prompts]


def test_the_worker_counts_tokens_and_ends_with_its_first_failure() -> None:
    asked = [{"prompts": [[5], [6]], "output_tokens": 2}, {"prompts": [[5]], "output_tokens": 10}, {"prompts": [[5]], "output_tokens": 1}]
    answers = io.StringIO()
    with pytest.raises(MemoryError):
        worker.serve(_Echo(), [json.dumps(each) for each in asked], answers)
    first, second, third = map(json.loads, answers.getvalue().splitlines())
    assert first == {"version": "0"} and second["counts"] == [2, 2] and third == {"error": "MemoryError: no room"}


def test_kvseal_gives_the_same_tokens_through_both_doors(tmp_path: Path) -> None:
    place = Place(directory=tmp_path, model=small_model(tmp_path), threads=1)
    call = Call([[5, 6, 7], [8, 9, 10]], 4)
    digests = set()
    for peer in catalogue():
        if peer.name in ("kvseal-serve-auto", "kvseal-python-auto"):
            engine = start(peer.launch(place), tmp_path / "log")
            try:
                digests.add(engine.ask(call, timeout_s=60.0).digest)
            finally:
                engine.stop()
    assert len(digests) == 1 and "" not in digests
