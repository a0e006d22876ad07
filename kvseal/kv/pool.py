"""The pool: who holds which page, and the only place where a page changes its state.

Owns the free list, the ledger and every transition of the life of a page::

    FREE -reserve-> LEASED -seal-> SEALED -last pin gone and not cached-> FREE, or DRAINING while tickets are open
    LEASED -release-> the same; anything -quarantine, expired ticket-> QUARANTINED -readmit, with proof-> FREE

Never touches payload bytes, never decides who is served. Laws: L2 (all or nothing, released once), L3 (every stamp is compared with the
ledger), L4 (a pin's scope is the page's), L7 (sealed only when full and digested, then never leased), L8 (free only when quiet).
Every operation costs O(1) per page named, whatever the size of the pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import pack_into

import numpy as np
import numpy.typing as npt

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.kv import runs
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.handles import Handle, Lease, Pin, Ticket
from kvseal.kv.ledger import Ledger, PageState, audit, compare_with_seals
from kvseal.kv.nonces import NonceSource
from kvseal.kv.runs import pages_of

DIGEST_BYTES = 16
_FREE, _LEASED, _SEALED, _DRAINING, _QUARANTINED = (int(state) for state in PageState)


@dataclass(frozen=True, slots=True)
class QuietProof:
    """Why nothing can touch these hand-outs any more. The pool still checks for itself that no pin and no ticket is open."""

    stamps: Sequence[int]
    """page, nonce, page, nonce, ... of the hand-outs that were quarantined."""
    fence: str
    """What proved it: the transport's fence, the end of the step, a wipe read back. For the log; never empty."""


class PagePool:
    def __init__(self, geometry: KVGeometry, pages: int, *, secret: bytes, wipe: Callable[[Sequence[int]], None] | None = None) -> None:
        self.geometry = geometry
        self.pages = pages
        self.ledger = Ledger(pages)
        self.evictable_pages = 0
        """Cached pages that evicting would make free: nobody pins them, nothing is in flight on them, none is doomed."""
        self.lost_handles = 0
        """Handles that the garbage collector found open. Each is a bug; their pages are in quarantine."""
        self._page_tokens = geometry.page_tokens
        self._require_current = self.ledger.require_current
        self._wipe = wipe
        self._nonces = NonceSource(secret)
        self._free = np.arange(pages - 1, -1, -1, dtype=np.int32)  # a stack: the page freed last is handed out first
        self._free_at = self._free.data
        self._counts = [pages, 0, 0, 0, 0]
        self._last_holder = 0
        self._lost: list[Handle] = []

    @property
    def free_pages(self) -> int:
        return self._counts[_FREE]

    def count(self, state: PageState) -> int:
        return self._counts[state]

    # --- leases ---------------------------------------------------------------------------------------------

    def reserve(self, pages: int, scope: Scope, *, first_ordinal: int = 0) -> Lease | None:
        """A lease on so many pages, or None and nothing has changed."""
        self._settle_lost()
        if pages > self.free_pages:
            return None
        self._last_holder += 1
        lease = Lease(self, self._last_holder, scope, first_ordinal)
        self.extend(lease, pages)
        return lease

    def extend(self, lease: Lease, pages: int) -> array[int] | None:
        """Adds pages with the next ordinals to an open lease; returns their stamps, or None and nothing has changed."""
        self._require_open(lease)
        top = self._counts[_FREE]
        if pages > top:
            return None
        if pages == 1:
            return array("Q", self.extend_one(lease))
        taken, nonces = self._free[top - pages : top][::-1].astype(np.intp), self._nonces.take(pages)
        self._counts[_FREE] -= pages
        self._counts[_LEASED] += pages
        fresh = runs.hand_out(self.ledger, taken, nonces, _LEASED, lease.holder, lease.next_ordinal, lease.scope_words)
        lease.next_ordinal += pages
        lease.stamps.extend(fresh)
        return fresh

    def extend_one(self, lease: Lease) -> tuple[int, int]:
        """`extend` by one page, of which there must be one: nearly every call there is. Returns page and nonce."""
        self._require_open(lease)
        ledger, counts, (low, high) = self.ledger, self._counts, lease.scope_words
        if not counts[_FREE]:
            raise LawBroken(Law.L2, "a page is taken where none is free")
        counts[_FREE] -= 1
        counts[_LEASED] += 1
        page, nonce = self._free_at[counts[_FREE]], self._nonces.next()
        ledger.state_at[page] = _LEASED
        ledger.nonce_at[page] = nonce
        ledger.holder_at[page] = lease.holder
        ledger.filled_at[page] = 0
        ledger.ordinal_at[page] = lease.next_ordinal
        ledger.scope_at[2 * page] = low
        ledger.scope_at[2 * page + 1] = high
        lease.next_ordinal += 1
        lease.stamps.extend((page, nonce))
        return page, nonce

    def commit(self, lease: Lease, page: int, filled: int) -> None:
        """Records that `filled` slots of a page are written in every layer. Raises `LawBroken` (L4, L5)."""
        ledger = self.ledger
        if ledger.holder_at[page] != lease.holder:
            raise LawBroken(Law.L4, f"page {page} is not leased to the holder that commits it")
        if not ledger.filled_at[page] <= filled <= self._page_tokens:
            raise LawBroken(Law.L5, f"filled cannot move from {ledger.filled_at[page]} to {filled}")
        ledger.filled_at[page] = filled

    def seal(self, lease: Lease, pin: Pin, digests: Sequence[bytes]) -> array[int]:
        """Seals the first len(digests) pages of a lease and hands them to `pin`; returns their stamps. A digest is taken of a full
        page only, in every layer: it is the evidence that the page is full (L7)."""
        self._require_open(lease)
        self._require_open(pin)
        pages = len(digests)
        sealed = lease.stamps[: 2 * pages]
        if len(sealed) != 2 * pages or lease.scope != pin.scope or set(map(len, digests)) - {DIGEST_BYTES}:
            raise LawBroken(Law.L7, "sealing needs one 16-byte digest for each page, all leased, and a pin of the same scope")
        self._require_current(sealed)
        self._counts[_LEASED] -= pages
        self._counts[_SEALED] += pages
        runs.seal(self.ledger, pages_of(sealed), digests, _SEALED, self._page_tokens)
        del lease.stamps[: 2 * pages]
        pin.stamps.extend(sealed)
        return sealed

    def seal_one(self, lease: Lease, pin: Pin, digest: bytes, parent_page: int | None = None) -> tuple[int, int]:
        """`seal` for one page; returns it and its nonce. With `parent_page` the prefix cache holds it from now on, behind that one."""
        self._require_open(lease)
        self._require_open(pin)
        ledger, held, (low, high) = self.ledger, lease.stamps, pin.scope_words
        if not held or lease.scope_words != pin.scope_words or len(digest) != DIGEST_BYTES:
            raise LawBroken(Law.L7, "sealing needs a 16-byte digest, a leased page, and a pin of the same scope")
        page, nonce = held[:2]
        if ledger.nonce_at[page] != nonce:
            raise LawBroken(Law.L3, f"the stamp of page {page} is not its current hand-out")
        if parent_page is not None:
            if ledger.scope_at[2 * page] != low or ledger.scope_at[2 * page + 1] != high:
                raise LawBroken(Law.L4, f"page {page} belongs to another scope")
            if ledger.ordinal_at[page] != ledger.ordinal_at[parent_page] + 1:
                raise LawBroken(Law.L6, f"page {page} has ordinal {ledger.ordinal_at[page]} and cannot follow page {parent_page}")
            ledger.cached_at[page] = 1
        self._counts[_LEASED] -= 1
        self._counts[_SEALED] += 1
        ledger.state_at[page] = _SEALED
        ledger.filled_at[page] = self._page_tokens
        ledger.holder_at[page] = 0
        ledger.pins_at[page] = 1
        pack_into("16s", ledger.digest_at, DIGEST_BYTES * page, digest)
        del held[:2]
        pin.stamps.append(page)
        pin.stamps.append(nonce)
        return page, nonce

    def give_up(self, lease: Lease, keep_pages: int, next_ordinal: int) -> None:
        """Releases all but the first `keep_pages` pages of a lease (trim); it goes on with `next_ordinal`."""
        self._require_open(lease)
        gone = lease.stamps[2 * keep_pages :]
        del lease.stamps[2 * keep_pages :]
        lease.next_ordinal = next_ordinal
        self._leave(gone, _LEASED)

    def end_lease(self, lease: Lease) -> None:
        """For `Lease.release` alone."""
        self._leave(lease.stamps, _LEASED)

    # --- pins and the cache ---------------------------------------------------------------------------------

    def pin(self, stamps: array[int], scope: Scope) -> Pin:
        """The right to read the sealed pages with ordinals 0, 1, ... Raises `LawBroken` (L3, L4, L6, L7), and nothing has changed,
        unless every stamp is good."""
        self._settle_lost()
        pin = Pin(self, scope)
        self._pin(stamps, pin.scope_words, 0)
        pin.stamps.extend(stamps)
        return pin

    def replace_pins(self, pin: Pin, first: int, stamps: array[int]) -> None:
        """Pins other pages in the place of those from ordinal `first` on, and gives those back."""
        self._require_open(pin)
        self._pin(stamps, pin.scope_words, first)
        old = pin.stamps[2 * first : 2 * first + len(stamps)]
        pin.stamps[2 * first : 2 * first + len(stamps)] = stamps
        self._unpin(old)

    def unpin_tail(self, pin: Pin, keep_pages: int) -> array[int]:
        """Gives back all but the first `keep_pages` pages of a pin (trim); returns their stamps."""
        self._require_open(pin)
        gone = pin.stamps[2 * keep_pages :]
        del pin.stamps[2 * keep_pages :]
        self._unpin(gone)
        return gone

    def end_pin(self, pin: Pin) -> None:
        """For `Pin.release` alone."""
        self._unpin(pin.stamps)

    def evictable_among(self, stamps: array[int]) -> int:
        """How many of these pages are evictable now. O(pages named)."""
        return sum(map(self._is_evictable, stamps[::2]))

    def is_quiet(self, page: int) -> bool:
        """Neither pinned nor in flight."""
        return not (self.ledger.pins_at[page] or self.ledger.tickets_at[page])

    def require_sealed(self, stamps: array[int], scope_words: tuple[int, int], first_ordinal: int) -> None:
        """Raises `LawBroken` unless these are sealed pages of this scope with consecutive ordinals (L3, L4, L6, L7)."""
        self._require_current(stamps)
        self.ledger.require_sealed_run(stamps[::2], scope_words, first_ordinal)

    def enter_cache(self, stamps: array[int]) -> None:
        """The prefix cache now holds these sealed, pinned pages; they stay sealed when the last pin is gone."""
        if not runs.enter_cache(self.ledger, pages_of(stamps)):
            raise LawBroken(Law.L2, "a page enters the prefix cache twice, or with nobody holding it")

    def leave_cache(self, stamps: array[int]) -> None:
        """The prefix cache has let go of these pages; those that nobody pins go back."""
        ledger = self.ledger
        unpinned, pairs = array("Q"), iter(stamps)
        self._require_current(stamps)
        for page, nonce in zip(pairs, pairs, strict=True):
            if not ledger.cached_at[page]:
                raise LawBroken(Law.L2, f"page {page} leaves the prefix cache without being in it")
            self.evictable_pages -= self._is_evictable(page)
            ledger.cached_at[page] = 0
            if not ledger.pins_at[page]:
                unpinned.extend((page, nonce))
        self._leave(unpinned, _SEALED)

    def digest(self, page: int) -> bytes:
        return bytes(self.ledger.digest_at[DIGEST_BYTES * page : DIGEST_BYTES * (page + 1)])

    # --- tickets and quarantine -----------------------------------------------------------------------------

    def ticket(self, stamps: Sequence[int]) -> Ticket:
        """From now on these pages drain instead of becoming free, until the ticket is released."""
        self._settle_lost()
        ticket = Ticket(self)
        ledger, held = self.ledger, array("Q", stamps)
        self._require_current(held)
        for page in held[::2]:
            self.evictable_pages -= self._is_evictable(page)
            ledger.tickets_at[page] += 1
        ticket.stamps.extend(held)
        return ticket

    def end_ticket(self, ticket: Ticket, *, proven: bool = True) -> None:
        """For `Ticket.release` and `Ticket.expire` alone."""
        ledger = self.ledger
        drained, pairs = array("Q"), iter(ticket.stamps)
        self._require_current(ticket.stamps)
        for page, nonce in zip(pairs, pairs, strict=True):
            ledger.tickets_at[page] -= 1
            if not proven:
                ledger.doomed_at[page] = 1
            if ledger.state_at[page] == _DRAINING:
                drained.extend((page, nonce))
            else:
                self.evictable_pages += self._is_evictable(page)
        self._leave(drained, _DRAINING)

    def doom(self, page: int) -> None:
        """From its last holder's release on the page is in quarantine, not free."""
        self.evictable_pages -= self._is_evictable(page)
        self.ledger.doomed_at[page] = 1

    def readmit(self, proof: QuietProof) -> int:
        """Puts quarantined pages back to free; returns how many. Raises `LawBroken` (L8) unless every one is proven quiet."""
        stamps = array("Q", proof.stamps)
        if not proof.fence or len(set(stamps[::2])) != len(stamps) // 2:
            raise LawBroken(Law.L8, "quarantine is left with proof only, page by page")
        self._require_current(stamps)
        for page in stamps[::2]:
            if self.ledger.state_at[page] != _QUARANTINED or not self.is_quiet(page):
                raise LawBroken(Law.L8, f"page {page} is not quarantined, or is still in use")
        self._to_free(stamps[::2])
        return len(stamps) // 2

    def quarantined(self) -> array[int]:
        """Stamps of the pages in quarantine that no ticket is open on; what a `QuietProof` would name. O(pool)."""
        found, ledger = array("Q"), self.ledger
        for page in np.flatnonzero((ledger.state == _QUARANTINED) & (ledger.tickets == 0)).tolist():
            found.extend((page, ledger.nonce_at[page]))
        return found

    # --- proof ----------------------------------------------------------------------------------------------

    def note_lost(self, handle: Handle) -> None:
        """For `Handle.__del__` alone: remembers, and moves nothing (the collector may run in the middle of an operation)."""
        self._lost.append(handle)

    def check(self, memory: npt.NDArray[np.uint8] | None = None) -> None:
        """Proves conservation (L2) and that all columns agree; given the arena's memory [pages, page_bytes], compares every seal with
        the ledger. Raises `LawBroken`. O(pool)."""
        lost = self._settle_lost()
        counts = {state: self._counts[state] for state in PageState}
        audit(self.ledger, self._free[: self.free_pages], counts, self.evictable_pages)
        if memory is not None:
            compare_with_seals(self.ledger, memory, self.geometry)
        if lost:
            raise LawBroken(Law.L2, f"{lost} handles were lost without being released; their pages are in quarantine")

    # --- inside ---------------------------------------------------------------------------------------------

    def _settle_lost(self) -> int:
        """Nobody can say what a lost handle's owner still does, so its pages may not become free without proof."""
        settled = 0
        while self._lost:
            handle = self._lost.pop()
            for page in handle.stamps[::2]:
                self.doom(page)
            handle.release()
            self.lost_handles += 1
            settled += 1
        return settled

    def _require_open(self, handle: Handle) -> None:
        if not handle.open:
            raise LawBroken(Law.L2, f"a {type(handle).__name__.lower()} is used after its release")

    def _is_evictable(self, page: int) -> bool:
        """Evicting it would make it free."""
        ledger = self.ledger
        return bool(ledger.cached_at[page]) and not (ledger.pins_at[page] or ledger.tickets_at[page] or ledger.doomed_at[page])

    def _pin(self, stamps: array[int], scope_words: tuple[int, int], first_ordinal: int) -> None:
        self.require_sealed(stamps, scope_words, first_ordinal)
        pins_at = self.ledger.pins_at
        for page in stamps[::2]:
            if not pins_at[page] and self._is_evictable(page):
                self.evictable_pages -= 1
            pins_at[page] += 1

    def _unpin(self, stamps: array[int]) -> None:
        ledger, unpinned, pairs = self.ledger, array("Q"), iter(stamps)
        self._require_current(stamps)
        for page, nonce in zip(pairs, pairs, strict=True):
            if not ledger.pins_at[page]:
                raise LawBroken(Law.L2, f"page {page} is unpinned more often than pinned")
            ledger.pins_at[page] -= 1
            if ledger.pins_at[page]:
                continue
            if not ledger.cached_at[page]:
                unpinned.extend((page, nonce))
            else:
                self.evictable_pages += self._is_evictable(page)
        self._leave(unpinned, _SEALED)

    def _leave(self, stamps: array[int], state: int) -> None:
        """Pages whose last holder has left: to quarantine if doomed, draining while tickets are open, else free (L8)."""
        ledger, freed = self.ledger, array("Q")
        self._require_current(stamps)
        for page in stamps[::2]:
            if ledger.state_at[page] != state:
                raise LawBroken(Law.L2, f"page {page} is given back in state {PageState(ledger.state_at[page]).name}")
            ledger.holder_at[page] = 0
            if ledger.doomed_at[page]:
                self._move(page, _QUARANTINED)
            elif ledger.tickets_at[page]:
                self._move(page, _DRAINING)
            else:
                freed.append(page)
        if freed:
            self._to_free(freed)

    def _to_free(self, pages: array[int]) -> None:
        if self._wipe is not None:
            self._wipe(pages)
        ledger = self.ledger
        for page in pages:
            self._free_at[self._counts[_FREE]] = page
            self._move(page, _FREE)
            ledger.nonce_at[page] = 0
            ledger.doomed_at[page] = 0

    def _move(self, page: int, state: int) -> None:
        counts, state_at = self._counts, self.ledger.state_at
        counts[state_at[page]] -= 1
        counts[state] += 1
        state_at[page] = state
