"""Workloads: what a cache without limit would find, their shapes, and slices that keep them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvseal.bench import all as whole
from kvseal.bench.prefix import chosen, slices
from kvseal.bench.suite.command import Context, find_traces
from kvseal.bench.suite.workloads import (
    Ask,
    Workload,
    arc,
    distinct_tokens,
    gsm8k,
    ideal_hits,
    lengths,
    mmlu,
    synthetic,
    workload,
)
from kvseal.core.errors import ConfigError

PAGE = 4


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def by_hand(asks: list[Ask]) -> tuple[int, int]:
    """Hits and distinct tokens, prefix by prefix."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for ask in asks:
        prefixes = [ask.prompt[:end] for end in range(PAGE, len(ask.prompt) + 1, PAGE)]
        usable = [prefix for prefix in prefixes if prefix in seen and len(prefix) < len(ask.prompt)]
        hits += max((len(prefix) for prefix in usable), default=0)
        seen.update(prefixes)
    return hits, PAGE * len(seen)


def test_ideal_hits_are_what_a_search_by_hand_finds() -> None:
    chance = random.Random(3)
    heads = [tuple(chance.randrange(3) for _ in range(9)) for _ in range(4)]
    asks = [Ask(chance.choice(heads)[: chance.randrange(10)] + (chance.randrange(3),) * chance.randrange(1, 9), 1) for _ in range(300)]
    assert (ideal_hits(asks, PAGE), distinct_tokens(asks, PAGE)) == by_hand(asks)
    assert by_hand(asks)[0] > 0


def test_never_all_of_a_prompt_is_found() -> None:
    twice = [Ask(tuple(range(8)), 1)] * 2
    assert ideal_hits(twice, PAGE) == 4


@pytest.mark.parametrize(
    ("name", "requests", "mean", "share"),
    [("mmlu", 1_140, 629, 0.803), ("gsm8k", 600, 1_380, 0.949), ("react", 400, 1_862, 0.940)],
)
def test_synthetic_workloads_have_the_shape_of_the_real_ones(name: str, requests: int, mean: float, share: float) -> None:
    work = synthetic(name, 49_152)
    total = sum(len(ask.prompt) for ask in work.asks)
    assert work.synthetic and len(work.asks) == requests
    assert total / requests == pytest.approx(mean, rel=0.06)
    assert ideal_hits(work.asks, 16) / total == pytest.approx(share, abs=0.02)
    assert all(ask.prompt[: len(work.shared)] == work.shared for ask in work.asks)


def test_unshared_prompts_share_nothing() -> None:
    assert ideal_hits(synthetic("unshared", 49_152).asks, 16) == 0


def test_heads_are_encoded_once_and_the_tokens_are_the_same(tmp_path: Path) -> None:
    shots = [{"question": f"q{index}", "answer": f"a{index}"} for index in range(8)]
    for name, rows in (("gsm8k-fewshot8.jsonl", shots), ("gsm8k-test-0-600.jsonl", [{"question": "what", "answer": "that"}] * 3)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    work = gsm8k(tmp_path, bytes_of)
    expected = "".join(f"Question: q{index}\nAnswer: a{index}\n\n" for index in range(8)) + "Question: what\nAnswer:"
    assert bytes(work.asks[0].prompt).decode() == expected
    assert [ask.output_tokens for ask in work.asks] == [5, 5, 5]

    def greedy(text: str) -> list[int]:
        """Joins the two ends of lines between solved problems, so that no cut inside them is right."""
        return list(text.replace("\n\n", "\t").encode())

    joined = gsm8k(tmp_path, greedy)
    assert bytes(joined.asks[0].prompt).decode() == expected.replace("\n\n", "\t")


def test_questions_have_their_shots_before_them(tmp_path: Path) -> None:
    question = ["Which?", "one", "two", "three", "four", "2"]
    row = {"subject": "hard_things", "dev": [question] * 5, "test": [question] * 2}
    (tmp_path / "mmlu-5shot-20q.jsonl").write_text(json.dumps(row))
    text = bytes(mmlu(tmp_path, bytes_of).asks[0].prompt).decode()
    assert text.startswith("The following are multiple choice questions (with answers) about hard things.\n\nWhich?\nA. one\n")
    assert text.count("Answer: C\n\n") == 5 and text.endswith("D. four\nAnswer:")
    rows = [{"choices": ["right", "wrong"], "query": f"Question: {index}", "gold": 0} for index in range(21)]
    (tmp_path / "arc-challenge.jsonl").write_text("\n".join(map(json.dumps, rows)))
    work = arc(tmp_path, bytes_of)
    assert [bytes(ask.prompt).decode().rsplit("\n", 1)[1] for ask in work.asks] == ["Answer: right", "Answer: wrong"]


def test_absent_texts_are_replaced_and_that_is_said(tmp_path: Path) -> None:
    assert workload("unshared", None, bytes_of, 1_000).synthetic
    assert workload("unshared", tmp_path, bytes_of, 1_000).label == "unshared prompts (synthetic)"
    found, real = lengths(tmp_path, longest_tokens=2_048, requests=50)
    assert not real and len(found) == 50 and max(map(sum, found)) <= 2_048
    again, _ = lengths(None, longest_tokens=2_048, requests=20, skip=30)
    assert again == found[30:], "windows follow one another"


def test_slices_keep_groups_whole() -> None:
    groups = tuple(tuple(Ask((group, index), 1) for index in range(10)) for group in range(10))
    grouped = slices(Workload("x", groups, ()), 3, 5)
    assert [[ask.prompt for ask in part] for [part] in grouped] == [[(group, index) for index in range(3)] for group in (1, 3, 5, 7, 9)]
    flat = slices(Workload("x", (groups[0] + groups[1],), ()), 4, 2)
    assert [part[0].prompt for [part] in flat] == [(0, 0), (1, 0)] and all(len(part) == 4 for [part] in flat)


def test_slices_keep_agents_with_all_their_steps() -> None:
    steps = tuple(tuple(Ask((7, agent, *range(step)), 1) for agent in range(10)) for step in range(3))
    first, second = slices(Workload("x", steps, (7,)), 4, 2)
    assert [[ask.prompt[1] for ask in wave] for wave in first] == [[0, 1, 2, 3]] * 3
    assert [[ask.prompt[1] for ask in wave] for wave in second] == [[5, 6, 7, 8]] * 3
    asks = [ask for wave in second for ask in wave]
    assert sorted({asks[at].prompt[1] for at in chosen(second, 2)}) == [6, 8] and len(chosen(second, 2)) == 6


def test_a_share_of_a_slice_has_long_and_short_ones() -> None:
    wave = [Ask((1,) * tokens, tokens % 5 + 1) for tokens in range(1, 21)]
    share = [wave[at].output_tokens for at in chosen([wave], 5)]
    assert sorted(share) == [1, 2, 3, 4, 5] and sorted(chosen([wave], 99)) == list(range(20))


def test_traces_that_are_named_must_be_there(tmp_path: Path) -> None:
    assert find_traces(tmp_path) == tmp_path
    with pytest.raises(ConfigError, match="no such folder"):
        find_traces(tmp_path / "nowhere")


def test_only_takes_figures_and_names() -> None:
    assert whole.chosen("3,growth,13") == ["linear", "growth", "prefix"]
    assert whole.chosen(None) == list(whole.BENCHMARKS)
    with pytest.raises(ConfigError, match="there is no benchmark or figure 99"):
        whole.chosen("99")
    for nothing in (",", "", " , "):
        with pytest.raises(ConfigError, match="names nothing"):
            whole.chosen(nothing)


def test_threads_default_to_the_cores_of_this_process() -> None:
    assert Context(name="x").threads_used >= 1 and Context(name="x", threads=7).threads_used == 7
