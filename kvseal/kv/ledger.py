"""The ledger: the pool's own record of every page, apart from the seals in the pages' memory, so that the two can be compared.

Owns the columns and their audit. Never changes a page's state: `PagePool` does. Laws L2 (conservation), L3, L4, L6, L7 and L10 (ledger
against seals).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvseal.core.errors import LawBroken
from kvseal.core.ids import SCOPE_BYTES, Scope
from kvseal.core.laws import Law
from kvseal.kv import runs
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE, SEAL_MAGIC


class PageState(IntEnum):
    FREE = 0
    LEASED = 1
    SEALED = 2
    DRAINING = 3
    QUARANTINED = 4


class Ledger:
    """One row per page. Each column is a NumPy array (audits, kernels) and a memoryview of it (`*_at`): reading or writing one
    element costs 30 ns through the view and several times that through the array."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.state = np.zeros(pages, np.uint8)
        self.nonce = np.zeros(pages, np.uint64)
        """Current hand-out; 0 exactly when the page is free."""
        self.holder = np.zeros(pages, np.uint64)
        """Number of the lease that may write; 0 when none."""
        self.pins = np.zeros(pages, np.uint32)
        self.tickets = np.zeros(pages, np.uint32)
        self.filled = np.zeros(pages, np.uint16)
        """Committed slots: page_tokens once sealed; of a leased page, as of the last audit (the kernels keep the count per token)."""
        self.ordinal = np.zeros(pages, np.uint32)
        self.scope = np.zeros((pages, 2), np.uint64)
        self.digest = np.zeros((pages, 2), np.uint64)
        """Of the sealed page; meaningless in other states."""
        self.cached = np.zeros(pages, np.uint8)
        """1 while the prefix cache can hand the page out."""
        self.doomed = np.zeros(pages, np.uint8)
        """1 when it may not become free without proof of quiet (L8)."""

        self.state_at = self.state.data
        self.nonce_at = self.nonce.data
        self.holder_at = self.holder.data
        self.pins_at = self.pins.data
        self.tickets_at = self.tickets.data
        self.filled_at = self.filled.data
        self.ordinal_at = self.ordinal.data
        self.scope_at = self.scope.reshape(-1).data
        self.digest_at = self.digest.reshape(-1).view(np.uint8).data
        self.cached_at = self.cached.data
        self.doomed_at = self.doomed.data

    @property
    def bytes(self) -> int:
        """Memory of all columns."""
        columns = (self.state, self.nonce, self.holder, self.pins, self.tickets, self.filled, self.ordinal, self.scope, self.digest)
        return sum(column.nbytes for column in (*columns, self.cached, self.doomed))

    def require_current(self, stamps: array[int]) -> None:
        """Compares every nonce before anything is done with the pages (L3)."""
        if len(stamps) > 2 * runs.FEW_PAGES and runs.are_current(self, stamps):
            return
        nonce_at, pairs = self.nonce_at, iter(stamps)
        try:
            for page, nonce in zip(pairs, pairs, strict=True):
                if nonce_at[page] != nonce or not nonce:
                    raise LawBroken(Law.L3, f"the stamp of page {page} is not its current hand-out")
        except IndexError:
            raise LawBroken(Law.L3, f"a stamp names a page outside the pool of {self.pages}") from None

    def require_sealed_run(self, pages: array[int], scope_words: tuple[int, int], first_ordinal: int) -> None:
        """Raises `LawBroken` unless these are sealed pages of this scope with consecutive ordinals (L4, L6, L7)."""
        sealed, (first_word, second_word) = int(PageState.SEALED), scope_words
        if len(pages) > runs.FEW_PAGES and runs.are_sealed(self, pages, sealed, scope_words, first_ordinal):
            return
        state_at, scope_at, ordinal_at = self.state_at, self.scope_at, self.ordinal_at
        for ordinal, page in enumerate(pages, first_ordinal):
            ours = scope_at[2 * page] == first_word and scope_at[2 * page + 1] == second_word
            if not ours or state_at[page] != sealed or ordinal_at[page] != ordinal:
                raise self._unfit(page, sealed, scope_words, ordinal)

    def _unfit(self, page: int, sealed: int, scope_words: tuple[int, int], ordinal: int) -> LawBroken:
        if self.state_at[page] != sealed:
            return LawBroken(Law.L7, f"page {page} would be shared before it is sealed")
        if self.scope_at[2 * page] != scope_words[0] or self.scope_at[2 * page + 1] != scope_words[1]:
            return LawBroken(Law.L4, f"page {page} belongs to another scope")
        return LawBroken(Law.L6, f"page {page} has ordinal {self.ordinal_at[page]}, not {ordinal}")

    def evictable(self) -> npt.NDArray[np.bool_]:
        """[pages]; True where evicting the page would make it free."""
        quiet = (self.pins == 0) & (self.tickets == 0) & (self.doomed == 0)
        found: npt.NDArray[np.bool_] = (self.state == PageState.SEALED) & (self.cached == 1) & quiet
        return found


def scope_words(scope: Scope) -> tuple[int, int]:
    """The 16 bytes as two little-endian words, as the seal has them."""
    if len(scope) != SCOPE_BYTES:
        raise LawBroken(Law.L4, f"a scope has {SCOPE_BYTES} bytes, not {len(scope)}")
    return int.from_bytes(scope[:8], "little"), int.from_bytes(scope[8:], "little")


def audit(ledger: Ledger, free_list: npt.NDArray[np.int32], counts: Mapping[PageState, int], evictable: int) -> None:
    """Raises `LawBroken` unless every page is in exactly one place and every column agrees with every other (L2, L8)."""
    _audit_counts(ledger, free_list, counts, evictable)
    state, free = ledger.state, ledger.state == PageState.FREE
    _require(bool(np.array_equal(ledger.nonce == 0, free)), Law.L3, "a page is free with a nonce, or handed out without one")
    nonces = ledger.nonce[~free]
    _require(len(np.unique(nonces)) == len(nonces), Law.L3, "two pages share a nonce")
    leased = state == PageState.LEASED
    _require(bool(np.array_equal(ledger.holder != 0, leased)), Law.L4, "a leased page without holder, or a holder of a page not leased")
    _require(not bool(np.any(ledger.pins[state != PageState.SEALED])), Law.L7, "a page is pinned that is not sealed")
    _require(not bool(np.any(ledger.tickets[free])), Law.L8, "a page with something in flight is free")
    sealed = state == PageState.SEALED
    _require(not bool(np.any(ledger.cached[~sealed])), Law.L7, "a page is in the prefix cache that is not sealed")
    orphan = sealed & (ledger.cached == 0) & (ledger.pins == 0)
    _require(not bool(np.any(orphan)), Law.L2, "a sealed page is neither pinned nor cached")


def _audit_counts(ledger: Ledger, free_list: npt.NDArray[np.int32], counts: Mapping[PageState, int], evictable: int) -> None:
    in_state = np.bincount(ledger.state, minlength=len(PageState))
    for state in PageState:
        _require(in_state[state] == counts[state], Law.L2, f"{counts[state]} pages are counted {state.name}, {in_state[state]} are")
    _require(len(free_list) == counts[PageState.FREE], Law.L2, "the free list is longer or shorter than the number of free pages")
    _require(len(np.unique(free_list)) == len(free_list), Law.L2, "the free list holds a page twice")
    _require(not bool(np.any(ledger.state[free_list])), Law.L2, "the free list holds a page that is not free")
    found = int(np.count_nonzero(ledger.evictable()))
    _require(found == evictable, Law.L2, f"{evictable} pages are counted as evictable, {found} are")


def compare_with_seals(ledger: Ledger, memory: npt.NDArray[np.uint8], geometry: KVGeometry) -> None:
    """`memory`: [pages, page_bytes]. Raises `LawBroken` when a seal contradicts the ledger.

    A leased page may bear an older seal until its first write; one with committed slots, and every sealed page, must bear the current
    nonce in all layers. No free page bears a nonce that is in force.
    """
    if memory.shape != (ledger.pages, geometry.page_bytes):
        raise LawBroken(Law.L10, f"the arena has shape {memory.shape}, not {(ledger.pages, geometry.page_bytes)}")
    sections = memory.reshape(ledger.pages, geometry.layers, geometry.section_bytes)
    seals = np.ascontiguousarray(sections[:, :, :SEAL_BYTES]).view(SEAL_DTYPE)[:, :, 0]
    sealed = ledger.state == PageState.SEALED
    leased = ledger.state == PageState.LEASED
    current = (seals["magic"] == SEAL_MAGIC) & (seals["nonce"] == ledger.nonce[:, None])
    must = sealed | (leased & (ledger.filled > 0))
    _require(bool(np.all(current[must])), Law.L3, "a page with committed tokens bears another nonce than the ledger's")

    live = current & (sealed | leased)[:, None]
    layer = np.arange(geometry.layers)[None, :]
    _require(bool(np.all((seals["scope"] == ledger.scope[:, None, :]).all(axis=-1)[live])), Law.L4, "a seal names another scope")
    _require(bool(np.all((seals["format"] == np.uint64(geometry.format))[live])), Law.L10, "a seal names another format")
    placed = (seals["ordinal"] == ledger.ordinal[:, None]) & (seals["layer"] == layer)
    _require(bool(np.all(placed[live])), Law.L6, "a seal names another ordinal or layer")
    _require(bool(np.all((seals["filled"] >= ledger.filled[:, None])[live])), Law.L5, "a seal has fewer slots than were committed")
    complete = (seals["filled"] == geometry.page_tokens) & (seals["digest"] != 0).any(axis=-1)
    _require(bool(np.all(complete[sealed])), Law.L7, "a sealed page is not full and digested in every layer")
    free = ledger.state == PageState.FREE
    in_force = np.isin(seals["nonce"][free], ledger.nonce[~free])
    _require(not bool(np.any(in_force)), Law.L3, "a free page bears a nonce that is in force elsewhere")


def _require(holds: bool | np.bool_, law: Law, what: str) -> None:
    if not holds:
        raise LawBroken(law, what)
