"""The manager: look first, then take; valid follows evidence; what is dropped is dropped once; what is broken is contained (L1-L13)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest

from kvseal.core.errors import BrokenSeal, LawBroken
from kvseal.core.ids import RequestId
from kvseal.core.laws import Law
from kvseal.kv.capacity import Capacity, Fits, NeverFits, Waits
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import Grant, KVManager

from .conftest import ALICE, BOB, PAGE, compute, digests_of, seals_of, serve

TOKENS = list(range(100, 140))
Make = Callable[..., KVManager]


def admit(manager: KVManager, name: str, tokens: Sequence[int], first_tokens: int, *, reuse: bool = True, reserve_pages: int = 0) -> Grant:
    grant = manager.admit(RequestId(name), ALICE, tokens, first_tokens=first_tokens, reuse=reuse, reserve_pages=reserve_pages)
    assert grant is not None
    return grant


def broken(page: int, law: Law = Law.L3) -> BrokenSeal:
    return BrokenSeal(law, page=page, ordinal=0, layer=0, check="nonce")


def check_seals(manager: KVManager) -> None:
    manager.check()  # brings `filled` of leased pages up to date
    manager.check(seals_of(manager.pool))


def pages_of(grant: Grant) -> list[int]:
    return list(grant.table.stamps[::2])


def test_a_request_from_admission_to_cache(manager: KVManager) -> None:
    grant = admit(manager, "a", TOKENS[:10], 10)
    assert (grant.cached_tokens, grant.room_tokens, grant.table.valid_tokens) == (0, 12, 0)
    compute(manager, grant, TOKENS, 10)
    check_seals(manager)
    assert manager.probe(ALICE, TOKENS) == 8, "full pages are shared while their writer runs"
    compute(manager, grant, TOKENS, 17)
    manager.drop(grant)
    check_seals(manager)
    assert manager.probe(ALICE, TOKENS) == 16, "generated tokens are cached too"
    usage = manager.usage()
    assert (usage.free, usage.leased, usage.sealed, usage.evictable, usage.total) == (12, 0, 4, 4, 16)


def test_a_hit_reads_the_same_pages_and_counts_them(manager: KVManager) -> None:
    first = serve(manager, "a", ALICE, TOKENS[:13])
    second = admit(manager, "b", TOKENS[:20], 4)
    assert second.cached_tokens == second.table.valid_tokens == 12
    assert pages_of(second)[:3] == pages_of(first)[:3]
    assert second.room_tokens == 16
    assert manager.hit_tokens == 12
    manager.check()
    manager.drop(first)
    manager.drop(second)
    manager.check()


@pytest.mark.parametrize(("length", "cached"), [(7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12)])
def test_at_least_one_token_is_left_to_compute(manager: KVManager, length: int, cached: int) -> None:
    manager.drop(serve(manager, "a", ALICE, TOKENS[:20]))
    assert manager.probe(ALICE, TOKENS[:length]) == cached
    assert admit(manager, "b", TOKENS[:length], length - cached).cached_tokens == cached


def test_probe_takes_packed_tokens_and_reads_only(manager: KVManager) -> None:
    manager.drop(serve(manager, "a", ALICE, TOKENS[:9]))
    before = manager.usage()
    assert manager.probe(ALICE, manager.pack(TOKENS)) == manager.probe(ALICE, tuple(TOKENS)) == 8
    assert manager.probe(BOB, TOKENS) == 0
    assert manager.usage() == before


def test_without_reuse_nothing_is_taken_from_the_cache(manager: KVManager) -> None:
    manager.drop(serve(manager, "a", ALICE, TOKENS[:9]))
    assert admit(manager, "b", TOKENS[:9], 9, reuse=False).cached_tokens == 0


def test_admission_is_all_or_nothing(make_manager: Make) -> None:
    manager = make_manager(4)
    running = serve(manager, "a", ALICE, TOKENS[:9])
    before = manager.usage()
    assert manager.admit(RequestId("b"), ALICE, TOKENS, first_tokens=12) is None
    assert manager.usage() == before
    hit = manager.admit(RequestId("b"), ALICE, TOKENS, first_tokens=4)
    assert hit is not None and hit.cached_tokens == 8
    manager.drop(running)
    manager.drop(hit)
    manager.check()


def test_admission_evicts_what_nobody_reads_and_not_what_it_hits(make_manager: Make) -> None:
    manager = make_manager(4)
    manager.drop(serve(manager, "a", ALICE, TOKENS[:8]))
    manager.drop(serve(manager, "b", ALICE, [7] * 8))
    assert (manager.pool.free_pages, manager.available_pages) == (0, 4)
    grant = admit(manager, "c", TOKENS, 8)
    assert (grant.cached_tokens, len(pages_of(grant)), manager.usage().evicted_total) == (8, 4, 2)
    assert list(grant.tokens) == TOKENS[:8]
    manager.check()


def test_reserve_pages_are_what_stays_available(make_manager: Make) -> None:
    manager = make_manager(4)
    manager.drop(serve(manager, "a", ALICE, TOKENS[:8]))
    for reserve, admitted in ((2, False), (1, True)):
        grant = manager.admit(RequestId("b"), ALICE, TOKENS[:9], first_tokens=1, reserve_pages=reserve)
        assert (grant is not None) == admitted, "two pages pinned and one leased of four"
    assert manager.available_pages == 1


def test_a_running_request_is_not_admitted_again(manager: KVManager) -> None:
    grant = admit(manager, "a", TOKENS, 1)
    with pytest.raises(LawBroken, match="law L11"):
        manager.admit(RequestId("a"), ALICE, TOKENS, first_tokens=1)
    manager.drop(grant)
    admit(manager, "a", TOKENS, 1)


def test_grow_is_all_or_nothing_and_evicts(make_manager: Make) -> None:
    manager = make_manager(4)
    manager.drop(serve(manager, "a", ALICE, [7] * 8))
    grant = admit(manager, "b", TOKENS[:4], 4)
    assert manager.grow(grant, 4) and grant.room_tokens == 4
    assert manager.grow(grant, 16) and grant.room_tokens == 16
    assert manager.usage().evicted_total == 2
    manager.check()
    manager.drop(grant)
    blocker, small = serve(manager, "c", ALICE, [8] * 12), admit(manager, "d", [9], 1)
    assert not manager.grow(small, 5)
    assert small.room_tokens == 4
    manager.check()
    manager.drop(blocker)
    assert manager.grow(small, 5)


def test_grow_past_the_served_context_is_our_bug(geometry: KVGeometry) -> None:
    capacity = Capacity.derive(model_context_tokens=10, pool_pages=8, page_tokens=PAGE)
    manager = KVManager(geometry, pool_pages=8, capacity=capacity, secret=b"s")
    grant = admit(manager, "a", TOKENS[:4], 4)
    assert manager.grow(grant, 10)
    with pytest.raises(LawBroken, match="law L1 "):
        manager.grow(grant, 13)


def test_the_capacity_must_be_this_pools(geometry: KVGeometry) -> None:
    for pages, size in ((9, PAGE), (8, 2 * PAGE)):
        capacity = Capacity.derive(model_context_tokens=10, pool_pages=pages, page_tokens=size)
        with pytest.raises(LawBroken, match="law L1 "):
            KVManager(geometry, pool_pages=8, capacity=capacity, secret=b"s")


@pytest.mark.parametrize(("tokens", "end", "digests", "law"), [(3, 2, 0, Law.L5), (1, 2, 0, Law.L5), (2, 2, 1, Law.L7), (5, 5, 0, Law.L7)])
def test_commit_wants_matching_counts(manager: KVManager, tokens: int, end: int, digests: int, law: Law) -> None:
    grant = admit(manager, "a", TOKENS, 8)
    with pytest.raises(LawBroken) as caught:
        manager.commit(grant, TOKENS[:tokens], end, [b"d" * 16] * digests)
    assert caught.value.law is law
    assert grant.table.valid_tokens == 0
    manager.check()


def test_commit_past_the_room_is_refused(manager: KVManager) -> None:
    grant = admit(manager, "a", TOKENS, 3)
    compute(manager, grant, TOKENS, 3)
    manager.commit(grant, TOKENS[3:4], 4, digests_of(ALICE, TOKENS, 0, 1))
    with pytest.raises(LawBroken, match="law L5 "):
        manager.commit(grant, TOKENS[4:5], 5)
    assert grant.table.valid_tokens == 4


def test_token_by_token_is_the_same_as_at_once(manager: KVManager) -> None:
    slow = admit(manager, "a", TOKENS, 1, reuse=False)
    for end in range(1, 15):
        compute(manager, slow, TOKENS, end)
        manager.check()
    assert list(slow.tokens) == TOKENS[:14]
    assert manager.probe(ALICE, TOKENS) == 12


def test_twins_become_one(manager: KVManager) -> None:
    first, second = admit(manager, "a", TOKENS, 13), admit(manager, "b", TOKENS, 13)
    other = admit(manager, "c", [*TOKENS[:8], 1, 2, 3, 4, 5], 13)
    own = pages_of(second)
    in_flight = second.table.stamps
    compute(manager, first, TOKENS, 13)
    compute(manager, second, TOKENS, 13)
    compute(manager, other, [*TOKENS[:8], 1, 2, 3, 4, 5], 13)
    assert pages_of(second) == [*pages_of(first)[:3], own[3]]
    assert pages_of(other)[:2] == pages_of(first)[:2]
    assert list(in_flight[::2]) == own
    check_seals(manager)
    assert manager.usage().sealed == 4
    for grant in (first, second, other):
        manager.drop(grant)
    manager.check()
    assert manager.probe(ALICE, TOKENS) == 12


def test_twins_that_differ_are_counted_and_not_trusted(manager: KVManager) -> None:
    first, second = admit(manager, "a", TOKENS, 12), admit(manager, "b", TOKENS, 12)
    compute(manager, first, TOKENS, 12)
    digests = digests_of(ALICE, TOKENS, 0, 3)
    manager.commit(second, TOKENS[:12], 12, [digests[0], b"another result!!", digests[2]])
    assert manager.broken_seals[Law.L13] == 1
    assert manager.probe(ALICE, TOKENS) == 4
    assert pages_of(second)[0] == pages_of(first)[0]
    assert not set(pages_of(second)[1:]) & set(pages_of(first))
    compute(manager, second, TOKENS, 17)
    assert manager.probe(ALICE, TOKENS) == 4, "what follows an untrusted page is not published"
    manager.check()
    manager.drop(first)
    manager.drop(second)
    manager.check()
    assert manager.usage().sealed == 1


def test_drop_is_exactly_once(manager: KVManager) -> None:
    grant = serve(manager, "a", ALICE, TOKENS[:6])
    manager.drop(grant)
    acts: list[Callable[[], object]] = [
        lambda: manager.drop(grant),
        lambda: manager.ticket(grant),
        lambda: manager.trim(grant, 0),
        lambda: manager.grow(grant, 30),
        lambda: manager.commit(grant, [1], 7),
    ]
    for act in acts:
        with pytest.raises(LawBroken, match="law L2 "):
            act()
    manager.check()


def test_a_lost_grant_is_noticed(manager: KVManager) -> None:
    serve(manager, "a", ALICE, TOKENS[:6])
    gc.collect()
    with pytest.raises(LawBroken, match="2 handles were lost"):
        manager.check()
    assert (manager.usage().quarantined, manager.pool.lost_handles) == (1, 2)
    manager.check()
    assert manager.available_pages == 14
    grant = admit(manager, "b", [5] * 56, 56)
    manager.drop(grant)
    assert manager.readmit("the engine is between two steps") == 1
    manager.check()


def test_a_broken_sealed_page_is_contained(manager: KVManager) -> None:
    victim, neighbour = serve(manager, "a", ALICE, TOKENS[:17]), serve(manager, "n", BOB, TOKENS[:9])
    manager.drop(serve(manager, "b", ALICE, [*TOKENS[:12], 1, 2, 3, 4, 5]))
    page = pages_of(victim)[1]
    manager.drop(victim, broken=broken(page))
    assert manager.broken_seals == {Law.L3: 1}
    assert manager.usage().quarantined == 1
    assert manager.probe(ALICE, TOKENS) == 4
    assert manager.probe(BOB, TOKENS) == 8
    manager.check()
    compute(manager, neighbour, TOKENS, 12)
    manager.drop(neighbour)
    assert manager.readmit("scrubbed") == 1
    assert manager.usage().quarantined == 0


def test_a_broken_page_with_other_readers_is_quarantined_after_them(manager: KVManager) -> None:
    victim = serve(manager, "a", ALICE, TOKENS[:9])
    reader = serve(manager, "b", ALICE, [*TOKENS[:8], 1, 2, 3, 4, 5])
    manager.drop(victim, broken=broken(pages_of(victim)[0], Law.L4))
    assert manager.probe(ALICE, TOKENS) == 0
    assert manager.usage().quarantined == 0
    compute(manager, reader, [*TOKENS[:8], 1, 2, 3, 4, 5, 6, 7, 8, 9], 16)
    assert manager.probe(ALICE, [*TOKENS[:8], 1, 2, 3, 4, 5]) == 0, "its reader publishes nothing behind it"
    manager.drop(reader)
    manager.check()
    assert manager.usage().quarantined == 1


def test_a_broken_leased_page_is_quarantined(manager: KVManager) -> None:
    grant = admit(manager, "a", TOKENS, 8)
    manager.drop(grant, broken=broken(pages_of(grant)[1], Law.L5))
    manager.check()
    assert (manager.usage().quarantined, manager.usage().free) == (1, 15)


def test_what_a_step_finds_broken_after_its_request_was_dropped_is_quarantined(manager: KVManager) -> None:
    reader, leaver, other = (serve(manager, name, scope, TOKENS[:9]) for name, scope in (("a", ALICE), ("b", ALICE), ("c", BOB)))
    shared_page, own_page, foreign_page = pages_of(leaver)[0], pages_of(leaver)[-1], pages_of(other)[0]
    ticket = manager.ticket(leaver)
    manager.drop(leaver)
    manager.drop(reader)
    manager.settle([ticket], [broken(shared_page), broken(own_page), broken(foreign_page)])
    assert manager.usage().quarantined == 2
    assert manager.probe(ALICE, TOKENS) == 0, "what was computed from the broken page is never hit again"
    assert manager.probe(BOB, TOKENS) == 8
    manager.drop(other)
    manager.check()
    assert manager.usage().quarantined == 2


def test_a_step_that_finds_nothing_broken_frees_what_was_dropped(manager: KVManager) -> None:
    grant = admit(manager, "a", TOKENS, 8)
    ticket = manager.ticket(grant)
    manager.drop(grant)
    assert manager.usage().draining == 2
    manager.settle([ticket], [])
    assert manager.usage().free == 16
    manager.check()


def test_a_stale_stamp_does_not_put_somebody_elses_page_out_of_use(manager: KVManager) -> None:
    victim, other = serve(manager, "a", ALICE, TOKENS[:9]), serve(manager, "b", BOB, TOKENS[:9])
    manager.drop(victim, broken=broken(pages_of(other)[0]))
    assert manager.usage().quarantined == 0
    assert manager.probe(BOB, TOKENS) == 8
    assert manager.broken_seals[Law.L3] == 1
    manager.drop(other)
    manager.check()


def test_a_step_in_flight_keeps_pages_from_being_reused(make_manager: Make) -> None:
    manager = make_manager(4)
    grant = serve(manager, "a", ALICE, TOKENS[:14])
    step = manager.ticket(grant)
    manager.drop(grant)
    usage = manager.usage()
    assert (usage.free, usage.draining, usage.evictable) == (0, 1, 0)
    assert manager.admit(RequestId("b"), BOB, TOKENS, first_tokens=1) is None
    step.release()
    assert manager.available_pages == 4
    second = manager.admit(RequestId("b"), BOB, TOKENS, first_tokens=16)
    assert second is not None
    manager.drop(second)
    manager.check()


def test_a_step_that_never_proves_its_end_costs_its_pages(make_manager: Make) -> None:
    manager = make_manager(4)
    grant = serve(manager, "a", ALICE, TOKENS[:10])
    step = manager.ticket(grant)
    manager.drop(grant)
    step.expire()
    assert (manager.usage().quarantined, manager.available_pages) == (1, 1)
    manager.check()


def test_purge_makes_a_scope_forget(manager: KVManager) -> None:
    running = serve(manager, "a", ALICE, TOKENS[:9])
    manager.drop(serve(manager, "b", BOB, TOKENS[:9]))
    assert manager.purge(ALICE) == 2
    assert (manager.probe(ALICE, TOKENS), manager.probe(BOB, TOKENS)) == (0, 8)
    compute(manager, running, TOKENS, 17)
    assert manager.probe(ALICE, TOKENS) == 0, "a run whose start was forgotten is not published"
    manager.drop(running)
    manager.check()
    assert manager.usage().sealed == 2


@pytest.mark.parametrize(("cut", "valid", "pages"), [(14, 14, 4), (13, 12, 3), (12, 12, 3), (5, 4, 1), (3, 0, 0), (0, 0, 0)])
def test_trim_means_gone(manager: KVManager, cut: int, valid: int, pages: int) -> None:
    grant = serve(manager, "a", ALICE, TOKENS[:14])
    assert manager.trim(grant, cut) == valid
    assert (grant.table.valid_tokens, grant.table.pages, len(grant.tokens)) == (valid, pages, valid)
    manager.check()
    other = [*TOKENS[:valid], *range(900, 920)]
    compute(manager, grant, other, 18)
    check_seals(manager)
    assert manager.probe(ALICE, other) == 16
    assert manager.probe(ALICE, TOKENS) == 12
    manager.drop(grant)
    manager.check()


def test_the_verdict_counts_what_is_there(make_manager: Make) -> None:
    manager = make_manager(4)
    grant = serve(manager, "a", ALICE, TOKENS[:8])
    assert manager.verdict(7, 1) == Fits(2)
    assert manager.verdict(8, 1) == Waits(3, 2)
    assert isinstance(manager.verdict(16, 1), NeverFits)
    manager.drop(grant, broken=broken(pages_of(grant)[0]))
    assert manager.verdict(11, 1) == Fits(3)
    assert isinstance(manager.verdict(12, 1), NeverFits)


def test_wipe_is_told_of_every_page_that_becomes_free(make_manager: Make) -> None:
    wiped: list[int] = []
    manager = make_manager(4, wipe=wiped.extend)
    grant = serve(manager, "a", ALICE, TOKENS[:10])
    pages = pages_of(grant)
    manager.drop(grant)
    assert wiped == pages[2:]
    manager.purge(ALICE)
    assert sorted(wiped) == sorted(pages)


@pytest.mark.parametrize("method", ["admit", "grow"])
def test_a_wrong_count_of_available_pages_is_caught(manager: KVManager, method: str) -> None:
    grant = admit(manager, "a", TOKENS, 40)
    admit(manager, "c", TOKENS, 24)
    manager.pool.evictable_pages = 10
    with pytest.raises(LawBroken, match="counted as available"):
        if method == "admit":
            manager.admit(RequestId("b"), ALICE, TOKENS, first_tokens=40)
        else:
            manager.grow(grant, 44)


@pytest.mark.parametrize(
    ("damage", "law"),
    [("foreign page", Law.L4), ("order", Law.L6), ("length", Law.L5), ("holder", Law.L4), ("pins", Law.L2)],
)
def test_check_finds_a_table_that_its_grant_does_not_hold(manager: KVManager, damage: str, law: Law) -> None:
    grant, other = serve(manager, "a", ALICE, TOKENS[:8]), serve(manager, "b", BOB, TOKENS[:10])
    assert manager.grow(grant, 10)
    if damage == "foreign page":
        grant.table.stamps[-2:] = other.table.stamps[-2:]
    elif damage == "order":
        grant.table.stamps[:4] = grant.pin.stamps[:4] = grant.table.stamps[2:4] + grant.table.stamps[:2]
    elif damage == "length":
        grant.tokens.append(5)
    elif damage == "holder":
        grant.lease.holder = other.lease.holder
    else:
        manager.pool.ledger.pins[pages_of(grant)[1]] = 0
        manager.pool.evictable_pages += 1
        node = manager.cache.tree.home(pages_of(grant)[1])
        assert node is not None
        manager.cache._queue(node)
    with pytest.raises(LawBroken) as caught:
        manager.check()
    assert caught.value.law is law


def test_growing_many_is_all_or_nothing_and_stays_within_the_context(manager: KVManager) -> None:
    one, two = (serve(manager, name, scope, TOKENS[:4]) for name, scope in (("a", ALICE), ("b", BOB)))
    inside = serve(manager, "c", ALICE, TOKENS[:6])
    before = manager.usage()
    assert manager.grow_each([inside]) and manager.usage() == before, "it has room"
    rest = manager.pool.reserve(manager.pool.free_pages - 1, ALICE)
    assert rest is not None
    assert not manager.grow_each([one, inside, two]) and manager.usage().free == 1 and one.room_tokens == two.room_tokens == 4
    rest.release()
    assert manager.grow_each([one, inside, two]) and (one.room_tokens, inside.room_tokens, two.room_tokens) == (8, 8, 8)
    for grant in (one, two, inside):
        manager.drop(grant)
    with pytest.raises(LawBroken, match="law L2 "):
        manager.grow_each([one])
    manager.check()


def test_committing_many_refuses_what_was_not_computed(manager: KVManager) -> None:
    one, two = (serve(manager, name, scope, TOKENS[:6]) for name, scope in (("a", ALICE), ("b", BOB)))
    manager.commit_each([one, two], [6, 6], [TOKENS[6]] * 2, [(), ()])
    assert (one.table.valid_tokens, two.table.valid_tokens) == (7, 7)
    for start, digests, law in ((6, (), "L5"), (8, (), "L5"), (7, (), "L7"), (7, (b"d" * 16,) * 2, "L7")):
        with pytest.raises(LawBroken, match=f"law {law} "):
            manager.commit_each([one], [start], [TOKENS[7]], [digests])
    manager.commit_each([one, two], [7, 7], [TOKENS[7]] * 2, [tuple(digests_of(scope, TOKENS, 1, 2)) for scope in (ALICE, BOB)])
    assert one.pin.pages == two.pin.pages == 2 and manager.probe(ALICE, TOKENS[:9]) == 8
    manager.drop(one)
    with pytest.raises(LawBroken, match="law L2 "):
        manager.commit_each([one], [8], [1], [()])
    manager.drop(two)
    manager.check()
