"""The figure is quoted only when both ways gave the same answers and every prompt was handed over. The servers are stand-ins here."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import httpx
import pytest

from kvseal.bench import handoff
from kvseal.bench.handoff import ONE, SPLIT, Failed, Heard, Ways, entry_of, measure
from kvseal.bench.suite.command import Context

URLS = {SPLIT: "http://split", ONE: "http://one"}


class StandIn:
    """Both servers: what they were asked, and what they answer."""

    def __init__(
        self, *, texts: dict[str, str] | None = None, recomputed: Iterable[int] = (), context: int = 4_096, status: int = 200
    ) -> None:
        self.texts = texts or {}
        self.recomputed = set(recomputed)
        self.context, self.status = context, status
        self.asked: list[tuple[str, dict[str, object]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": self.context}]})
        if request.url.path == "/metrics":
            split = sum(name == "split" for name, _ in self.asked)
            again = sum(1 for at in self.recomputed if at < split)
            text = f"# TYPE x counter\nkvseal_handoff_split_total {split}.0\nkvseal_handoff_recomputed_total {again}.0\n"
            return httpx.Response(200, text=text + 'kvseal_node_handoff_recomputed_total{node="d 0",role="decode"} 7.0\n')
        self.asked.append((host, json.loads(request.content)))
        chunks = [{"choices": [{"text": letter}]} for letter in self.texts.get(host, "abcdef")]
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return httpx.Response(self.status, text=lines)


def ways(server: StandIn) -> Ways:
    return Ways(URLS, random.Random(1), httpx.Client(transport=httpx.MockTransport(server)))


def context() -> Context:
    return Context(name="handoff", quick=True, pairs=4)


def test_pairs_are_of_the_same_fresh_prompt_and_take_turns() -> None:
    server = StandIn()
    entries = measure(context(), ways(server))
    assert [len(entry.a.values) for entry in entries if entry.a] == [4, 4, 4]
    pairs = [server.asked[at : at + 2] for at in range(2, len(server.asked), 2)]
    assert all(one[1]["prompt"] == other[1]["prompt"] for one, other in pairs)
    assert [pair[0][0] for pair in pairs[:4]] == ["split", "one", "split", "one"]
    salts = [body["cache_salt"] for _, body in server.asked]
    assert len(set(salts)) == len(salts)


def test_a_prompt_that_was_computed_again_leaves_no_score() -> None:
    with pytest.raises(Failed, match="3 of 4 prompts of 300 tokens were handed over"):
        measure(context(), ways(StandIn(recomputed=[2])))


def test_answers_that_differ_leave_no_score() -> None:
    with pytest.raises(Failed, match="differently"):
        measure(context(), ways(StandIn(texts={"one": "abcdeg"})))


@pytest.mark.parametrize(("server", "why"), [(StandIn(status=503), "status 503"), (StandIn(texts={"split": "a"}), "1 chunks")])
def test_an_answer_that_is_none_leaves_no_score(server: StandIn, why: str) -> None:
    with pytest.raises(Failed, match=why):
        measure(context(), ways(server))


def test_lengths_beyond_the_context_have_no_score_and_the_others_do() -> None:
    entries = measure(context(), ways(StandIn(context=1_000)))
    assert [bool(entry.no_score) for entry in entries] == [False, False, True]


def test_the_ratio_is_of_first_tokens_pair_by_pair() -> None:
    entry = entry_of(
        "x", [{SPLIT: Heard(0.3, 0.01, "a"), ONE: Heard(0.2, 0.01, "a")}, {SPLIT: Heard(0.2, 0.02, "a"), ONE: Heard(0.2, 0.01, "a")}]
    )
    assert entry.a is not None and entry.b is not None
    assert entry.a.values == pytest.approx((300, 200)) and entry.b.values == pytest.approx((200, 200))
    assert entry.target == handoff.LITTLE
