"""One command, two nodes, one API: what a client gets is what one node gives, to the bit, and it cannot tell the difference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import ServerProcess

LONG = (
    "The harbour was quiet that morning, and the ships lay still on the grey water while the keeper climbed the stairs of the tower. " * 4
)
"""About 110 tokens: worth a hand-off."""


@pytest.fixture(scope="module")
def two(demo_model_path: Path, logs: Path) -> Iterator[ServerProcess]:
    options = {"pool_tokens": 2048, "threads": 1}
    with ServerProcess(demo_model_path, logs / "two.log", engine=options, fleet={"prefill": 1, "decode": 1}) as running:
        yield running


ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "sampled": {"temperature": 0.9, "seed": 11, "max_tokens": 12, "top_p": 0.9},
    "logprobs": {"temperature": 0, "max_tokens": 6, "logprobs": 3},
    "stop": {"temperature": 0, "max_tokens": 40, "stop": [" the"]},
    "several": {"temperature": 0.8, "seed": 5, "max_tokens": 5, "n": 2},
    "one token": {"temperature": 0, "max_tokens": 1},
    "prompt logprobs": {"temperature": 0, "max_tokens": 2, "echo": True, "logprobs": 1},
}


@pytest.mark.parametrize("name", ASKS)
def test_the_same_answer_as_one_node(name: str, server: ServerProcess, two: ServerProcess) -> None:
    body = {"model": "demo", "prompt": f"{name}: {LONG}", **ASKS[name]}
    answers = [each.client.post("/v1/completions", json=body).raise_for_status().json() for each in (server, two)]
    assert answers[0]["choices"] == answers[1]["choices"]
    for answer in answers:
        answer["usage"].pop("prompt_tokens_details", None)
    assert answers[0]["usage"] == answers[1]["usage"]


def test_the_same_stream(server: ServerProcess, two: ServerProcess) -> None:
    body = {"model": "demo", "prompt": f"streamed: {LONG}", "max_tokens": 10, "temperature": 0, "stream": True}
    texts = []
    for each in (server, two):
        with each.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
        texts.append([line.split('"text":')[1].split(',"logprobs"')[0] for line in lines])
    assert texts[0] == texts[1] and len(texts[0]) > 5


def test_pages_went_over_and_all_came_back(two: ServerProcess) -> None:
    two.client.post("/v1/completions", json={"prompt": f"counted: {LONG}", "max_tokens": 4, "temperature": 0}).raise_for_status()

    def settled(seen: dict[str, float]) -> bool:
        busy = sum(seen[f"kvseal_kv_pages[{state}]"] for state in ("leased", "draining", "quarantined"))
        return not busy and seen["kvseal_handoff_received_total"] == seen["kvseal_handoff_sent_total"] > 1

    two.wait_until(settled)
    seen = two.metrics()
    assert seen["kvseal_handoff_differed_total"] == seen["kvseal_handoff_recomputed_total"] == 0
    assert seen["kvseal_handoff_pages_total"] > 6


def test_what_the_smallest_node_cannot_hold_is_refused(two: ServerProcess) -> None:
    answer = two.client.post("/v1/completions", json={"prompt": [1] * 2040, "max_tokens": 9})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert two.client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048


def test_hand_offs_are_not_the_callers_to_arrange(two: ServerProcess) -> None:
    answer = two.client.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}})
    assert answer.status_code == 403
