"""The manager: the scheduler's only door to the cache.

Owns the order of things that needs pool and prefix cache at once: look first, then take, all or nothing. The scheduler sees grants and
counts; never the pool, the tree or a page. Laws: L1 (room within the served context), L2 (a grant is dropped once), L5 (tokens become
valid by `commit` alone), L7 (pages are published when sealed), L10 (`trim`), L11, L12 (`drop` with a broken seal contains it), L13 (two
computations of the same page must have the same digest).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvseal.core.errors import BrokenSeal, LawBroken
from kvseal.core.ids import RequestId, Scope
from kvseal.core.laws import Law
from kvseal.kv.block_table import BlockTable
from kvseal.kv.capacity import Capacity, Verdict
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.handles import Lease, Pin, Ticket
from kvseal.kv.ledger import PageState
from kvseal.kv.pool import PagePool, QuietProof
from kvseal.kv.prefix_cache import PrefixCache
from kvseal.kv.prefix_key import PackedTokens, pack_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """Pages by state (they sum to `total`), and what the cache could give up or has given up."""

    free: int
    leased: int
    sealed: int
    draining: int
    quarantined: int
    total: int
    evictable: int
    evicted_total: int


class Grant:
    """What one running request holds: a table, the right to read its sealed pages and to write the others. Ended by `KVManager.drop`."""

    __slots__ = ("__weakref__", "cached_tokens", "lease", "open", "pin", "request_id", "room_tokens", "scope", "table", "tokens")

    def __init__(self, request_id: RequestId, table: BlockTable, lease: Lease, pin: Pin, tokens: array[int]) -> None:
        self.request_id = request_id
        self.scope = table.scope
        self.table = table
        self.lease = lease
        self.pin = pin
        self.tokens = tokens
        """The committed tokens, typecode 'I': what the pages were computed from."""
        self.cached_tokens = len(tokens)
        """Tokens that were not computed here: taken from the prefix cache at admission, or handed over by another node."""
        self.room_tokens = table.room_tokens
        """Positions below this have a page: `KVManager.grow` is needed only at or past it."""
        self.open = True


class KVManager:
    """`secret` belongs to this process alone: the nonces come from it. `wipe` zeroes pages that go back to free (`--wipe-pages`)."""

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        pool_pages: int,
        capacity: Capacity,
        secret: bytes,
        wipe: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        if capacity.pool_pages != pool_pages or capacity.page_tokens != geometry.page_tokens:
            raise LawBroken(Law.L1, "the capacity was derived from another pool than this one")
        self.geometry = geometry
        self.capacity = capacity
        self.pool = PagePool(geometry, pool_pages, secret=secret, wipe=wipe)
        self.cache = PrefixCache(self.pool)
        self.ledger_nonces: npt.NDArray[np.uint64] = self.pool.ledger.nonce
        self.broken_seals: Counter[Law] = Counter()
        """By law; every violation that reached `drop`, and differing twins (L13)."""
        self.hit_tokens = 0
        """Tokens of all admissions that were taken from the cache."""
        self._page_tokens = geometry.page_tokens
        # Weak, so that a grant that the scheduler has lost is collected, and noticed by its handles.
        self._grants: WeakValueDictionary[RequestId, Grant] = WeakValueDictionary()

    # --- before admission -----------------------------------------------------------------------------------

    @property
    def available_pages(self) -> int:
        """Free, or free as soon as they are wanted."""
        return self.pool.free_pages + self.pool.evictable_pages

    @property
    def free_pages(self) -> int:
        """Free without anything cached giving way."""
        return self.pool.free_pages

    def verdict(self, prompt_tokens: int, max_output_tokens: int) -> Verdict:
        """Whether such a request fits now, later or never, pages in quarantine not counted (L1)."""
        return self.capacity.verdict(
            prompt_tokens,
            max_output_tokens,
            available_pages=self.available_pages,
            quarantined_pages=self.pool.count(PageState.QUARANTINED),
        )

    def pack(self, tokens: Sequence[int]) -> PackedTokens:
        """For a prompt that will be probed more than once: packed now, compared at memory speed from then on."""
        return pack_tokens(tokens)

    def probe(self, scope: Scope, tokens: Sequence[int] | PackedTokens) -> int:
        """How many of these tokens are cached: whole pages, and never all of them. Reads only."""
        return len(self.cache.probe(scope, pack_tokens(tokens))) // 2 * self._page_tokens

    def admit(
        self,
        request_id: RequestId,
        scope: Scope,
        tokens: Sequence[int] | PackedTokens,
        *,
        first_tokens: int,
        reuse: bool = True,
        reserve_pages: int = 0,
    ) -> Grant | None:
        """Pins what is cached and leases pages for the first `first_tokens` tokens after it; or None, and nothing has changed.

        None means short of pages, evictable ones included, or fewer than `reserve_pages` would stay available afterwards.
        """
        if request_id in self._grants:
            raise LawBroken(Law.L11, "a request is admitted that is running already")
        packed = pack_tokens(tokens)
        hit = self.cache.probe(scope, packed) if reuse else array("Q")
        hit_pages = len(hit) // 2
        hit_tokens = hit_pages * self._page_tokens
        new_pages = self.capacity.pages_for(hit_tokens + first_tokens) - hit_pages
        if self.available_pages - self.pool.evictable_among(hit) - new_pages < reserve_pages:
            return None
        pin = self.cache.pin(scope, hit)
        if new_pages > self.pool.free_pages:
            self._make_room(new_pages)
        lease = self.pool.reserve(new_pages, scope, first_ordinal=hit_pages)
        if lease is None:
            raise LawBroken(Law.L2, "pages that were counted as available are not")
        table = BlockTable(scope, self._page_tokens)
        table.extend(hit)
        table.extend(lease.stamps)
        if hit:
            table.advance(hit_tokens)
        self.hit_tokens += hit_tokens
        grant = Grant(request_id, table, lease, pin, packed.first(hit_tokens))
        self._grants[request_id] = grant
        return grant

    # --- while it runs --------------------------------------------------------------------------------------

    def grow(self, grant: Grant, end_tokens: int) -> bool:
        """Room for the positions below `end_tokens`; or False, and nothing has changed. Not needed below `grant.room_tokens`."""
        if end_tokens <= grant.room_tokens:
            return True
        self._require_open(grant)
        if end_tokens > self.capacity.served_context_tokens:
            raise LawBroken(Law.L1, f"room for {end_tokens} tokens is asked, {self.capacity.served_context_tokens} are served")
        new_pages = -((grant.room_tokens - end_tokens) // self._page_tokens)
        if new_pages > self.pool.free_pages:
            if new_pages > self.available_pages:
                return False
            self._make_room(new_pages)
        stamps = self.pool.extend(grant.lease, new_pages)
        if stamps is None:
            raise LawBroken(Law.L2, "pages that were counted as available are not")
        grant.table.extend(stamps)
        grant.room_tokens += new_pages * self._page_tokens
        return True

    def grow_each(self, grants: Sequence[Grant]) -> bool:
        """`grow` for many, each by the token after its valid ones; or False, and nothing has changed."""
        full = [grant for grant in grants if grant.table.valid_tokens >= grant.room_tokens]
        if len(full) > self.pool.free_pages:
            if len(full) > self.available_pages:
                return False
            self._make_room(len(full))
        size, served = self._page_tokens, self.capacity.served_context_tokens
        for grant in full:
            if not grant.open or grant.room_tokens >= served:
                self.grow(grant, grant.room_tokens + 1)
            stamps = grant.table.stamps
            stamps.extend(self.pool.extend_one(grant.lease))
            grant.room_tokens += size
        return True

    def commit(self, grant: Grant, tokens: Sequence[int], end_tokens: int, page_digests: Sequence[bytes] = ()) -> None:
        """After a whole forward, which computed `tokens` at the positions from `valid_tokens` to `end_tokens`: they are valid now.

        Pages that are full now are sealed with one digest each and published. Where another request has published the same tokens
        meanwhile, the digests are compared (L13) and this request reads that page from now on; its own goes back. So there is one
        copy of each run, and a request's table is a path of the tree. Raises `LawBroken` (L5, L7) on counts that do not match.
        """
        table = grant.table
        if table.valid_tokens + 1 == end_tokens <= grant.room_tokens and len(tokens) == 1:
            inside_page = end_tokens % self._page_tokens
            if inside_page and not page_digests:  # nearly every commit there is
                table.valid_tokens = end_tokens
                grant.tokens.append(tokens[0])
                return
            if not inside_page and len(page_digests) == 1:  # and nearly every other
                self._require_open(grant)
                table.valid_tokens = end_tokens
                grant.tokens.append(tokens[0])
                self._seal_one(grant, end_tokens, page_digests[0])
                return
        self._require_open(grant)
        first_page, full_pages = table.valid_tokens // self._page_tokens, end_tokens // self._page_tokens
        if len(tokens) != end_tokens - table.valid_tokens:
            raise LawBroken(Law.L5, f"{len(tokens)} tokens cannot take {table.valid_tokens} valid tokens to {end_tokens}")
        if len(page_digests) != full_pages - first_page:
            raise LawBroken(Law.L7, f"{len(page_digests)} digests for {full_pages - first_page} pages that are full now")
        table.advance(end_tokens)
        grant.tokens.extend(tokens)
        if page_digests:
            self._seal(grant, first_page, page_digests)

    def commit_each(
        self, grants: Sequence[Grant], starts: Sequence[int], tokens: Sequence[int], page_digests: Sequence[tuple[bytes, ...]]
    ) -> None:
        """`commit` for many after one step: to each the token that was computed at its start, and the digest of the page that it filled.
        One loop, since for nearly every token the call would cost more than what is done in it."""
        size = self._page_tokens
        for grant, start, token, digests in zip(grants, starts, tokens, page_digests, strict=True):
            table, end = grant.table, start + 1
            if table.valid_tokens != start or end > grant.room_tokens or len(digests) != (not end % size):
                self.commit(grant, (token,), end, digests)  # refuses
            else:
                table.valid_tokens = end
                grant.tokens.append(token)
                if digests:
                    self._seal_one(grant, end, digests[0])

    def trim(self, grant: Grant, tokens: int) -> int:
        """Takes back the tokens from position `tokens` on; returns how many are valid now: a page is written once, front to back, so
        the whole page that a cut goes through is gone and its first tokens are computed again (L10)."""
        self._require_open(grant)
        table = grant.table
        if tokens >= table.valid_tokens:
            return table.valid_tokens
        keep = tokens // self._page_tokens
        table.trim(keep)
        del grant.tokens[table.valid_tokens :]
        grant.room_tokens = table.room_tokens
        self.pool.give_up(grant.lease, max(0, keep - grant.pin.pages), keep)
        self.cache.unpinned(self.pool.unpin_tail(grant.pin, keep))
        return table.valid_tokens

    def ticket(self, grant: Grant) -> Ticket:
        """For a step in flight: until it is released, pages of this grant that are given back drain instead of becoming free (L8)."""
        self._require_open(grant)
        return self.pool.ticket(grant.table.stamps)

    def settle(self, tickets: Sequence[Ticket], broken: Sequence[BrokenSeal]) -> None:
        """The step that these tickets were taken for is over. Pages of theirs that it found broken go to quarantine, not to free: the
        requests that held them have been dropped while it ran (L12)."""
        for ticket in tickets:
            for seal in broken:
                if seal.page in ticket.stamps[::2]:
                    self._condemn(seal.page)
            ticket.release()

    def drop(self, grant: Grant, *, broken: BrokenSeal | None = None) -> None:
        """End, preemption or abort, exactly once. Published pages stay cached. With `broken`, the page that it names goes to
        quarantine if this grant holds it, and whatever was computed from it is never hit again (L12)."""
        self._require_open(grant)
        grant.open = False
        grant.room_tokens = 0  # nothing can be committed to it any more
        self._grants.pop(grant.request_id, None)
        if broken is not None:
            self.broken_seals[broken.law] += 1
            # A stale stamp names a page that is somebody else's by now: theirs is not touched.
            if broken.page in grant.pin.stamps[::2] or broken.page in grant.lease.stamps[::2]:
                self._condemn(broken.page)
        grant.lease.release()
        grant.pin.release()
        self.cache.unpinned(grant.pin.stamps)

    # --- the whole ------------------------------------------------------------------------------------------

    def purge(self, scope: Scope) -> int:
        """Forgets what is cached for a scope; returns the number of pages. Those that a running request reads go when it ends."""
        return self.cache.purge(scope)

    def readmit(self, fence: str) -> int:
        """Puts all quarantined pages back into use on the strength of `fence` (what proved that nothing touches them any more)."""
        return self.pool.readmit(QuietProof(self.pool.quarantined(), fence))

    def usage(self) -> PoolUsage:
        return PoolUsage(
            free=self.pool.count(PageState.FREE),
            leased=self.pool.count(PageState.LEASED),
            sealed=self.pool.count(PageState.SEALED),
            draining=self.pool.count(PageState.DRAINING),
            quarantined=self.pool.count(PageState.QUARANTINED),
            total=self.pool.pages,
            evictable=self.pool.evictable_pages,
            evicted_total=self.cache.evicted_pages,
        )

    def check(self, memory: npt.NDArray[np.uint8] | None = None) -> None:
        """Proves the laws over pool, cache and live grants; with the arena's memory [pages, page_bytes], over the seals too. O(pool)."""
        for grant in self._grants.values():
            full, filled = divmod(grant.table.valid_tokens, self._page_tokens)
            if filled:
                self.pool.commit(grant.lease, grant.table.stamps[2 * full], filled)
        self.pool.check(memory)
        self.cache.check()
        ledger = self.pool.ledger
        pins = np.zeros(self.pool.pages, np.uint32)
        for grant in self._grants.values():
            table, pages = grant.table, np.array(grant.table.stamps[::2], dtype=np.int64)
            if grant.pin.stamps + grant.lease.stamps != table.stamps or grant.room_tokens != table.room_tokens:
                raise LawBroken(Law.L4, "a block table names other pages than its grant holds")
            if not np.array_equal(ledger.ordinal[pages], np.arange(len(pages))):
                raise LawBroken(Law.L6, "a page stands at another place in its block table than its ordinal")
            if len(grant.tokens) != table.valid_tokens or grant.pin.pages != table.valid_tokens // self._page_tokens:
                raise LawBroken(Law.L5, "valid tokens, committed tokens and sealed pages of a grant disagree")
            held = pages[grant.pin.pages :]
            if np.any(ledger.holder[held] != grant.lease.holder) or np.any(ledger.scope[pages] != ledger.scope[pages[:1]]):
                raise LawBroken(Law.L4, "a block table names pages of another holder or scope")
            pins[pages[: grant.pin.pages]] += 1
        if np.any(pins > ledger.pins):
            raise LawBroken(Law.L2, "a page has fewer pins than readers")

    # --- inside ---------------------------------------------------------------------------------------------

    def _require_open(self, grant: Grant) -> None:
        if not grant.open:
            raise LawBroken(Law.L2, "a grant is used after it was dropped")

    def _condemn(self, page: int) -> None:
        self.pool.doom(page)
        self.cache.forget(page)

    def _make_room(self, pages: int) -> None:
        self.cache.evict(pages - self.pool.free_pages)

    def _seal_one(self, grant: Grant, end_tokens: int, digest: bytes) -> None:
        """`_seal` for the page that decoding has just filled."""
        page = end_tokens // self._page_tokens - 1
        run = grant.tokens[end_tokens - self._page_tokens :].tobytes()
        if not page or not self.cache.seal_one(grant.lease, grant.pin, grant.table.stamps[2 * page - 2], run, digest):
            self._publish(grant, page, array("Q", self.pool.seal_one(grant.lease, grant.pin, digest)), (digest,))

    def _seal(self, grant: Grant, first_page: int, digests: Sequence[bytes]) -> None:
        self._publish(grant, first_page, self.pool.seal(grant.lease, grant.pin, digests), digests)

    def _publish(self, grant: Grant, first_page: int, sealed: array[int], digests: Sequence[bytes]) -> None:
        size = self._page_tokens
        parent = grant.table.stamps[2 * first_page - 2] if first_page else None
        if parent is not None and not self.cache.holds(parent):
            return  # what it follows was forgotten: its pages stay its own, and go with it
        run = grant.tokens[first_page * size : (first_page + len(digests)) * size].tobytes()
        known = self.cache.publish(grant.pin, parent, run, sealed)
        if known:
            self._share(grant, first_page, known, digests)

    def _share(self, grant: Grant, first_page: int, known: array[int], digests: Sequence[bytes]) -> None:
        """Reads the twin that was there first, as far as the digests agree. Where they differ, neither can be trusted."""
        same = 0
        for page, digest in zip(known[::2], digests, strict=False):
            if self.pool.digest(page) != digest:
                self.broken_seals[Law.L13] += 1
                self.cache.forget(page)
                break
            same += 1
        twins = known[: 2 * same]
        self.pool.replace_pins(grant.pin, first_page, twins)
        grant.table.swap(first_page, twins)
