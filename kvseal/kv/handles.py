"""Handles: the right to write, to read, or to be still in flight. Each gives itself back exactly once.

Owns `Lease`, `Pin` and `Ticket`. A handle holds stamps, never bare pages. A second release is an error (L2); a handle that is lost to
the garbage collector is noted in the pool, its pages are put out of use, and `PagePool.check` says so (L2, L8, L12). Only the pool makes
handles, and only the pool moves pages between them.
"""

from __future__ import annotations

from array import array
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.kv.ledger import scope_words

if TYPE_CHECKING:
    from kvseal.kv.pool import PagePool


class Handle:
    """A right over some pages, open until it is released. `with` releases it at the end, if that has not been done inside."""

    __slots__ = ("_pool", "open", "stamps")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.open = True
        self.stamps: array[int] = array("Q")
        """page, nonce, page, nonce, ...; moved by the pool alone."""

    @property
    def pages(self) -> int:
        return len(self.stamps) // 2

    def release(self) -> None:
        """Gives the right back. Raises `LawBroken` (L2) the second time."""
        self._close()
        self._give_back()

    def _close(self) -> None:
        if not self.open:
            raise LawBroken(Law.L2, f"a {type(self).__name__.lower()} was released twice")
        self.open = False

    def _give_back(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.open:
            self.release()

    def __del__(self) -> None:
        # The collector runs in the middle of other code, so nothing is moved here: the pool settles it at its next safe point.
        if self.open and self.stamps:
            self._pool.note_lost(self)


class Lease(Handle):
    """The right to write these pages, in order of ordinal; one holder. What is sealed leaves the lease."""

    __slots__ = ("holder", "next_ordinal", "scope", "scope_words")

    def __init__(self, pool: PagePool, holder: int, scope: Scope, first_ordinal: int) -> None:
        super().__init__(pool)
        self.holder = holder
        self.scope = scope
        self.scope_words = scope_words(scope)
        self.next_ordinal = first_ordinal

    def _give_back(self) -> None:
        self._pool.end_lease(self)


class Pin(Handle):
    """The right to read these sealed pages, all of one scope (L4)."""

    __slots__ = ("scope", "scope_words")

    def __init__(self, pool: PagePool, scope: Scope) -> None:
        super().__init__(pool)
        self.scope = scope
        self.scope_words = scope_words(scope)

    def _give_back(self) -> None:
        self._pool.end_pin(self)


class Ticket(Handle):
    """Somebody outside may still touch these pages (L8). `release` is the proof that it has ended; `expire` is the lack of one."""

    __slots__ = ()

    def _give_back(self) -> None:
        self._pool.end_ticket(self)

    def expire(self) -> None:
        """The proof did not come in time: the pages go to quarantine, now or when their holders leave, never to free."""
        self._close()
        self._pool.end_ticket(self, proven=False)
