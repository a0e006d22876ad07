"""E1 (vllm#37076): a prefix is looked up but not pinned; its blocks are evicted and handed out before they are read."""

from __future__ import annotations

from array import array

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import RequestId
from kvseal.kv.block_table import BlockTable
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig, truth

from .rigging import Unchecked, compute, prompt, read_from_strangers, row

SHARED = prompt(1, 16)


def stolen(backend: type[OracleBackend], secret: int) -> object:
    """Looks a cached prefix up, does not pin it, and lets the next tenant evict it."""
    rig = Rig(pages=8, backend_class=backend)
    rig.answer("first", SHARED, 2)
    hit: array[int] = rig.kv.cache.probe(SCOPE, rig.kv.pack(SHARED))
    assert len(hit) == 2 * 3
    rig.answer("thief", prompt(secret, 28), 3, scope=OTHER_SCOPE)
    rig.kv.purge(OTHER_SCOPE)
    fresh = rig.kv.admit(RequestId("a"), SCOPE, SHARED, first_tokens=4, reuse=False)
    assert fresh is not None
    table = BlockTable(SCOPE, 4)
    table.extend(hit)
    table.extend(fresh.table.stamps)
    table.valid_tokens = 12
    return compute(rig, row("a", fresh, SHARED, 12, table=table)).rows[0]


def test_stolen_pages_are_not_read() -> None:
    result = stolen(OracleBackend, 11)
    assert result.broken is not None and result.broken.law == "L3"  # type: ignore[attr-defined]


def test_without_the_seals_the_thief_would_have_answered() -> None:
    assert read_from_strangers(lambda secret: stolen(Unchecked, secret))


def test_pinning_what_was_evicted_meanwhile_is_an_error() -> None:
    rig = Rig(pages=8)
    rig.answer("first", SHARED, 2)
    hit = rig.kv.cache.probe(SCOPE, rig.kv.pack(SHARED))
    rig.answer("thief", prompt(3, 28), 3, scope=OTHER_SCOPE)
    with pytest.raises(LawBroken, match="L3"):
        rig.kv.pool.pin(hit, SCOPE)


def test_admission_pins_what_it_finds() -> None:
    rig = Rig(pages=8)
    rig.answer("first", SHARED, 2)
    reader = rig.submit("reader", SHARED, 6)
    rig.step()
    thief = rig.submit("thief", prompt(3, 28), 3, scope=OTHER_SCOPE)
    rig.run()
    assert reader.cached_tokens == 12
    assert reader.tokens == truth(SHARED, 6) and thief.tokens == truth(prompt(3, 28), 3)
