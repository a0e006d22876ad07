"""Handles give themselves back exactly once (L2); one that is lost is noticed, and its pages do not become free (L8, L12)."""

from __future__ import annotations

import gc

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.laws import Law
from kvseal.kv.handles import Handle, Lease, Pin, Ticket
from kvseal.kv.ledger import PageState
from kvseal.kv.pool import PagePool

from .conftest import ALICE


def _lease(pool: PagePool, pages: int = 2) -> Lease:
    lease = pool.reserve(pages, ALICE)
    assert lease is not None
    return lease


def _pin(pool: PagePool) -> Pin:
    lease = _lease(pool)
    pin = pool.pin(lease.stamps[:0], ALICE)
    pool.seal(lease, pin, [b"d" * 16] * 2)
    lease.release()
    return pin


def _ticket(pool: PagePool) -> Ticket:
    lease = _lease(pool)
    ticket = pool.ticket(lease.stamps)
    lease.release()
    return ticket


@pytest.mark.parametrize("make", [_lease, _pin, _ticket])
def test_a_second_release_is_an_error_and_changes_nothing(pool: PagePool, make: type[Handle]) -> None:
    handle = make(pool)
    handle.release()
    assert pool.free_pages == pool.pages
    with pytest.raises(LawBroken) as caught:
        handle.release()
    assert caught.value.law is Law.L2
    pool.check()


@pytest.mark.parametrize("make", [_lease, _pin, _ticket])
def test_with_releases_at_the_end_also_after_an_error(pool: PagePool, make: type[Handle]) -> None:
    with pytest.raises(KeyError), make(pool):
        raise KeyError
    assert pool.free_pages == pool.pages


def test_with_does_not_release_again_what_was_released_inside(pool: PagePool) -> None:
    with _lease(pool) as lease:
        assert lease.pages == 2
        lease.release()
    pool.check()


@pytest.mark.parametrize("make", [_lease, _pin, _ticket])
def test_a_lost_handle_is_noticed_and_its_pages_are_quarantined(pool: PagePool, make: type[Handle]) -> None:
    make(pool)
    gc.collect()
    with pytest.raises(LawBroken, match="1 handles were lost") as caught:
        pool.check()
    assert caught.value.law is Law.L2
    assert pool.lost_handles == 1
    assert pool.count(PageState.QUARANTINED) == 2
    pool.check()


def test_a_lost_handle_is_settled_before_the_next_reservation(pool: PagePool) -> None:
    _lease(pool, 8)
    gc.collect()
    assert pool.reserve(1, ALICE) is None
    assert pool.lost_handles == 1


def test_a_handle_without_pages_may_be_lost(pool: PagePool) -> None:
    pool.reserve(0, ALICE)
    gc.collect()
    pool.check()


def test_an_expired_ticket_cannot_be_released(pool: PagePool) -> None:
    ticket = _ticket(pool)
    ticket.expire()
    with pytest.raises(LawBroken):
        ticket.release()
    with pytest.raises(LawBroken):
        ticket.expire()


def test_a_handle_of_no_kind_cannot_be_given_back(pool: PagePool) -> None:
    with pytest.raises(NotImplementedError):
        Handle(pool).release()
