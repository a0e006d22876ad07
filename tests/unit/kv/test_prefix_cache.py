"""The prefix cache: looking changes nothing, only sealed pages enter, eviction takes the ends that were used longest ago (L4, L7, L12)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.kv.handles import Pin
from kvseal.kv.ledger import PageState
from kvseal.kv.pool import PagePool
from kvseal.kv.prefix_cache import PrefixCache
from kvseal.kv.prefix_key import PackedTokens, pack_tokens

from .conftest import ALICE, BOB, PAGE


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    return PrefixCache(pool)


def run(*letters: int) -> PackedTokens:
    return pack_tokens([letter for letter in letters for _ in range(PAGE)])


def publish(pool: PagePool, cache: PrefixCache, *letters: int, after: Sequence[int] = (), scope: Scope = ALICE) -> Pin:
    """Seals one page per letter behind the cached run `after` and publishes them; the pin holds the whole path."""
    hit = cache.probe(scope, run(*after, 0))
    assert len(hit) == 2 * len(after)
    pin = cache.pin(scope, hit)
    lease = pool.reserve(len(letters), scope, first_ordinal=len(after))
    assert lease is not None
    with lease:
        sealed = pool.seal(lease, pin, [b"d" * 16] * len(letters))
    assert not cache.publish(pin, hit[-2] if hit else None, run(*letters).data, sealed)
    return pin


def end(cache: PrefixCache, pin: Pin) -> None:
    pin.release()
    cache.unpinned(pin.stamps)
    cache.check()


def cached(cache: PrefixCache, *letters: int) -> int:
    cache.check()
    return len(cache.probe(ALICE, run(*letters, 0))) // 2


def test_probe_never_offers_the_last_token(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 1, 2))
    tokens = [1] * PAGE + [2] * PAGE + [3]
    offered = [len(cache.probe(ALICE, pack_tokens(tokens[:count]))) // 2 for count in range(1, 10)]
    assert offered == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_probe_changes_nothing_not_even_the_order(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 1))
    end(cache, publish(pool, cache, 2))
    for _ in range(3):
        assert cached(cache, 1) == 1
    assert cache.evict(1) == 1
    assert (cached(cache, 1), cached(cache, 2)) == (0, 1)


def test_a_pin_is_a_use(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 1))
    end(cache, publish(pool, cache, 2))
    end(cache, cache.pin(ALICE, cache.probe(ALICE, run(1, 0))))
    assert cache.evict(1) == 1
    assert (cached(cache, 1), cached(cache, 2)) == (1, 0)


def test_only_sealed_pages_in_their_place_and_scope_enter(pool: PagePool, cache: PrefixCache) -> None:
    with pool.reserve(1, ALICE) as lease, pool.pin(array("Q"), ALICE) as pin, pytest.raises(LawBroken, match="law L7 "):
        cache.publish(pin, None, run(1).data, lease.stamps)
    pin = publish(pool, cache, 1)
    with pool.pin(array("Q"), BOB) as foreign, pytest.raises(LawBroken, match="law L4 "):
        cache.publish(foreign, None, run(1).data, pin.stamps)
    with pytest.raises(LawBroken, match="law L6 "):
        cache.publish(pin, pin.stamps[0], run(1).data, pin.stamps)
    assert cached(cache, 1) == 1
    end(cache, pin)


def test_eviction_takes_from_the_end_of_the_oldest_leaf(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 1, 2, 3))
    end(cache, publish(pool, cache, 4, 5))
    assert cache.evict(2) == 2
    assert (cached(cache, 1, 2, 3), cached(cache, 4, 5)) == (1, 2)
    assert cache.evict(2) == 2
    assert (cached(cache, 1), cached(cache, 4, 5)) == (0, 1)
    assert cache.evict(9) == 1
    assert (cache.evicted_pages, pool.free_pages, cache.tree.scopes) == (5, 8, 0)
    assert cache.evict(1) == 0


def test_a_parent_becomes_a_leaf_when_its_children_are_gone(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 1))
    for letter in (2, 3):
        end(cache, publish(pool, cache, letter, after=[1]))
    assert cache.evict(3) == 3
    assert pool.free_pages == 8


def test_pinned_ends_stay_and_come_back_when_unpinned(pool: PagePool, cache: PrefixCache) -> None:
    long = publish(pool, cache, 1, 2, 3)
    short = cache.pin(ALICE, cache.probe(ALICE, run(1, 0)))
    assert cache.evict(9) == 0
    end(cache, long)
    assert cache.evict(9) == 2
    assert cached(cache, 1, 2) == 1
    end(cache, short)
    assert cache.evict(9) == 1


def test_a_pinned_end_in_the_order_is_passed_over(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 1))
    pin = cache.pin(ALICE, cache.probe(ALICE, run(1, 0)))
    assert cache.evict(1) == 0
    end(cache, pin)
    assert cache.evict(1) == 1


def test_an_end_in_flight_is_passed_over_and_kept_in_the_order(pool: PagePool, cache: PrefixCache) -> None:
    pin = publish(pool, cache, 1)
    stamps = pin.stamps[:]
    end(cache, pin)
    with pool.ticket(stamps):
        assert cache.evict(1) == 0
        cache.check()
    assert cache.evict(1) == 1


def test_a_doomed_end_is_evicted_without_being_counted_as_freed(pool: PagePool, cache: PrefixCache) -> None:
    pin = publish(pool, cache, 1, 2)
    pool.doom(pin.stamps[2])
    end(cache, pin)
    assert pool.evictable_pages == 1
    assert cache.evict(1) == 1
    assert pool.count(PageState.QUARANTINED) == 1


def test_forget_takes_everything_computed_from_a_page(pool: PagePool, cache: PrefixCache) -> None:
    stem = publish(pool, cache, 1, 2)
    end(cache, publish(pool, cache, 3, after=[1, 2]))
    end(cache, publish(pool, cache, 4, after=[1]))
    page = stem.stamps[2]
    assert cache.forget(page) == 2
    assert cache.forget(page) == 0
    assert not cache.holds(page)
    assert cached(cache, 1, 2) == 1
    assert cached(cache, 1, 4) == 2
    end(cache, stem)
    assert pool.free_pages == 6
    first = cache.probe(ALICE, run(1, 0))[0]
    assert cache.forget(first) == 2
    assert pool.free_pages == 8


def test_forget_leaves_the_rest_of_a_run_within_reach_of_eviction(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 1))
    end(cache, publish(pool, cache, 2, after=[1]))
    end(cache, publish(pool, cache, 3, after=[1]))
    for letter in (2, 3):
        cache.forget(cache.probe(ALICE, run(1, letter, 0))[2])
    assert cache.evict(1) == 1


def test_purge_forgets_one_scope_and_nothing_else(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 1, 2))
    end(cache, publish(pool, cache, 1, scope=BOB))
    reader = cache.pin(ALICE, cache.probe(ALICE, run(1, 0)))
    assert cache.purge(ALICE) == 2
    assert cached(cache, 1) == 0
    assert len(cache.probe(BOB, run(1, 0))) == 2
    assert pool.count(PageState.SEALED) == 2, "what is being read stays until it is not"
    end(cache, reader)
    assert pool.count(PageState.SEALED) == 1


def test_the_order_does_not_grow_with_what_was_purged(pool: PagePool, cache: PrefixCache) -> None:
    end(cache, publish(pool, cache, 9, scope=BOB))
    for letter in range(200):
        end(cache, publish(pool, cache, letter))
        cache.purge(ALICE)
    assert len(cache._order) <= 70
    assert cache.evict(1) == 1


def test_a_pin_on_nothing_is_no_use(cache: PrefixCache) -> None:
    end(cache, cache.pin(ALICE, array("Q")))


@pytest.mark.parametrize("damage", ["nonce", "order", "ledger", "path"])
def test_check_finds_damage(pool: PagePool, cache: PrefixCache, damage: str) -> None:
    pin = publish(pool, cache, 1, 2)
    page = pin.stamps[0]
    end(cache, pin)
    node = cache.tree.home(page)
    assert node is not None
    if damage == "nonce":
        node.stamps[1] ^= 1
    elif damage == "order":
        node.queued = False
    elif damage == "path":
        pool.ledger.pins[node.stamps[2]] = 1
    else:
        pool.ledger.cached[7] = 1
    with pytest.raises(LawBroken):
        cache.check()
