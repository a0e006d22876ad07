"""Numerics are told from corruption."""

from __future__ import annotations

from kvseal.audit.compare import Kind, blind_spot, compare, drawn, largest_move
from kvseal.audit.wire import Answer, Ask, Step


def _answer(*steps: tuple[str, float, dict[str, float]], text: str | None = None) -> Answer:
    made = tuple(Step(token, value, tuple(top.items())) for token, value, top in steps)
    return Answer(Ask("x"), status=200, text="".join(step.token for step in made) if text is None else text, steps=made)


A = ("a", -0.1, {"a": -0.1, "b": -2.5, "c": -4.0})
NEAR = ("a", -0.70, {"a": -0.70, "b": -0.72, "c": -4.0})
NEAR_FLIPPED = ("b", -0.71, {"b": -0.71, "a": -0.712, "c": -4.0})
FAR = ("b", -0.2, {"b": -0.2, "c": -1.9, "a": -3.0})


def test_equal_bits_are_the_same() -> None:
    difference = compare(_answer(A, NEAR), _answer(A, NEAR))
    assert difference.kind is Kind.SAME and difference.exact and difference.position == -1


def test_a_flipped_near_tie_is_numerics() -> None:
    assert compare(_answer(A, NEAR), _answer(A, NEAR_FLIPPED)).kind is Kind.NUMERICS


def test_a_token_that_was_unlikely_is_a_difference() -> None:
    difference = compare(_answer(A, A), _answer(A, FAR))
    assert difference.kind is Kind.DIFFERENT and difference.position == 1 and difference.gap > 2


def test_moved_logprobs_are_a_difference_unless_the_server_is_that_noisy() -> None:
    moved = ("a", -0.5, {"a": -0.5, "b": -2.5, "c": -4.0})
    assert compare(_answer(A), _answer(moved)).kind is Kind.DIFFERENT
    assert compare(_answer(A), _answer(moved), floor=0.1).kind is Kind.NUMERICS


def test_an_early_end_is_a_difference_when_the_next_token_was_sure() -> None:
    certain = ("z", -0.01, {"z": -0.01, "y": -6.0})
    assert compare(_answer(A, certain), _answer(A)).kind is Kind.DIFFERENT
    assert compare(_answer(A), _answer(A, certain)).kind is Kind.DIFFERENT
    unsure = ("z", -3.0, {"z": -3.0, "y": -3.1})
    assert compare(_answer(A, unsure), _answer(A)).kind is Kind.NUMERICS


def test_without_logprobs_a_changed_text_is_unknown() -> None:
    assert compare(_answer(text="one"), _answer(text="one")).kind is Kind.SAME
    assert compare(_answer(text="one"), _answer(text="two")).kind is Kind.UNKNOWN


def test_the_largest_move_counts_alternatives_and_foreign_lists() -> None:
    assert largest_move(_answer(A), _answer(A)) == 0.0
    other = ("a", -0.1, {"a": -0.1, "b": -2.8, "c": -4.0})
    assert largest_move(_answer(A), _answer(other)) is not None and abs((largest_move(_answer(A), _answer(other)) or 0) - 0.3) < 1e-9
    strange = ("q", -0.1, {"q": -0.1, "r": -1.0})
    assert largest_move(_answer(A), _answer(strange)) == 10.0
    assert largest_move(_answer(text="x"), _answer(A)) is None


def test_a_noise_in_which_a_corruption_may_hide_is_said() -> None:
    assert blind_spot(0.02) == []
    assert "no change below 2 nats" in blind_spot(0.25)[0]


def test_a_token_that_was_drawn_by_lot_is_told_from_one_that_was_computed_otherwise() -> None:
    second_best = ("b", -2.5, {"a": -0.1, "b": -2.5, "c": -4.0})
    assert drawn(_answer(A, A), _answer(A, second_best)) and drawn(_answer(second_best), _answer(A))
    assert not drawn(_answer(A, A), _answer(A, FAR)) and not drawn(_answer(A), _answer(A, A)) and not drawn(_answer(A), _answer(A))
    assert drawn(_answer(text="one"), _answer(text="two")) and not drawn(_answer(text="one"), _answer(text="one"))
