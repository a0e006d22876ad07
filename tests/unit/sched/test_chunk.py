"""A step is as large as its time allows."""

from __future__ import annotations

from kvseal.sched.chunk import FIRST_TOKENS, LEAST_TOKENS, StepSize


def test_without_a_target_a_step_is_what_was_asked_for() -> None:
    size = StepSize(512, None)
    size.took(512, 1_000.0)
    assert size.tokens(1) == 512


def test_the_first_step_is_small_and_a_fast_machine_soon_gets_all() -> None:
    size = StepSize(512, 1.0)
    assert size.tokens(0) == FIRST_TOKENS
    size.took(64, 0.064)
    assert size.tokens(0) == 512


def test_a_slow_machine_gets_what_fits_the_target() -> None:
    size = StepSize(512, 1.0)
    size.took(64, 0.64)
    assert size.tokens(0) == 100
    for _ in range(20):
        size.took(100, 50.0)
    assert size.tokens(0) == LEAST_TOKENS


def test_each_that_runs_gets_a_token_and_short_steps_teach_nothing() -> None:
    size = StepSize(512, 1.0)
    assert size.tokens(200) == 200
    size.took(4, 10.0)
    size.took(64, 0.0)
    assert size.tokens(1) == FIRST_TOKENS


def test_beside_decoders_a_step_is_short_and_still_moves_prompts_on() -> None:
    size = StepSize(512, 1.0)
    size.took(100, 0.1)
    assert size.tokens(9) == 512
    assert size.tokens(9, decoding=8) == 100
    size.took(100, 10.0)
    size.took(100, 10.0)
    assert size.tokens(9, decoding=8) == 8 + 32
    assert StepSize(512, None).tokens(9, decoding=8) == 512
