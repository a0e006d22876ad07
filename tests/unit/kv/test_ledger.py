"""The audit finds every disagreement between columns, and between ledger and seals (L2-L8, L10)."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.kv.handles import Lease, Pin
from kvseal.kv.ledger import Ledger, PageState, scope_words
from kvseal.kv.pool import PagePool

from .conftest import ALICE, seal_at, seals_of

Held = tuple[PagePool, Lease, Pin]


@pytest.fixture
def held(pool: PagePool) -> Held:
    """Pages 0 and 1 sealed and cached, 2 leased with two committed slots, 3 leased and untouched, the others free."""
    lease = pool.reserve(4, ALICE)
    assert lease is not None
    pin = pool.pin(array("Q"), ALICE)
    pool.enter_cache(pool.seal(lease, pin, [b"d" * 16] * 2))
    pool.commit(lease, lease.stamps[0], 2)
    pool.check(seals_of(pool))
    return pool, lease, pin


def _free_list_twice(pool: PagePool) -> None:
    pool._free[0] = pool._free[1]


def _free_list_short(pool: PagePool) -> None:
    pool._counts[PageState.FREE] -= 1
    pool._counts[PageState.DRAINING] += 1
    pool.ledger.state[7] = PageState.DRAINING
    pool.ledger.nonce[7] = 1
    pool._free[0] = 2


def _set(column: str, page: int, value: int) -> Callable[[PagePool], None]:
    def change(pool: PagePool) -> None:
        vars(pool.ledger)[column][page] = value

    return change


def _same_nonce(pool: PagePool) -> None:
    pool.ledger.nonce[2] = pool.ledger.nonce[3]


def _count_off(pool: PagePool) -> None:
    pool.evictable_pages += 1


def _orphan(pool: PagePool) -> None:
    pool.ledger.cached[0] = pool.ledger.pins[0] = 0


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (_free_list_twice, Law.L2),
        (_free_list_short, Law.L2),
        (_set("state", 6, PageState.LEASED), Law.L2),
        (_count_off, Law.L2),
        (_orphan, Law.L2),
        (_set("nonce", 6, 5), Law.L3),
        (_set("nonce", 2, 0), Law.L3),
        (_same_nonce, Law.L3),
        (_set("holder", 2, 0), Law.L4),
        (_set("holder", 0, 1), Law.L4),
        (_set("pins", 2, 1), Law.L7),
        (_set("cached", 2, 1), Law.L7),
        (_set("tickets", 6, 1), Law.L8),
    ],
)
def test_the_audit_finds_it(held: Held, change: Callable[[PagePool], None], law: Law) -> None:
    pool, lease, pin = held
    change(pool)
    with pytest.raises(LawBroken) as caught:
        pool.check()
    assert caught.value.law is law
    lease.open = pin.open = False


@pytest.mark.parametrize(
    ("page", "field", "value", "law"),
    [
        (0, "magic", 0, Law.L3),
        (1, "nonce", 99, Law.L3),
        (2, "nonce", 99, Law.L3),
        (0, "scope", (1, 2), Law.L4),
        (2, "scope", (1, 2), Law.L4),
        (0, "format", 3, Law.L10),
        (1, "ordinal", 7, Law.L6),
        (0, "layer", 9, Law.L6),
        (2, "filled", 1, Law.L5),
        (0, "digest", 0, Law.L7),
    ],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_every_field_of_every_seal_is_compared(held: Held, page: int, field: str, value: object, law: Law, layer: int) -> None:
    pool, lease, pin = held
    memory = seals_of(pool)
    seal_at(memory, pool.geometry, page, layer)[field] = value
    with pytest.raises(LawBroken) as caught:
        pool.check(memory)
    assert caught.value.law is law
    lease.release()
    pin.release()


def test_a_leased_page_may_bear_an_old_seal_until_its_first_write(held: Held) -> None:
    pool, lease, pin = held
    memory = seals_of(pool)
    seal_at(memory, pool.geometry, 3)["nonce"] = 4711
    pool.check(memory)
    lease.release()
    pin.release()


def test_a_free_page_must_not_bear_a_nonce_in_force(held: Held) -> None:
    pool, lease, pin = held
    memory = seals_of(pool)
    seal_at(memory, pool.geometry, 6)["nonce"] = pool.ledger.nonce[0]
    with pytest.raises(LawBroken, match="law L3"):
        pool.check(memory)
    lease.release()
    pin.release()


def test_an_arena_of_another_shape_is_refused(pool: PagePool) -> None:
    with pytest.raises(LawBroken, match="law L10"):
        pool.check(np.zeros((pool.pages, 64), np.uint8))


def test_a_scope_has_sixteen_bytes() -> None:
    assert scope_words(Scope(bytes(range(16)))) == (0x0706050403020100, 0x0F0E0D0C0B0A0908)
    with pytest.raises(LawBroken, match="law L4"):
        scope_words(Scope(b"short"))


def test_the_ledger_stays_below_a_thousandth_of_a_real_page() -> None:
    ledger = Ledger(1000)
    assert ledger.bytes / 1000 < 0.001 * 368_640
    assert len(ledger.state_at) == len(ledger.digest_at) // 16 == 1000


@pytest.mark.parametrize(
    ("column", "index", "value", "law"),
    [("state", 3, PageState.LEASED, "L7"), ("scope", (3, 0), 0, "L4"), ("scope", (3, 1), 0, "L4"), ("ordinal", 3, 3, "L6")],
)
def test_one_wrong_page_in_a_run_is_refused(column: str, index: object, value: int, law: str) -> None:
    ledger = Ledger(8)
    ledger.state[:] = PageState.SEALED
    ledger.scope[:] = (7, 9)
    ledger.ordinal[:] = range(10, 18)
    ledger.require_sealed_run(array("Q", range(8)), (7, 9), 10)
    vars(ledger)[column][index] = value
    ledger.require_sealed_run(array("Q", range(3)), (7, 9), 10)
    with pytest.raises(LawBroken, match=f"law {law}.*page 3 "):
        ledger.require_sealed_run(array("Q", range(8)), (7, 9), 10)
