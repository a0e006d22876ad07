"""Who in the waiting line begins with the same tokens.

Owns an index of waiting sequences by how they begin: one entry for each power of two of pages, so that finding those that share the most
with a given sequence costs O(log n), however long the line is. A hint alone: starts are compared by hash here, and what really is cached
is found by exact comparison at admission (L4k). Decides nothing.
"""

from __future__ import annotations

from kvseal.core.ids import Scope
from kvseal.kv.prefix_key import TOKEN_BYTES
from kvseal.sched.sequence import Sequence

_LEAST_PAGES = 2
"""Less is not worth keeping company for."""

Start = tuple[Scope, int, int]
"""Scope, pages, hash of the tokens in them."""


class Company:
    def __init__(self, page_tokens: int) -> None:
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._waiting: dict[Start, dict[Sequence, None]] = {}
        """In order of entering."""

    def enter(self, sequence: Sequence) -> None:
        if not sequence.starts:
            sequence.starts = self._starts(sequence)
        for start in sequence.starts:
            self._waiting.setdefault(start, {})[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        for start in sequence.starts:
            others = self._waiting[start]
            del others[sequence]
            if not others:
                del self._waiting[start]

    def closest(self, sequence: Sequence) -> Sequence | None:
        """One of those who share the most with it."""
        for start in reversed(sequence.starts):
            others = self._waiting.get(start)
            if others:
                return next(iter(others))
        return None

    def _starts(self, sequence: Sequence) -> tuple[Start, ...]:
        data, scope = sequence.tokens.tobytes(), sequence.request.scope
        found: list[Start] = []
        pages = _LEAST_PAGES
        while pages * self._page_bytes <= len(data):
            found.append((scope, pages, hash(data[: pages * self._page_bytes])))
            pages *= 2
        return tuple(found)
