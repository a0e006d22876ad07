"""A KV manager of its own and operations on it that can be timed: what `growth` and `lookup` measure with.

Owns the operations. Times are CPU time of this process in microseconds for one operation; setting up and tidying up are not counted. No
model, no arena: `kv` alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvseal.core.ids import RequestId, Scope
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.prefix_key import PackedTokens

PAGE_TOKENS = 16
GEOMETRY = KVGeometry(layers=30, kv_heads=3, head_dim=64, page_tokens=PAGE_TOKENS)
SCOPE = Scope(b"growth benchmark")
DIGEST = bytes(16)
RUN_PAGES = 16
"""Pages of each of the runs that fill a tree: a conversation of 256 tokens."""

Operation = Callable[[], float]
"""Does the thing once or many times and returns microseconds for one, in CPU time; setting up and tidying up not counted."""


def timed(act: Callable[[], object], times: int) -> float:
    begin = time.process_time_ns()
    for _ in range(times):
        act()
    return (time.process_time_ns() - begin) / times / 1000


def turns(operations: dict[str, Operation], rounds: int) -> dict[str, tuple[float, ...]]:
    """They take turns, after one turn each that does not count."""
    for operation in operations.values():
        operation()
    taken: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(rounds):
        for name, operation in operations.items():
            taken[name].append(operation())
    return {name: tuple(values) for name, values in taken.items()}


class Cache:
    """A manager and what the measurements do with it."""

    def __init__(self, pool_pages: int) -> None:
        context = pool_pages * PAGE_TOKENS
        capacity = Capacity.derive(model_context_tokens=context, pool_pages=pool_pages, page_tokens=PAGE_TOKENS)
        self.kv = KVManager(GEOMETRY, pool_pages=pool_pages, capacity=capacity, secret=b"growth benchmark")
        self._asked = 0

    def admit(self, tokens: PackedTokens, first_tokens: int, *, reuse: bool = True) -> Grant:
        self._asked += 1
        grant = self.kv.admit(RequestId(str(self._asked)), SCOPE, tokens, first_tokens=first_tokens, reuse=reuse)
        if grant is None:
            raise RuntimeError("the pool of this measurement is too small")
        return grant

    def compute(self, grant: Grant, tokens: PackedTokens) -> None:
        """Commits everything after the hit."""
        start = grant.table.valid_tokens
        pages = len(tokens) // PAGE_TOKENS - start // PAGE_TOKENS
        self.kv.commit(grant, tokens.first(len(tokens))[start:], len(tokens), [DIGEST] * pages)

    def fill(self, pages: int) -> None:
        """Caches so many pages in runs that all start differently."""
        for index in range(pages // RUN_PAGES):
            tokens = self.prompt(RUN_PAGES * PAGE_TOKENS, seed=1_000_000 + index)
            grant = self.admit(tokens, len(tokens))
            self.compute(grant, tokens)
            self.kv.drop(grant)

    def prompt(self, count: int, *, seed: int) -> PackedTokens:
        """The first word tells the seeds apart, so every prompt of a seed is a prefix of its longer ones."""
        return self.kv.pack([seed, *((index * 7919 + seed) % 49_152 for index in range(1, count))])

    # --- operations -----------------------------------------------------------------------------------------

    def one_page(self) -> float:
        """Lease one page and give it back."""

        def act() -> None:
            lease = self.kv.pool.reserve(1, SCOPE)
            if lease is not None:
                lease.release()

        return timed(act, 2000)

    def admit_miss(self, tokens: int) -> float:
        prompt = self.prompt(tokens, seed=1)
        return timed(lambda: self.kv.drop(self.admit(prompt, tokens, reuse=True)), max(4, 40_000 // tokens))

    def admit_hit(self, tokens: int) -> float:
        """All but the last page cached: match, pin, lease one page, and give everything back."""
        prompt = self._cached(tokens)
        return timed(lambda: self.kv.drop(self.admit(prompt, 1)), max(4, 100_000 // tokens))

    def match(self, tokens: int) -> float:
        prompt = self._cached(tokens)
        return timed(lambda: self.kv.probe(SCOPE, prompt), max(20, 1_000_000 // tokens))

    def match_from_list(self, tokens: int) -> float:
        """Packing included: what the first look at a prompt costs."""
        listed = tuple(self._cached(tokens).first(tokens + 1))
        return timed(lambda: self.kv.probe(SCOPE, listed), max(4, 200_000 // tokens))

    def insert(self, tokens: int) -> float:
        """Seal and publish every page of a prompt that is not cached."""
        rounds, spent = max(3, 20_000 // tokens), 0.0
        prompt = self.prompt(tokens, seed=2)
        for _ in range(rounds):
            grant = self.admit(prompt, tokens)
            spent += timed(partial(self.compute, grant, prompt), 1)
            self.kv.drop(grant)
            self.kv.cache.forget(grant.table.stamps[0])
        return spent / rounds

    def evict_one(self) -> float:
        return timed(lambda: self.kv.cache.evict(1), 500)

    def decode(self, context: int) -> float:
        """grow and commit of one token after another at this context, page seams included; one grant per call."""
        prompt = self.prompt(context, seed=context)
        grant = self.admit(prompt, context, reuse=False)
        self.compute(grant, prompt)
        steps = 50 * PAGE_TOKENS
        begin = time.process_time_ns()
        for end in range(context + 1, context + steps + 1):
            if end > grant.room_tokens:
                self.kv.grow(grant, end)
            self.kv.commit(grant, (7,), end, () if end % PAGE_TOKENS else (DIGEST,))
        spent = (time.process_time_ns() - begin) / steps / 1000
        first = grant.table.stamps[0]
        self.kv.drop(grant)
        self.kv.cache.forget(first)
        return spent

    def _cached(self, tokens: int) -> PackedTokens:
        """A prompt of one token more than `tokens`, all of whose whole pages are in the cache."""
        prompt = self.prompt(tokens + 1, seed=3)
        if self.kv.probe(SCOPE, prompt) < tokens:
            grant = self.admit(prompt, tokens + 1)
            self.compute(grant, prompt)
            self.kv.drop(grant)
        return prompt
