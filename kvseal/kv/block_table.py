"""The block table: the ordered stamps of one sequence, and how many of its tokens are real.

Owns `BlockTable`, which satisfies `core.batch.TableView`. The page at index i has ordinal i (L6); `valid_tokens` moves by `advance`
alone, after evidence (L5); what `trim` takes away is gone (L10). A stamp, once in the table, is never overwritten in place: `swap` and
`trim` make a new array, so that a step in flight keeps reading the one it was given (L8).
"""

from __future__ import annotations

from array import array

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law


class BlockTable:
    """`stamps` is read-only for everybody outside `kv`."""

    __slots__ = ("page_tokens", "scope", "stamps", "valid_tokens")

    def __init__(self, scope: Scope, page_tokens: int) -> None:
        self.scope = scope
        self.page_tokens = page_tokens
        self.valid_tokens = 0
        self.stamps: array[int] = array("Q")

    @property
    def pages(self) -> int:
        return len(self.stamps) // 2

    @property
    def room_tokens(self) -> int:
        """Positions below this have a page."""
        return len(self.stamps) // 2 * self.page_tokens

    def extend(self, stamps: array[int]) -> None:
        """Appends page, nonce, page, nonce, ... with the next ordinals."""
        self.stamps.extend(stamps)

    def advance(self, end_tokens: int) -> None:
        """After a whole forward, or from a verified receipt. Raises `LawBroken` (L5) when it goes back or past the pages."""
        if not self.valid_tokens < end_tokens <= self.room_tokens:
            raise LawBroken(Law.L5, f"valid tokens cannot move from {self.valid_tokens} to {end_tokens} with room for {self.room_tokens}")
        self.valid_tokens = end_tokens

    def swap(self, first: int, stamps: array[int]) -> None:
        """Puts `stamps` in the place of those from ordinal `first` on, as many as there are."""
        fresh = self.stamps[:]
        fresh[2 * first : 2 * first + len(stamps)] = stamps
        if len(fresh) != len(self.stamps):
            raise LawBroken(Law.L6, "a swap may not change the length of a block table")
        self.stamps = fresh

    def trim(self, pages: int) -> None:
        """Keeps the first `pages` pages. The rest, and every token in it, is gone from this table."""
        self.stamps = self.stamps[: 2 * pages]
        self.valid_tokens = min(self.valid_tokens, self.room_tokens)
