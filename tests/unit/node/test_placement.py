"""Placement: by outstanding tokens, towards a prefix, never further than it is worth."""

from __future__ import annotations

from kvseal.node.fleet import held_pages
from kvseal.node.placement import MAX_IMBALANCE_TOKENS, Candidate, Placement, cheapest, place


def node(name: str, outstanding: int = 0, cached: int = 0, coming: int | None = None) -> Candidate:
    return Candidate(name, outstanding, cached, cached if coming is None else coming)


P0, D0 = node("p0"), node("d0")


def test_a_prompt_is_split_when_it_is_worth_it() -> None:
    assert place(65, 8, [P0], [D0]) == Placement("p0", "d0")
    assert place(64, 8, [P0], [D0]) == Placement(None, "d0")
    assert place(500, 8, [P0], [node("d0", cached=440)]) == Placement(None, "d0")
    assert place(500, 8, [P0], [node("d0", cached=0, coming=500)]) == Placement("p0", "d0")


def test_one_token_is_the_prefill_nodes_alone() -> None:
    assert place(500, 1, [P0], [D0]) == Placement("p0", None)
    assert place(500, 1, [], [D0]) == Placement(None, "d0")


def test_whole_prompts_are_computed_where_they_are_answered() -> None:
    assert place(500, 8, [P0], [D0], whole=True) == Placement(None, "d0")


def test_without_nodes() -> None:
    assert place(500, 8, [P0], []) is None
    assert place(500, 8, [], [D0]) == Placement(None, "d0")


def test_less_work_wins_and_the_first_among_equals() -> None:
    assert cheapest(100, [node("a", 50), node("b", 49)]).name == "b"
    assert cheapest(100, [node("a", 50), node("b", 50)]).name == "a"


def test_a_prefix_is_worth_what_it_saves() -> None:
    assert cheapest(1000, [node("a", 900, cached=960), node("b", 0)]).name == "a"
    assert cheapest(1000, [node("a", 961, cached=960), node("b", 0)]).name == "b"
    far = MAX_IMBALANCE_TOKENS + 1
    assert cheapest(10**6, [node("a", far, cached=10**6), node("b", 0)]).name == "b"


def test_what_is_held_is_a_beginning() -> None:
    keys = [bytes([i]) for i in range(10)]
    assert held_pages(keys, set(keys[:4]), {}) == 4
    assert held_pages(keys, set(keys[:4]), dict.fromkeys(keys[4:7], 1)) == 7
    assert held_pages(keys, set(), {}) == 0
    assert held_pages([], {b"x"}, {}) == 0
