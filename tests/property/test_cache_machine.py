"""One state machine over pool, handles, prefix cache and manager, beside a small model in plain Python.

The model knows nothing of pages: only which tokens each request has committed, and, for each scope, which runs of tokens have been
published and may still be found. The arena is a model too: `write` puts (scope, tokens up to here) where a kernel would put K and V,
together with the seal, and refuses what a kernel refuses. So whoever reads a page reads what was really computed there. After every
rule all laws are checked: by `KVManager.check`, and by looking at the tables from outside.
"""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvseal.core.errors import BrokenSeal
from kvseal.core.ids import RequestId, Scope
from kvseal.core.laws import Law
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.handles import Ticket
from kvseal.kv.ledger import PageState
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.seal import SEAL_DTYPE, SEAL_MAGIC

PAGE = 4
GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=2, page_tokens=PAGE)
SCOPES = [Scope(bytes([letter]) * 16) for letter in b"ab"]
Run = tuple[int, ...]


@st.composite
def texts(draw: st.DrawFn, most_pages: int) -> list[int]:
    """At least one token, mostly whole pages of one of two letters, so that prefixes meet, end at seams and part in the middle."""
    letters = draw(st.lists(st.integers(0, 1), max_size=most_pages))
    tail = draw(st.lists(st.integers(0, 1), min_size=0 if letters else 1, max_size=PAGE))
    return [letter for letter in letters for _ in range(PAGE)] + tail


class Arena:
    """What stands in the pages: one seal each, and for each slot the whole history that its K and V would depend on."""

    def __init__(self, pages: int) -> None:
        self.memory = np.zeros((pages, GEOMETRY.page_bytes), np.uint8)
        self.seals = self.memory[:, :64].view(SEAL_DTYPE)[:, 0]
        self.slots: list[list[tuple[Scope, Run] | None]] = [[None] * PAGE for _ in range(pages)]

    def write(self, grant: Grant, history: Run, position: int) -> None:
        """`append` of one token: slot 0 begins a hand-out, the others go on where `filled` stands; a sealed page is never written."""
        ordinal, slot = divmod(position, PAGE)
        page, nonce = grant.table.stamps[2 * ordinal], grant.table.stamps[2 * ordinal + 1]
        seal = self.seals[page : page + 1]
        if slot == 0:
            assert seal["nonce"][0] != nonce, "a page is written twice in one hand-out"
            seal["magic"], seal["nonce"], seal["scope"] = SEAL_MAGIC, nonce, np.frombuffer(grant.scope, np.uint64)
            seal["format"], seal["ordinal"], seal["layer"], seal["digest"] = GEOMETRY.format, ordinal, 0, 0
        assert seal["nonce"][0] == nonce and (slot == 0 or seal["filled"][0] == slot) and not seal["digest"].any()
        self.slots[page][slot] = (grant.scope, history[: position + 1])
        seal["filled"] = slot + 1

    def read(self, grant: Grant, position: int) -> tuple[Scope, Run] | None:
        """`attend` on one token, with every comparison of the seal."""
        ordinal, slot = divmod(position, PAGE)
        page, nonce = grant.table.stamps[2 * ordinal], grant.table.stamps[2 * ordinal + 1]
        seal = self.seals[page]
        assert (seal["magic"], seal["nonce"], seal["ordinal"]) == (SEAL_MAGIC, nonce, ordinal)
        assert seal["scope"].tobytes() == grant.scope and seal["filled"] > slot
        return self.slots[page][slot]

    def digest(self, grant: Grant, ordinal: int) -> bytes:
        page = grant.table.stamps[2 * ordinal]
        self.seals[page : page + 1]["digest"] = 1
        return hashlib.blake2b(repr(self.slots[page]).encode(), digest_size=16).digest()


class CacheMachine(RuleBasedStateMachine):
    @initialize(pages=st.sampled_from([24, 16, 12, 8, 5, 3, 2, 1]))
    def start(self, pages: int) -> None:
        self.pages = pages
        capacity = Capacity.derive(model_context_tokens=10_000, pool_pages=pages, page_tokens=PAGE)
        self.wiped: list[int] = []
        self.kv = KVManager(GEOMETRY, pool_pages=pages, capacity=capacity, secret=b"machine", wipe=self.wiped.extend)
        self.arena = Arena(pages)
        self.grants: dict[RequestId, Grant] = {}
        self.committed: dict[RequestId, Run] = {}
        self.published: dict[Scope, set[Run]] = {scope: set() for scope in SCOPES}
        """Every run of whole pages that was ever published and not purged since: an upper bound of what may be hit."""
        self.untouched = set(SCOPES)
        """Scopes that nothing was ever taken from except by eviction."""
        self.in_flight: list[Ticket] = []
        self.asked = 0
        self.doomed: set[tuple[int, int]] = set()
        """Hand-outs that may not become free without `readmit`."""

    # --- what a scheduler does ------------------------------------------------------------------------------

    @rule(scope=st.sampled_from(SCOPES), tokens=texts(5), first=st.integers(1, 3 * PAGE), reuse=st.booleans(), reserve=st.integers(0, 3))
    def admit(self, scope: Scope, tokens: list[int], first: int, reuse: bool, reserve: int) -> None:
        self._admit(scope, tokens, first, reuse, reserve)

    def _admit(self, scope: Scope, tokens: list[int], first: int, reuse: bool, reserve: int) -> RequestId | None:
        self.asked += 1
        name = RequestId(f"r{self.asked}")
        before, cached, available = self.kv.usage(), self.kv.probe(scope, tokens), self.kv.available_pages
        assert self.kv.usage() == before, "looking changes nothing"
        assert cached % PAGE == 0 and cached < len(tokens)
        grant = self.kv.admit(name, scope, tokens, first_tokens=first, reuse=reuse, reserve_pages=reserve)
        if grant is None:
            assert self.kv.usage() == before and self.kv.available_pages == available, "refused means untouched"
            taken = (cached // PAGE if reuse else 0) + -(-first // PAGE)
            assert available - taken < reserve, "refused without need"
            return None
        assert grant.cached_tokens == (cached if reuse else 0)
        assert not grant.cached_tokens or tuple(tokens[:cached]) in self.published[scope], "a hit is something that was published"
        assert grant.room_tokens >= grant.cached_tokens + first
        assert self.kv.available_pages >= reserve
        self.grants[name], self.committed[name] = grant, tuple(tokens[: grant.cached_tokens])
        return name

    @rule(scope=st.sampled_from(SCOPES), tokens=texts(5), stays=st.booleans())
    def whole_request(self, scope: Scope, tokens: list[int], stays: bool) -> None:
        """The usual life: admitted, prompt computed, ended or left running."""
        name = self._admit(scope, tokens, 1, True, 0)
        if name is not None:
            self._compute(name, tokens[len(self.committed[name]) :])
            if not stays:
                self._forget(name)

    @rule(scope=st.sampled_from(SCOPES), tokens=texts(4), more=texts(2), broken=st.booleans())
    def twins(self, scope: Scope, tokens: list[int], more: list[int], broken: bool) -> None:
        """Two requests compute the same tokens at the same time; then one ends, perhaps of a broken seal, and the other goes on."""
        first, second = (self._admit(scope, tokens, 1, True, 0) for _ in range(2))
        for name in (first, second):
            if name is not None:
                self._compute(name, tokens[len(self.committed[name]) :])
        if first is None or second is None:
            return
        whole = min(len(self.committed[first]), len(self.committed[second])) // PAGE
        assert self.grants[first].table.stamps[: 2 * whole] == self.grants[second].table.stamps[: 2 * whole], "twins became one"
        if broken:
            self._break(first, 0, Law.L3)
        else:
            self._forget(first)
        self._compute(second, more)

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 99), tokens=texts(3))
    def purge_under_a_runner(self, which: int, tokens: list[int]) -> None:
        name = self._pick(which)
        self.kv.purge(self.grants[name].scope)
        self.published[self.grants[name].scope].clear()
        self.untouched.discard(self.grants[name].scope)
        self._compute(name, tokens)

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 99), tokens=texts(2))
    def compute(self, which: int, tokens: list[int]) -> None:
        self._compute(self._pick(which), tokens)

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        self._forget(self._pick(which))

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 99), place=st.integers(0, 99), law=st.sampled_from([Law.L3, Law.L4, Law.L5]))
    def break_a_seal(self, which: int, place: int, law: Law) -> None:
        self._break(self._pick(which), place, law)

    def _break(self, name: RequestId, place: int, law: Law) -> None:
        grant, history = self.grants.pop(name), self.committed.pop(name)
        if not grant.table.pages:
            self.kv.drop(grant)
            return
        ordinal = place % grant.table.pages
        page, nonce = grant.table.stamps[2 * ordinal], grant.table.stamps[2 * ordinal + 1]
        published = self.kv.cache.holds(page)
        self.untouched.discard(grant.scope)
        self.doomed.add((page, nonce))
        counted = self.kv.broken_seals[law]
        self.kv.drop(grant, broken=BrokenSeal(law, page=page, ordinal=ordinal, layer=0, check="nonce"))
        assert self.kv.broken_seals[law] == counted + 1
        assert not self.kv.cache.holds(page)
        if published:
            assert self.kv.probe(grant.scope, [*history, 0]) <= ordinal * PAGE, "what depends on a broken page is out of reach"

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 99), tokens=st.integers(0, 6 * PAGE))
    def trim(self, which: int, tokens: int) -> None:
        name = self._pick(which)
        history = self.committed[name]
        valid = self.kv.trim(self.grants[name], tokens)
        assert valid == (len(history) if tokens >= len(history) else tokens // PAGE * PAGE)
        self.committed[name] = history[:valid]

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 99))
    def step_in_flight(self, which: int) -> None:
        self.in_flight.append(self.kv.ticket(self.grants[self._pick(which)]))

    @precondition(lambda self: self.in_flight)
    @rule(proven=st.integers(0, 3))
    def step_ends(self, proven: int) -> None:
        ticket = self.in_flight.pop(0)
        if proven:
            ticket.release()
        else:
            self.doomed |= set(zip(ticket.stamps[::2], ticket.stamps[1::2], strict=True))
            ticket.expire()

    def _pick(self, which: int) -> RequestId:
        return list(self.grants)[which % len(self.grants)]

    def _forget(self, name: RequestId) -> None:
        self.kv.drop(self.grants.pop(name))
        del self.committed[name]

    def _compute(self, name: RequestId, tokens: list[int]) -> None:
        grant, start = self.grants[name], len(self.committed[name])
        history = (*self.committed[name], *tokens)
        if len(history) > self.pages * PAGE:
            return
        before, available, room = self.kv.usage(), self.kv.available_pages, grant.room_tokens
        if not self.kv.grow(grant, len(history)):
            assert self.kv.usage() == before and grant.room_tokens == room, "refused means untouched"
            assert -(-len(history) // PAGE) - room // PAGE > available, "refused without need"
            return
        for position in range(start, len(history)):
            self.arena.write(grant, history, position)
        digests = [self.arena.digest(grant, ordinal) for ordinal in range(start // PAGE, len(history) // PAGE)]
        self.kv.commit(grant, tokens, len(history), digests)
        self.committed[name] = history
        whole = len(history) // PAGE * PAGE
        self.published[grant.scope] |= {history[:end] for end in range(PAGE, whole + 1, PAGE)}

    @precondition(lambda self: self.asked % 4 == 3)
    @rule(scope=st.sampled_from(SCOPES))
    def purge(self, scope: Scope) -> None:
        self.kv.purge(scope)
        self.published[scope].clear()
        self.untouched.discard(scope)

    @rule(pages=st.integers(1, 4))
    def evict(self, pages: int) -> None:
        """As if somebody were short of pages: what is read or in flight stays."""
        ledger = self.kv.pool.ledger
        busy = np.flatnonzero((ledger.cached == 1) & ((ledger.pins > 0) | (ledger.tickets > 0)))
        available, idle = self.kv.available_pages, self.kv.usage().evictable
        assert self.kv.cache.evict(pages) >= min(pages, idle)
        assert self.kv.available_pages == available
        assert ledger.cached[busy].all()

    @rule()
    def readmit(self) -> None:
        quarantined = self.kv.usage().quarantined
        assert self.kv.readmit("the machine says so") + self.kv.usage().quarantined == quarantined
        self.doomed = {(page, nonce) for page, nonce in self.doomed if self.kv.ledger_nonces[page] == nonce}

    @precondition(lambda self: not self.grants and not self.in_flight)
    @rule()
    def nothing_is_lost_when_all_is_quiet(self) -> None:
        self.kv.cache.evict(self.pages)
        self.kv.readmit("all quiet")
        self.doomed.clear()
        assert self.kv.usage().free == self.pages

    # --- laws, from outside ---------------------------------------------------------------------------------

    @invariant()
    def every_law_that_the_cache_checks_itself(self) -> None:
        self.kv.check(self.arena.memory)

    @invariant()
    def every_request_reads_what_its_own_tokens_gave(self) -> None:
        """L3-L7, L10, L4k: the seals fit, and each slot holds the K and V of exactly this scope and this history."""
        for name, grant in self.grants.items():
            history = self.committed[name]
            assert grant.table.valid_tokens == len(history)
            for position in range(len(history)):
                assert self.arena.read(grant, position) == (grant.scope, history[: position + 1])

    @invariant()
    def whatever_was_published_is_found_until_it_is_taken_away(self) -> None:
        """Generated tokens too, while their writer runs and after; nothing else ever is (L7)."""
        if self.kv.usage().evicted_total:
            return
        for scope in self.untouched:
            for run in self.published[scope]:
                assert self.kv.probe(scope, [*run, 0]) >= len(run)

    @invariant()
    def no_page_is_shared_across_scopes_or_written_by_two(self) -> None:
        """L4, L7: a page in two tables is sealed and both are of one scope; a leased one is in one table."""
        readers: dict[int, list[Grant]] = {}
        for grant in self.grants.values():
            for page in grant.table.stamps[::2]:
                readers.setdefault(page, []).append(grant)
        for page, grants in readers.items():
            state = self.kv.pool.ledger.state[page]
            assert state in (PageState.LEASED, PageState.SEALED)
            assert len({grant.scope for grant in grants}) == 1
            assert len(grants) == 1 or state == PageState.SEALED

    @invariant()
    def conservation(self) -> None:
        """L2, seen from the published numbers, and from the ledger's column."""
        usage = self.kv.usage()
        assert usage.free + usage.leased + usage.sealed + usage.draining + usage.quarantined == usage.total == self.pages
        assert usage.evictable <= usage.sealed
        assert self.kv.available_pages <= usage.free + usage.sealed

    @invariant()
    def what_is_doomed_is_not_free(self) -> None:
        """L8: a hand-out that was broken, or that nobody proved to be over, is never given out again unproven."""
        ledger = self.kv.pool.ledger
        for page, nonce in self.doomed:
            assert ledger.nonce[page] == nonce and ledger.state[page] != PageState.FREE


CacheMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestCacheMachine = CacheMachine.TestCase
