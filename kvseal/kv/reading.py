"""A short right to read sealed pages that no request holds for the reader: taken only if every page is still what its stamp says.

Owns `reading`. Laws: L2 (given back once, and eviction told), L3 and L4 (stamps and scope compared before anything is taken).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.kv.handles import Pin
from kvseal.kv.manager import KVManager


@contextmanager
def reading(kv: KVManager, scope: Scope, stamps: array[int]) -> Iterator[Pin | None]:
    """A pin on the pages with ordinals 0, 1, ...; None, and nothing is taken, when one of them is not sealed any more."""
    try:
        pin = kv.pool.pin(stamps, scope)
    except LawBroken:  # The pool compares before it takes: the page has gone back, or is another hand-out by now.
        yield None
        return
    try:
        yield pin
    finally:
        pin.release()
        kv.cache.unpinned(pin.stamps)
