"""E4 (vllm#42571, sglang#38941): a page is freed twice, so it is handed out twice."""

from __future__ import annotations

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import RequestId
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig

from .rigging import Unchecked, compute, prompt, read_from_strangers, row

OURS = prompt(1, 11)


def test_a_second_release_is_an_error_and_changes_nothing() -> None:
    rig = Rig(pages=8)
    grant = rig.kv.admit(RequestId("A"), SCOPE, OURS, first_tokens=11)
    assert grant is not None
    rig.kv.drop(grant)
    for again in (lambda: rig.kv.drop(grant), grant.lease.release, grant.pin.release):
        with pytest.raises(LawBroken, match="L2"):
            again()
    assert rig.kv.usage().free == 8
    rig.engine.check()


def test_overlapping_ranges_cannot_be_freed() -> None:
    rig = Rig(pages=8)
    lease = rig.kv.pool.reserve(3, SCOPE)
    assert lease is not None
    stamps = lease.stamps[:]
    lease.release()
    twin = rig.kv.pool.reserve(3, OTHER_SCOPE)
    assert twin is not None
    twin.stamps[:2] = stamps[:2]
    with pytest.raises(LawBroken):
        twin.release()


def test_a_page_twice_in_the_free_list_is_found() -> None:
    rig = Rig(pages=8)
    rig.kv.pool._free[0] = rig.kv.pool._free[1]
    with pytest.raises(LawBroken, match="L2"):
        rig.engine.check()


def twice(backend: type[OracleBackend], secret: int) -> object:
    """The free list is corrupted by hand: A's first page is handed out again while A runs."""
    rig = Rig(pages=8, backend_class=backend)
    grant = rig.kv.admit(RequestId("A"), SCOPE, OURS, first_tokens=12)
    assert grant is not None
    done = compute(rig, row("A", grant, OURS, 0)).rows[0]
    rig.kv.commit(grant, OURS, 11, done.page_digests)
    pool, page = rig.kv.pool, grant.table.stamps[0]
    pool._free_at[pool.free_pages - 1] = page
    thief = rig.kv.admit(RequestId("B"), OTHER_SCOPE, prompt(secret, 4), first_tokens=4)
    assert thief is not None and thief.table.stamps[0] == page
    compute(rig, row("B", thief, prompt(secret, 4), 0))
    return compute(rig, row("A", grant, [*OURS, 5], 11)).rows[0]


def test_the_first_holder_does_not_read_the_second() -> None:
    result = twice(OracleBackend, 11)
    assert result.broken is not None and result.broken.check == "nonce"  # type: ignore[attr-defined]


def test_without_the_seals_the_second_holder_would_have_answered() -> None:
    assert read_from_strangers(lambda secret: twice(Unchecked, secret))
