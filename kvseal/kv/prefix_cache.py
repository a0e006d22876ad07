"""The prefix cache: sealed pages that somebody may still want, and which of them to give up first.

Owns the radix tree together with the order of eviction. `probe` reads only; `pin` takes; `publish` is the one way in and takes sealed
pages alone (L7); a hit compares the scope (L4) and every token (L4k). Eviction takes from the ends of leaves, least recently used first,
through a heap: O(log N) per leaf, never a scan of the tree.
"""

from __future__ import annotations

import heapq
from array import array
from itertools import pairwise

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.kv.feed import CacheFeed
from kvseal.kv.handles import Lease, Pin
from kvseal.kv.pool import PagePool
from kvseal.kv.prefix_key import PackedTokens
from kvseal.kv.radix import Node, RadixTree


class PrefixCache:
    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.tree = RadixTree(pool.geometry.page_tokens, pool.pages)
        self.evicted_pages = 0
        self.feed: CacheFeed | None = None
        """Told of every change, on a node that a router feeds on."""
        self._page_tokens = pool.geometry.page_tokens
        self._uses = 0  # instead of a clock
        self._order: list[tuple[int, int, Node]] = []
        self._entries = 0

    def probe(self, scope: Scope, tokens: PackedTokens) -> array[int]:
        """Stamps of the pages that a request with these tokens could read; never all its tokens, since at least one must be computed
        for its logits. Changes nothing, not even the order of eviction."""
        return self.tree.match(scope, tokens.data, (len(tokens) - 1) // self._page_tokens)

    def pin(self, scope: Scope, stamps: array[int]) -> Pin:
        """Takes what `probe` has found."""
        pin = self._pool.pin(stamps, scope)
        home = self.tree.home(stamps[-2]) if stamps else None
        if home is not None:
            self._uses += 1
            home.last_use = self._uses
        return pin

    def publish(self, pin: Pin, parent_page: int | None, run: bytes, stamps: array[int]) -> array[int]:
        """Makes sealed pages of the pin's scope findable behind `parent_page` (None: at the start). Returns the stamps that were cached
        already for the first of these tokens; the stamps given for those stay private."""
        first = self._pool.ledger.ordinal_at[parent_page] + 1 if parent_page is not None else 0
        self._pool.require_sealed(stamps, pin.scope_words, first)
        known = self.tree.insert(pin.scope, parent_page, run, stamps)
        fresh = stamps[len(known) :] if known else stamps
        self._pool.enter_cache(fresh)
        if self.feed is not None:
            self.feed.published(pin.scope, parent_page, run, known + fresh)
        return known

    def seal_one(self, lease: Lease, pin: Pin, parent_page: int, run: bytes, digest: bytes) -> bool:
        """Seals and publishes the first page of a lease where it goes on at the end of its parent's run: nearly every page that decoding
        fills. False, and nothing has changed, where the tree has another shape."""
        home = self.tree.tip(pin.scope, parent_page)
        if home is None:
            return False
        page, nonce = self._pool.seal_one(lease, pin, digest, parent_page)
        self.tree.append_one(home, run, page, nonce)
        if self.feed is not None:
            self.feed.published(pin.scope, parent_page, run, array("Q", (page, nonce)))
        return True

    def unpinned(self, stamps: array[int]) -> None:
        """To be told after pages have been unpinned: the last cached one is where eviction may begin."""
        for page in reversed(stamps[::2]):
            node = self.tree.home(page)
            if node is not None:
                self._uses += 1
                node.last_use = self._uses
                self._queue(node)
                return

    def evict(self, pages: int) -> int:
        """Frees at least so many pages, or all that can be; returns how many have become free."""
        pool, before = self._pool, self._pool.free_pages
        waiting: list[Node] = []
        while pool.free_pages - before < pages and self._order:
            last_use, _, node = heapq.heappop(self._order)
            node.queued = False
            if not node.stamps or node.children:
                continue
            if node.last_use > last_use:
                self._queue(node)
                continue
            tail = self._quiet_tail(node, pages - (pool.free_pages - before))
            if not tail:
                # A pinned end comes back when its last pin goes. One in flight has nobody to bring it back.
                if not pool.ledger.pins_at[node.stamps[-2]]:
                    waiting.append(node)
                continue
            parent = node.parent
            self._let_go(self.tree.cut_tail(node, tail))
            self.evicted_pages += tail
            self._queue(node if node.stamps else parent)
        for node in waiting:
            self._queue(node)
        return pool.free_pages - before

    def forget(self, page: int) -> int:
        """Takes a page and everything that was computed from it out of reach; returns the number of pages (L12)."""
        home = self.tree.home(page)
        if home is None:
            return 0
        parent = home.parent
        gone = self.tree.cut(page)
        self._let_go(gone)
        self._queue(home if home.stamps else parent)
        self._compact()
        return len(gone) // 2

    def purge(self, scope: Scope) -> int:
        """Takes everything of a scope out of reach; returns the number of pages."""
        gone = self.tree.cut_scope(scope)
        self._let_go(gone)
        self._compact()
        return len(gone) // 2

    def holds(self, page: int) -> bool:
        return self.tree.home(page) is not None

    def check(self) -> None:
        """Raises `LawBroken` unless the tree is sound, agrees with the ledger and keeps every evictable page within reach. O(pool)."""
        self.tree.check()
        ledger, cached = self._pool.ledger, 0
        for node in self.tree.nodes():
            cached += node.pages
            for page, nonce in zip(node.stamps[::2], node.stamps[1::2], strict=True):
                if not ledger.cached_at[page] or ledger.nonce_at[page] != nonce:
                    raise LawBroken(Law.L3, f"the prefix tree holds page {page} under another hand-out, or the ledger does not know")
            above = node.parent.stamps[-2:-1] if node.parent is not None else array("Q")
            readers = [ledger.pins_at[page] for page in (*above, *node.stamps[::2])]
            if any(reader and not before for before, reader in pairwise(readers)):
                raise LawBroken(Law.L2, "a page is read whose predecessor could be evicted")
            tail = node.stamps[-2]
            if not (node.children or node.queued or ledger.pins_at[tail] or ledger.doomed_at[tail]):
                raise LawBroken(Law.L2, "a leaf could be evicted and is not in the order of eviction")
        if cached != int(ledger.cached.sum()):
            raise LawBroken(Law.L2, "the ledger calls pages cached that are not in the prefix tree")

    # --- inside ---------------------------------------------------------------------------------------------

    def _let_go(self, stamps: array[int]) -> None:
        if self.feed is not None:
            self.feed.left(stamps)
        self._pool.leave_cache(stamps)

    def _queue(self, node: Node | None) -> None:
        """Enters a leaf that is not entered yet; what has become stale is found out when it comes up."""
        if node is not None and node.stamps and not node.children and not node.queued:
            node.queued = True
            self._entries += 1
            heapq.heappush(self._order, (node.last_use, self._entries, node))

    def _quiet_tail(self, node: Node, most: int) -> int:
        """How many pages at the end of a leaf are neither pinned nor in flight, up to `most`."""
        count = 0
        while count < min(most, node.pages) and self._pool.is_quiet(node.stamps[-2 - 2 * count]):
            count += 1
        return count

    def _compact(self) -> None:
        """Entries of nodes taken out by `forget` and `purge` would pile up if nothing were ever evicted."""
        if len(self._order) > 2 * self.tree.node_count + 64:
            self._order = [entry for entry in self._order if entry[2].stamps]
            heapq.heapify(self._order)
