"""How cost grows, counted in executed lines of `kvseal.kv` instead of time, so that the answer is the same on every machine.

Time, with the constants, is measured by `kvseal bench growth`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import pytest

from kvseal.core.ids import RequestId
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import Grant, KVManager

from .conftest import ALICE, BOB, PAGE

RUN_PAGES = 4


def lines(act: Callable[[], object]) -> int:
    """Executed lines of the cache's own Python."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        if "/kvseal/kv/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def prompt(pages: int, seed: int) -> list[int]:
    """One token more than these pages hold."""
    return [seed, *range(1, pages * PAGE), 0]


def finished(manager: KVManager, name: str, tokens: Sequence[int]) -> None:
    grant = taken(manager, name, tokens)
    start = grant.table.valid_tokens
    manager.commit(grant, tokens[start:], len(tokens), [b"d" * 16] * (len(tokens) // PAGE - start // PAGE))
    manager.drop(grant)


def taken(manager: KVManager, name: str, tokens: Sequence[int]) -> Grant:
    grant = manager.admit(RequestId(name), ALICE, tokens, first_tokens=len(tokens) - manager.probe(ALICE, tokens))
    assert grant is not None
    return grant


def forget(manager: KVManager, tokens: Sequence[int]) -> None:
    manager.cache.forget(manager.cache.probe(ALICE, manager.pack(tokens))[0])


def filled(geometry: KVGeometry, pages: int, room: int = 200) -> KVManager:
    """A cache with so many pages in runs that start differently, and room beside them."""
    capacity = Capacity.derive(model_context_tokens=10**6, pool_pages=pages + room, page_tokens=PAGE)
    manager = KVManager(geometry, pool_pages=pages + room, capacity=capacity, secret=b"s")
    for index in range(pages // RUN_PAGES):
        finished(manager, f"fill {index}", prompt(RUN_PAGES, 1000 + index))
    assert manager.cache.tree.pages == pages
    return manager


@pytest.fixture(scope="module")
def caches() -> tuple[KVManager, KVManager]:
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=8, page_tokens=PAGE)
    return filled(geometry, 40), filled(geometry, 4000)


def one_page(manager: KVManager) -> int:
    def act() -> None:
        lease = manager.pool.reserve(1, ALICE)
        assert lease is not None
        lease.release()

    return lines(act)


def admit_and_drop(manager: KVManager, tokens: Sequence[int]) -> int:
    return lines(lambda: manager.drop(taken(manager, "x", tokens)))


def hit(manager: KVManager) -> int:
    finished(manager, "warm", prompt(20, 1))
    return admit_and_drop(manager, prompt(20, 1))


def miss(manager: KVManager) -> int:
    return admit_and_drop(manager, prompt(20, 2))


def insert_and_split(manager: KVManager) -> int:
    """Publishes a run that leaves a cached one in its middle."""
    finished(manager, "stem", prompt(20, 3))
    branch = [*prompt(20, 3)[: 10 * PAGE], *[7] * (10 * PAGE + 1)]
    cost = lines(lambda: finished(manager, "branch", branch))
    forget(manager, branch)
    return cost


def refused(manager: KVManager) -> int:
    tokens = [5] * (PAGE * (manager.pool.pages + 1))
    packed = manager.pack(tokens)
    return lines(lambda: manager.admit(RequestId("huge"), BOB, packed, first_tokens=len(tokens)))


def purge_of_nothing(manager: KVManager) -> int:
    return lines(lambda: manager.purge(BOB))


@pytest.mark.parametrize("operation", [one_page, hit, miss, insert_and_split, refused, purge_of_nothing])
def test_cost_does_not_depend_on_the_size_of_pool_or_tree(
    caches: tuple[KVManager, KVManager], operation: Callable[[KVManager], int]
) -> None:
    small, large = (operation(manager) for manager in caches)
    assert small > 0
    assert large <= 1.05 * small + 30, "30: a batch of nonces may fall due"


def test_evicting_one_page_does_not_scan(caches: tuple[KVManager, KVManager]) -> None:
    small, large = (max(lines(lambda kv=manager: kv.cache.evict(1)) for _ in range(8)) for manager in caches)
    assert large <= small + 10


def test_evicting_passes_a_pinned_leaf_once(caches: tuple[KVManager, KVManager]) -> None:
    """What is read is met at most once, however often pages run short."""
    _, large = caches
    readers = [taken(large, f"reader {index}", prompt(RUN_PAGES, 1100 + index)) for index in range(50)]
    large.cache.evict(large.pool.evictable_pages - 8)
    assert max(lines(lambda: large.cache.evict(1)) for _ in range(4)) < 100
    for grant in readers:
        large.drop(grant)


@pytest.mark.parametrize("part", ["admit", "commit", "drop", "hit"])
def test_a_prompt_costs_as_much_per_page_when_it_is_long(caches: tuple[KVManager, KVManager], part: str) -> None:
    def cost(pages: int, seed: int) -> int:
        manager, tokens, held = caches[0], prompt(pages, seed), list[Grant]()
        costs = {"admit": lines(lambda: held.append(taken(manager, "y", tokens)))}
        digests = [b"d" * 16] * pages
        costs["commit"] = lines(lambda: manager.commit(held[0], tokens, len(tokens), digests))
        costs["drop"] = lines(lambda: manager.drop(held[0]))
        costs["hit"] = lines(lambda: manager.drop(taken(manager, "z", tokens)))
        forget(manager, tokens)
        return costs[part]

    assert cost(160, 11) / cost(20, 12) < 9, "eight times as many pages"


def test_a_token_inside_a_page_costs_a_handful_of_lines_at_any_length(caches: tuple[KVManager, KVManager]) -> None:
    manager = caches[1]

    def cost(pages: int) -> int:
        tokens = prompt(pages, 21)
        grant = taken(manager, "w", tokens)
        manager.commit(grant, tokens, len(tokens), [b"d" * 16] * pages)
        spent = lines(lambda: manager.commit(grant, (7,), len(tokens) + 1))
        manager.drop(grant)
        forget(manager, tokens)
        return spent

    assert cost(1) == cost(150) < 10
