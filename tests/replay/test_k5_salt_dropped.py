"""K5 (vllm#51640, LMCache#2880): the salt is not carried to an outer tier, so one tenant hits what another has cached."""

from __future__ import annotations

from array import array

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import RequestId, Scope
from kvseal.kv.block_table import BlockTable
from kvseal.kv.prefix_key import scope_id
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import Rig, truth

from .rigging import Unchecked, compute, prompt, row

SECRET = b"0123456789abcdef"
MINE = scope_id(SECRET, "tenant", "my salt", "", b"weights")
YOURS = scope_id(SECRET, "tenant", "your salt", "", b"weights")
PROMPT = prompt(1, 10)


def test_another_salt_hits_nothing() -> None:
    rig = Rig()
    rig.answer("mine", PROMPT, 3, scope=MINE)
    yours = rig.answer("yours", PROMPT, 3, scope=YOURS)
    assert yours.cached_tokens == 0 and yours.tokens == truth(PROMPT, 3)
    assert rig.answer("again", PROMPT, 3, scope=MINE).cached_tokens == 8


def test_fields_do_not_run_into_each_other() -> None:
    assert scope_id(SECRET, "ab", "c", "", b"") != scope_id(SECRET, "a", "bc", "", b"")
    assert scope_id(SECRET, "a", "", "b", b"") != scope_id(SECRET, "a", "b", "", b"")


def test_a_lookup_that_drops_the_salt_cannot_pin() -> None:
    rig = Rig()
    rig.answer("mine", PROMPT, 3, scope=MINE)
    foreign = rig.kv.cache.probe(MINE, rig.kv.pack(PROMPT))
    assert foreign
    rig.kv.cache.probe = lambda scope, tokens: foreign  # type: ignore[method-assign]
    with pytest.raises(LawBroken, match="L4"):
        rig.kv.admit(RequestId("yours"), YOURS, PROMPT, first_tokens=2)


def read_across(backend: type[OracleBackend]) -> object:
    """A table of mine under your scope, as a tier without the salt would hand it over."""
    rig = Rig(backend_class=backend)
    rig.answer("mine", PROMPT, 3, scope=MINE)
    foreign: array[int] = rig.kv.cache.probe(MINE, rig.kv.pack(PROMPT))
    grant = rig.kv.admit(RequestId("yours"), Scope(YOURS), PROMPT, first_tokens=4)
    assert grant is not None
    table = BlockTable(YOURS, 4)
    table.extend(foreign)
    table.extend(grant.table.stamps[:2])
    return compute(rig, row("yours", grant, PROMPT, 8, table=table)).rows[0]


def test_and_the_kernel_would_not_read_it_either() -> None:
    result = read_across(OracleBackend)
    assert result.broken is not None and (result.broken.law, result.broken.check) == ("L4", "scope")  # type: ignore[attr-defined]


def test_without_the_seals_it_would_have_been_read() -> None:
    result = read_across(Unchecked)
    assert result.broken is None and result.token == truth(PROMPT, 1)[0]  # type: ignore[attr-defined]
