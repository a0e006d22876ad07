"""D5 (vllm#52360): an asynchronous store reads a request's blocks after its preemption and keeps the new owner's K and V under the
old key. Injected: somebody remembers a block table past the drop of its grant."""

from __future__ import annotations

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import RequestId
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig

from .rigging import Unchecked, compute, prompt, read_from_strangers, row, stale_copy

OURS = prompt(1, 11)


def remembered(backend: type[OracleBackend], secret: int) -> tuple[Rig, object]:
    """Computes with a table whose pages belong to the next tenant by now."""
    rig = Rig(pages=3, backend_class=backend)
    grant = rig.kv.admit(RequestId("A"), SCOPE, OURS, first_tokens=11)
    assert grant is not None
    done = compute(rig, row("A", grant, OURS, 0)).rows[0]
    rig.kv.commit(grant, OURS, 11, done.page_digests)
    table = stale_copy(grant)
    rig.kv.drop(grant)
    rig.kv.purge(SCOPE)
    rig.answer("next", prompt(secret, 10), 2, scope=OTHER_SCOPE)
    return rig, compute(rig, row("A", grant, [*OURS, 5], 11, table=table)).rows[0]


def test_a_late_read_is_refused() -> None:
    _, result = remembered(OracleBackend, 11)
    assert result.broken is not None and result.broken.check == "nonce"  # type: ignore[attr-defined]


def test_a_late_store_cannot_pin_or_publish() -> None:
    rig = Rig(pages=3)
    grant = rig.kv.admit(RequestId("A"), SCOPE, OURS, first_tokens=11)
    assert grant is not None
    stamps = grant.table.stamps[:]
    rig.kv.drop(grant)
    rig.answer("next", prompt(2, 10), 2, scope=OTHER_SCOPE)
    for late in (rig.kv.pool.ticket, lambda old: rig.kv.pool.pin(old, SCOPE)):
        with pytest.raises(LawBroken, match="L3"):
            late(stamps)
    with pytest.raises(LawBroken):
        rig.kv.pool.enter_cache(stamps)
    with pytest.raises(LawBroken, match="L2"):
        rig.kv.commit(grant, OURS, 11, (bytes(16),) * 2)


def test_without_the_seals_the_new_owner_would_have_answered() -> None:
    assert read_from_strangers(lambda secret: remembered(Unchecked, secret)[1])
