"""The radix tree: which runs of tokens have sealed pages, one tree per scope.

Owns nodes, their split and the way from a page back to its node. An edge is a run of several pages; tokens are compared exactly, as
packed bytes (memcmp), never by a digest (L4k). Scopes are different trees, so no walk can cross from one to another (L4). Never knows
pins, states or what to evict. Every operation costs O(pages of the run named), whatever the size of the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.kv.prefix_key import TOKEN_BYTES
from kvseal.kv.runs import FEW_PAGES, pages_of


class Node:
    """A run of pages below `parent`; a root has none. Compared by identity."""

    __slots__ = ("children", "last_use", "parent", "queued", "run", "scope", "stamps")

    def __init__(self, scope: Scope, parent: Node | None, run: bytes | bytearray, stamps: array[int]) -> None:
        self.scope = scope
        self.parent = parent
        self.run = bytearray(run)
        """Packed tokens of all its pages; a bytearray, so that a sequence that grows page by page does not copy what it has."""
        self.stamps = stamps
        """page, nonce, ... of its pages; empty for a root and for a node that has been taken out."""
        self.children: dict[bytes, Node] = {}
        """By the packed tokens of their first page."""
        self.last_use = 0
        self.queued = False
        """Whether the eviction order holds it."""

    @property
    def pages(self) -> int:
        return len(self.stamps) // 2


class RadixTree:
    def __init__(self, page_tokens: int, total_pages: int) -> None:
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._roots: dict[Scope, Node] = {}
        self._homes: npt.NDArray[np.object_] = np.full(total_pages, None, dtype=object)
        """The node of each page, or None."""
        self.pages = 0
        self.node_count = 0
        """Without roots."""

    @property
    def scopes(self) -> int:
        """Scopes with at least one page."""
        return len(self._roots)

    def home(self, page: int) -> Node | None:
        """The node that holds this page."""
        home: Node | None = self._homes[page]
        return home

    def match(self, scope: Scope, run: bytes, pages: int) -> array[int]:
        """Stamps of the longest cached prefix of the first `pages` pages of `run`. Reads only."""
        found: array[int] = array("Q")
        node = self._roots.get(scope)
        at, end, page_bytes = 0, pages * self._page_bytes, self._page_bytes
        while node is not None and at < end:
            node = node.children.get(run[at : at + page_bytes])
            if node is None:
                break
            if run.startswith(node.run, at) and at + len(node.run) <= end:
                found.extend(node.stamps)
                at += len(node.run)
            else:
                found.extend(node.stamps[: 2 * self._common_pages(node.run, 0, run, at, end)])
                break
        return found

    def insert(self, scope: Scope, parent_page: int | None, run: bytes, stamps: array[int]) -> array[int]:
        """Puts a run behind a cached page (None: at the scope's start). Returns the stamps that were there already for its first
        pages; those of the rest are now in the tree. The parent page must be in the tree, of the same scope."""
        node, offset = self._locate(scope, parent_page)
        known: array[int] = array("Q")
        if not node.children and 2 * offset == len(node.stamps):  # the common case: a sequence grows at its own end
            self._append(node, run, stamps)
            return known
        at = 0
        while at < len(run):
            if offset < node.pages:
                same = self._common_pages(node.run, offset * self._page_bytes, run, at, len(run))
                known.extend(node.stamps[2 * offset : 2 * (offset + same)])
                at += same * self._page_bytes
                offset += same
                if offset < node.pages and at < len(run):
                    node = self._split(node, offset)
                continue
            child = node.children.get(run[at : at + self._page_bytes])
            if child is not None:
                node, offset = child, 0
                continue
            self._append(node, run[at:], stamps[len(known) :])
            break
        return known

    def tip(self, scope: Scope, page: int) -> Node | None:
        """The node of this scope that ends with this page and has nothing below it."""
        node: Node | None = self._homes[page]
        if node is None or node.children or node.stamps[-2] != page or node.scope != scope:
            return None
        return node

    def append_one(self, tip: Node, run: bytes, page: int, nonce: int) -> None:
        """One more page behind what `tip` has found."""
        tip.run += run
        tip.stamps.append(page)
        tip.stamps.append(nonce)
        self._homes[page] = tip
        self.pages += 1

    def cut(self, page: int) -> array[int]:
        """Takes a page and everything that follows it out of the tree; returns their stamps, parents first."""
        node = self._homes[page]
        if node is None:
            raise LawBroken(Law.L2, f"page {page} is not in the tree")
        return self._cut(node, self._offset(node, page))

    def cut_tail(self, node: Node, pages: int) -> array[int]:
        """Takes the last pages out of a leaf."""
        return self._cut(node, node.pages - pages)

    def cut_scope(self, scope: Scope) -> array[int]:
        """Takes everything of a scope out of the tree."""
        gone: array[int] = array("Q")
        root = self._roots.get(scope)
        for child in list(root.children.values()) if root is not None else ():
            gone.extend(self._cut(child, 0))
        return gone

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, for checks. O(tree)."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check(self) -> None:
        """Raises `LawBroken` (L2) unless every page has one place, every node its home entries and every edge the right key. O(tree)."""
        seen = 0
        for node in self.nodes():
            linked = node.parent is not None and node.parent.children.get(self._first(node)) is node and node.parent.scope == node.scope
            homes = all(self._homes[page] is node for page in node.stamps[::2])
            if not (linked and homes and node.pages and len(node.run) == node.pages * self._page_bytes):
                raise LawBroken(Law.L2, "a node of the prefix tree is out of place")
            seen += node.pages
        if seen != self.pages or sum(home is not None for home in self._homes) != seen or not all(r.children for r in self._roots.values()):
            raise LawBroken(Law.L2, f"the prefix tree counts {self.pages} pages and holds {seen}")

    # --- inside ---------------------------------------------------------------------------------------------

    def _locate(self, scope: Scope, parent_page: int | None) -> tuple[Node, int]:
        if parent_page is None:
            root = self._roots.get(scope)
            if root is None:
                root = self._roots[scope] = Node(scope, None, b"", array("Q"))
            return root, 0
        node: Node | None = self._homes[parent_page]
        if node is None or node.scope != scope:
            raise LawBroken(Law.L4, f"page {parent_page} is not in the tree of this scope")
        return node, self._offset(node, parent_page) + 1

    def _offset(self, node: Node, page: int) -> int:
        if node.stamps[-2] == page:
            return len(node.stamps) // 2 - 1
        return node.stamps[::2].index(page)

    def _first(self, node: Node) -> bytes:
        return bytes(node.run[: self._page_bytes])

    def _common_pages(self, run: bytearray, at: int, other: bytes, other_at: int, other_end: int) -> int:
        """How many pages the two runs share from these byte offsets on: memcmp of halves, so O(pages compared)."""
        size = self._page_bytes
        low, high = 0, min(len(run) - at, other_end - other_at) // size
        if run[at : at + high * size] == other[other_at : other_at + high * size]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if run[at + low * size : at + middle * size] == other[other_at + low * size : other_at + middle * size]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: Node, offset: int) -> Node:
        """Puts the first `offset` pages of a node into a new one above it; returns that. The lower part keeps its identity (and its
        place in the eviction order), and only the pages moved get a new home."""
        size, parent = offset * self._page_bytes, node.parent
        if parent is None:
            raise LawBroken(Law.L2, "a root has no run to split")
        upper = Node(node.scope, parent, node.run[:size], node.stamps[: 2 * offset])
        upper.last_use = node.last_use
        self.node_count += 1
        parent.children[self._first(upper)] = upper
        node.parent, node.run, node.stamps = upper, node.run[size:], node.stamps[2 * offset :]
        upper.children[self._first(node)] = node
        self._settle(upper, upper.stamps)
        return upper

    def _append(self, node: Node, run: bytes, stamps: array[int]) -> None:
        self.pages += len(stamps) // 2
        if node.parent is not None and not node.children:
            node.run += run
            node.stamps.extend(stamps)
        else:
            child = Node(node.scope, node, run, stamps)
            self.node_count += 1
            node.children[run[: self._page_bytes]] = child
            node = child
        self._settle(node, stamps)

    def _settle(self, node: Node | None, stamps: array[int]) -> None:
        """These pages are in that node from now on."""
        homes = self._homes
        if len(stamps) > 2 * FEW_PAGES:
            homes[pages_of(stamps)] = node
        else:
            for page in stamps[::2]:
                homes[page] = node

    def _cut(self, node: Node, offset: int) -> array[int]:
        gone = node.stamps[2 * offset :]
        waiting = list(node.children.values())
        node.children = {}
        while waiting:
            below = waiting.pop()
            self.node_count -= 1
            waiting.extend(below.children.values())
            gone.extend(below.stamps)
            below.children, below.stamps, below.run = {}, array("Q"), bytearray()
        if offset:
            node.stamps, node.run = node.stamps[: 2 * offset], node.run[: offset * self._page_bytes]
        else:
            self._unlink(node)
        self._settle(None, gone)
        self.pages -= len(gone) // 2
        return gone

    def _unlink(self, node: Node) -> None:
        """Takes a node out; a use of it was a use of its parent; a scope without pages goes."""
        parent = node.parent
        if parent is None:
            raise LawBroken(Law.L2, "a root cannot be cut")
        self.node_count -= 1
        del parent.children[self._first(node)]
        parent.last_use = max(parent.last_use, node.last_use)
        if parent.parent is None and not parent.children:
            del self._roots[parent.scope]
        node.stamps, node.run = array("Q"), bytearray()
