"""Capacity: one verdict; the served context is never larger than the pool (L1)."""

from __future__ import annotations

import pytest

from kvseal.core.errors import ConfigError, ContextLengthExceeded, PoolTooSmall
from kvseal.kv.capacity import FIXED_LIMIT, MODEL_LIMIT, POOL_LIMIT, Capacity, Fits, NeverFits, Waits


def derive(**changes: int | None) -> Capacity:
    given: dict[str, int | None] = {"model_context_tokens": 100, "pool_pages": 10, "page_tokens": 16, **changes}
    return Capacity.derive(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pages", "fixed", "served", "reason", "full"),
    [
        (10, None, 100, MODEL_LIMIT, 1),
        (7, None, 100, MODEL_LIMIT, 1),
        (6, None, 96, POOL_LIMIT, 1),
        (1, None, 16, POOL_LIMIT, 1),
        (10, 50, 50, FIXED_LIMIT, 2),
        (10, 100, 100, FIXED_LIMIT, 1),
        (14, None, 100, MODEL_LIMIT, 2),
        (3, 48, 48, FIXED_LIMIT, 1),
    ],
)
def test_derived_context(pages: int, fixed: int | None, served: int, reason: str, full: int) -> None:
    capacity = derive(pool_pages=pages, fixed_context_tokens=fixed)
    assert (capacity.served_context_tokens, capacity.context_reason, capacity.full_length_requests) == (served, reason, full)
    assert capacity.served_context_tokens <= capacity.pool_tokens == pages * 16


def test_a_promise_that_the_pool_cannot_hold_names_the_size_that_would_do() -> None:
    with pytest.raises(PoolTooSmall, match="--pool-tokens 64"):
        derive(pool_pages=3, fixed_context_tokens=49)
    assert derive(pool_pages=4, fixed_context_tokens=49).served_context_tokens == 49


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(PoolTooSmall, match="--pool-tokens 16"):
        derive(pool_pages=0)


def test_more_than_the_model_promises_is_refused() -> None:
    with pytest.raises(ConfigError, match="101, but the model promises 100"):
        derive(fixed_context_tokens=101)


@pytest.mark.parametrize(("prompt", "output", "fits"), [(99, 1, True), (100, 1, False), (1, 99, True), (1, 100, False), (90, 10, True)])
def test_the_verdict_turns_at_exactly_the_limit(prompt: int, output: int, fits: bool) -> None:
    assert isinstance(derive().verdict(prompt, output), Fits if fits else NeverFits)


def test_a_request_that_fits_may_have_to_wait() -> None:
    assert derive().verdict(30, 3, available_pages=3) == Fits(3)
    assert derive().verdict(30, 3, available_pages=2) == Waits(3, 2)


def test_pages_in_quarantine_do_not_count() -> None:
    capacity = derive(pool_pages=7)
    assert capacity.verdict(90, 10) == Fits(7)
    assert capacity.verdict(90, 10, quarantined_pages=1) == NeverFits("pool", 90, 10, 96, 96)
    assert capacity.verdict(90, 6, quarantined_pages=1) == Fits(6)
    assert capacity.verdict(101, 1, quarantined_pages=1) == NeverFits("served context", 101, 1, 96, 96)


def test_a_refusal_becomes_the_error_that_clients_know() -> None:
    verdict = derive().verdict(200, 20)
    assert isinstance(verdict, NeverFits)
    error = verdict.error("prompt")
    assert isinstance(error, ContextLengthExceeded)
    assert "maximum context length is 100 tokens. However, you requested 220 tokens (200 in the prompt, 20 in the completion)" in str(error)
    assert error.details == {"prompt_tokens": 200, "max_output_tokens": 20, "max_servable_tokens": 100, "pool_tokens": 160}
