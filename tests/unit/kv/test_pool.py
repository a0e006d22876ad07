"""The pool's transitions: all or nothing, every stamp compared, nothing free that is in flight (L2-L8)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.laws import Law
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.handles import Lease, Pin
from kvseal.kv.ledger import PageState
from kvseal.kv.pool import PagePool, QuietProof

from .conftest import ALICE, BOB

DIGEST = b"d" * 16


def leased(pool: PagePool, pages: int) -> Lease:
    lease = pool.reserve(pages, ALICE)
    assert lease is not None
    return lease


def sealed(pool: PagePool, pages: int, *, cached: bool = False) -> Pin:
    """Pages sealed by a lease that has ended, held by the pin alone."""
    with leased(pool, pages) as lease:
        pin = pool.pin(array("Q"), ALICE)
        pool.seal(lease, pin, [DIGEST] * pages)
    if cached:
        pool.enter_cache(pin.stamps)
    return pin


def states(pool: PagePool) -> list[int]:
    pool.check()
    return [pool.count(state) for state in PageState]


def breaks(law: Law) -> pytest.RaisesExc[LawBroken]:
    return pytest.raises(LawBroken, match=f"law {law} ")


def test_reserve_is_all_or_nothing(pool: PagePool) -> None:
    with leased(pool, 5):
        assert pool.reserve(4, ALICE) is None
        assert states(pool) == [3, 5, 0, 0, 0]
    assert states(pool) == [8, 0, 0, 0, 0]


def test_extend_is_all_or_nothing_and_continues_the_ordinals(pool: PagePool) -> None:
    with leased(pool, 2) as lease:
        assert pool.extend(lease, 7) is None
        fresh = pool.extend(lease, 3)
        assert fresh is not None
        assert lease.stamps[4:] == fresh
        assert [pool.ledger.ordinal[page] for page in lease.stamps[::2]] == [0, 1, 2, 3, 4]


def test_every_hand_out_has_a_new_nonce(pool: PagePool) -> None:
    seen: set[int] = set()
    for _ in range(50):
        with leased(pool, 8) as lease:
            nonces = set(lease.stamps[1::2])
            assert not seen & nonces
            seen |= nonces
    assert len(seen) == 400
    assert not pool.ledger.nonce.any()


def test_a_stamp_is_worthless_after_its_page_went_back(pool: PagePool) -> None:
    pin = sealed(pool, 1)
    stale = pin.stamps[:]
    pin.release()
    for use in (pool.ticket, lambda stamps: pool.pin(stamps, ALICE)):
        with breaks(Law.L3):
            use(stale)
    with leased(pool, 8), breaks(Law.L3):
        pool.pin(stale, ALICE)
    assert states(pool)[0] == 8


@pytest.mark.parametrize("stamp", [(3, 0), (8, 1), (2**40, 5), (0, 12345)])
def test_a_stamp_from_nowhere_is_refused(pool: PagePool, stamp: tuple[int, int]) -> None:
    with breaks(Law.L3):
        pool.ticket(stamp)


def test_commit_moves_filled_forward_within_the_page_and_for_the_holder_alone(pool: PagePool) -> None:
    with leased(pool, 1) as lease, leased(pool, 1) as other:
        page = lease.stamps[0]
        pool.commit(lease, page, 3)
        for filled in (2, 5):
            with breaks(Law.L5):
                pool.commit(lease, page, filled)
        with breaks(Law.L4):
            pool.commit(other, page, 4)
        assert pool.ledger.filled[page] == 3


def test_seal_hands_the_first_pages_to_the_pin(pool: PagePool) -> None:
    lease, pin = leased(pool, 3), pool.pin(array("Q"), ALICE)
    given = lease.stamps[:4]
    assert pool.seal(lease, pin, [DIGEST, b"e" * 16]) == given
    assert (pin.stamps, lease.pages) == (given, 1)
    assert [pool.digest(page) for page in given[::2]] == [DIGEST, b"e" * 16]
    assert states(pool) == [5, 1, 2, 0, 0]
    lease.release()
    assert states(pool) == [6, 0, 2, 0, 0]
    pin.release()
    assert states(pool) == [8, 0, 0, 0, 0]


def test_seal_wants_a_digest_per_leased_page_and_one_scope(pool: PagePool) -> None:
    with leased(pool, 1) as lease, pool.pin(array("Q"), ALICE) as pin, pool.pin(array("Q"), BOB) as foreign:
        for digests, reader in (([b"short"], pin), ([DIGEST] * 2, pin), ([DIGEST], foreign)):
            with breaks(Law.L7):
                pool.seal(lease, reader, digests)
        assert lease.pages == 1


def test_released_handles_cannot_be_used(pool: PagePool) -> None:
    lease, pin = leased(pool, 1), pool.pin(array("Q"), ALICE)
    lease.release()
    with breaks(Law.L2):
        pool.extend(lease, 1)
    with breaks(Law.L2):
        pool.seal(lease, pin, [DIGEST])
    with breaks(Law.L2):
        pool.give_up(lease, 0, 0)
    pin.release()
    with breaks(Law.L2):
        pool.unpin_tail(pin, 0)
    with leased(pool, 1) as open_lease:
        with breaks(Law.L2):
            pool.seal(open_lease, pin, [DIGEST])
        with breaks(Law.L2):
            pool.replace_pins(pin, 0, array("Q"))


def test_pin_takes_sealed_pages_of_its_scope_in_order_only(pool: PagePool) -> None:
    pin = sealed(pool, 2)
    stamps = pin.stamps[:]
    with breaks(Law.L4):
        pool.pin(stamps, BOB)
    with breaks(Law.L6):
        pool.pin(stamps[2:], ALICE)
    with leased(pool, 1) as lease, breaks(Law.L7):
        pool.pin(lease.stamps, ALICE)
    with pool.pin(stamps, ALICE):
        pin.release()
        assert states(pool)[2] == 2
    assert states(pool)[2] == 0


def test_scopes_that_share_half_their_bytes_are_different(pool: PagePool) -> None:
    pin = sealed(pool, 1)
    for near in (ALICE[:8] + BOB[8:], BOB[:8] + ALICE[8:]):
        with breaks(Law.L4):
            pool.pin(pin.stamps, type(ALICE)(near))
    pin.release()


def test_a_cached_page_outlives_its_pins_and_is_evictable(pool: PagePool) -> None:
    pin = sealed(pool, 2, cached=True)
    stamps = pin.stamps[:]
    assert (pool.evictable_pages, pool.evictable_among(stamps)) == (0, 0)
    pin.release()
    assert (pool.evictable_pages, pool.evictable_among(stamps)) == (2, 2)
    with pool.pin(stamps[:2], ALICE):
        assert pool.evictable_pages == 1
        pool.leave_cache(stamps)
        assert states(pool) == [7, 0, 1, 0, 0]
    assert states(pool) == [8, 0, 0, 0, 0]


def test_the_cache_takes_and_gives_a_page_once(pool: PagePool) -> None:
    pin = sealed(pool, 1, cached=True)
    with breaks(Law.L2):
        pool.enter_cache(pin.stamps)
    pool.leave_cache(pin.stamps)
    with breaks(Law.L2):
        pool.leave_cache(pin.stamps)
    pool.ledger.pins[pin.stamps[0]] = 0
    with breaks(Law.L2):
        pool.enter_cache(pin.stamps)
    pool.ledger.pins[pin.stamps[0]] = 1
    pin.release()


def test_replace_pins_gives_the_old_pages_back(pool: PagePool) -> None:
    first, second = sealed(pool, 2, cached=True), sealed(pool, 2)
    twins = first.stamps[:]
    first.release()
    pool.replace_pins(second, 0, twins[:2])
    assert second.stamps[:2] == twins[:2]
    assert states(pool) == [5, 0, 3, 0, 0]
    second.release()
    assert states(pool) == [6, 0, 2, 0, 0]


def test_give_up_and_unpin_tail_keep_the_front(pool: PagePool) -> None:
    lease, pin = leased(pool, 4), sealed(pool, 3)
    kept, gone = lease.stamps[:2], pin.stamps[2:]
    pool.give_up(lease, 1, 1)
    assert (lease.stamps, lease.next_ordinal) == (kept, 1)
    assert pool.unpin_tail(pin, 1) == gone
    assert states(pool) == [6, 1, 1, 0, 0]
    lease.release()
    pin.release()


def test_a_page_given_back_in_another_state_is_an_error(pool: PagePool) -> None:
    pin = sealed(pool, 1)
    thief = leased(pool, 1)
    own = thief.stamps[:]
    thief.stamps[:] = pin.stamps
    with breaks(Law.L2):
        thief.release()
    thief.open, thief.stamps[:] = True, own
    thief.release()
    pin.release()
    pool.check()


def test_more_unpins_than_pins_are_an_error(pool: PagePool) -> None:
    pin = sealed(pool, 1, cached=True)
    twice = pool.pin(array("Q"), ALICE)
    twice.stamps.extend(pin.stamps)
    pin.release()
    with breaks(Law.L2):
        twice.release()


def test_pages_with_tickets_drain(pool: PagePool) -> None:
    lease = leased(pool, 2)
    first, second = pool.ticket(lease.stamps), pool.ticket(lease.stamps[:2])
    lease.release()
    assert states(pool) == [6, 0, 0, 2, 0]
    first.release()
    assert states(pool) == [7, 0, 0, 1, 0]
    second.release()
    assert states(pool) == [8, 0, 0, 0, 0]


def test_a_ticket_keeps_a_cached_page_from_being_evictable(pool: PagePool) -> None:
    pin = sealed(pool, 1, cached=True)
    stamps = pin.stamps[:]
    pin.release()
    with pool.ticket(stamps):
        assert pool.evictable_pages == 0
    assert pool.evictable_pages == 1
    with pool.ticket(stamps):
        pool.leave_cache(stamps)
        assert states(pool) == [7, 0, 0, 1, 0]
    assert states(pool) == [8, 0, 0, 0, 0]


def test_a_timeout_leads_to_quarantine_at_once_when_draining(pool: PagePool) -> None:
    lease = leased(pool, 1)
    ticket = pool.ticket(lease.stamps)
    lease.release()
    ticket.expire()
    assert states(pool) == [7, 0, 0, 0, 1]


def test_a_timeout_leads_to_quarantine_later_when_held(pool: PagePool) -> None:
    pin = sealed(pool, 1)
    pool.ticket(pin.stamps).expire()
    assert states(pool) == [7, 0, 1, 0, 0]
    pin.release()
    assert states(pool) == [7, 0, 0, 0, 1]


def test_doomed_pages_are_not_counted_as_evictable(pool: PagePool) -> None:
    pin = sealed(pool, 1, cached=True)
    page, stamps = pin.stamps[0], pin.stamps[:]
    pin.release()
    pool.doom(page)
    assert pool.evictable_pages == 0
    pool.leave_cache(stamps)
    assert states(pool) == [7, 0, 0, 0, 1]


def test_quarantine_is_left_with_proof_only(pool: PagePool) -> None:
    lease = leased(pool, 2)
    pool.doom(lease.stamps[0])
    pool.doom(lease.stamps[2])
    ticket = pool.ticket(lease.stamps[:2])
    with breaks(Law.L8):
        pool.readmit(QuietProof(lease.stamps, "too early"))
    stamps = lease.stamps[:]
    lease.release()
    assert pool.quarantined() == stamps[2:], "a page with a ticket is not proven quiet"
    for proof in (QuietProof(stamps[:2], "in flight"), QuietProof(stamps[2:], ""), QuietProof(stamps[2:] * 2, "twice")):
        with breaks(Law.L8):
            pool.readmit(proof)
    ticket.release()
    with breaks(Law.L3):
        pool.readmit(QuietProof([stamps[0], stamps[1] ^ 1], "another hand-out"))
    assert pool.readmit(QuietProof(pool.quarantined(), "fence 7")) == 2
    assert states(pool) == [8, 0, 0, 0, 0]
    with leased(pool, 8):
        pass
    assert states(pool) == [8, 0, 0, 0, 0], "the mark does not outlive the quarantine"


def test_wipe_sees_every_page_that_goes_back_to_free_and_no_other(geometry: KVGeometry) -> None:
    wiped: list[int] = []

    def wipe(pages: Sequence[int]) -> None:
        assert not any(pool.ledger.state[page] == PageState.FREE for page in pages)
        wiped.extend(pages)

    pool = PagePool(geometry, 4, secret=b"s", wipe=wipe)
    lease = leased(pool, 4)
    pages = list(lease.stamps[::2])
    pool.doom(pages[0])
    ticket = pool.ticket(lease.stamps[2:4])
    lease.release()
    assert wiped == pages[2:]
    ticket.release()
    assert wiped == [*pages[2:], pages[1]]


def test_one_page_is_taken_only_where_one_is_free(pool: PagePool) -> None:
    with leased(pool, 8) as lease, breaks(Law.L2):
        pool.extend_one(lease)
    assert states(pool) == [8, 0, 0, 0, 0]


def test_one_page_is_sealed_by_open_handles_whole_and_of_one_scope(pool: PagePool) -> None:
    pin, other = pool.pin(array("Q"), ALICE), pool.pin(array("Q"), BOB)
    with leased(pool, 2) as lease:
        for reader, digest in ((other, DIGEST), (pin, b"short")):
            with breaks(Law.L7):
                pool.seal_one(lease, reader, digest)
        other.release()
        with breaks(Law.L2):
            pool.seal_one(lease, other, DIGEST)
        nonce, lease.stamps[1] = lease.stamps[1], 5
        with breaks(Law.L3):
            pool.seal_one(lease, pin, DIGEST)
        lease.stamps[1] = nonce
        page, _ = pool.seal_one(lease, pin, DIGEST)
        assert states(pool) == [6, 1, 1, 0, 0] and pool.digest(page) == DIGEST
    pin.release()


def test_one_page_enters_the_cache_in_its_scope_behind_its_parent(pool: PagePool) -> None:
    pin = sealed(pool, 1, cached=True)
    parent, ledger = pin.stamps[0], pool.ledger
    lease = pool.reserve(2, ALICE, first_ordinal=1)
    assert lease is not None
    page = lease.stamps[0]
    word = int(ledger.scope[page, 1])
    ledger.scope[page, 1] = 3
    with breaks(Law.L4):
        pool.seal_one(lease, pin, DIGEST, parent)
    ledger.scope[page, 1], ledger.ordinal[page] = word, 4
    with breaks(Law.L6):
        pool.seal_one(lease, pin, DIGEST, parent)
    ledger.ordinal[page] = 1
    assert pool.seal_one(lease, pin, DIGEST, parent)[0] == page and ledger.cached[page]
    lease.release()
    pin.release()
    assert states(pool) == [6, 0, 2, 0, 0] and pool.evictable_pages == 2


def test_long_runs_are_refused_like_short_ones() -> None:
    """More pages than are looked at one by one."""
    pool = PagePool(KVGeometry(layers=1, kv_heads=1, head_dim=4, page_tokens=4), 64, secret=b"long runs")
    pin = sealed(pool, 40, cached=True)
    words, good = pin.scope_words, array("Q", pin.stamps)
    pool.require_sealed(good, words, 0)
    for place, value, law in ((0, 9_999, Law.L3), (31, 5, Law.L3), (31, 0, Law.L3)):
        bad = array("Q", good)
        bad[place] = value
        with breaks(law):
            pool.require_sealed(bad, words, 0)
    for first, scope, law in ((1, words, Law.L6), (0, (words[0], 1), Law.L4)):
        with breaks(law):
            pool.require_sealed(good, scope, first)
    with breaks(Law.L2):
        pool.enter_cache(good)
    pin.release()
