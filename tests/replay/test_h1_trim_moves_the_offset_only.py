"""H1 (vllm-mlx#385): a trim moves the offset and leaves the arrays; readers that go by the raw buffer read what was trimmed, and later what
others put there. 11 % of the answers were foreign."""

from __future__ import annotations

from kvseal.core.ids import RequestId
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig, truth

from .rigging import Unchecked, compute, prompt, read_from_strangers, row, stale_copy

LONG = prompt(1, 15)


def trimmed(backend: type[OracleBackend], secret: int) -> object:
    """Trims a sequence to its first page; the next tenant gets the rest; somebody still goes by the old length."""
    rig = Rig(pages=4, backend_class=backend)
    grant = rig.kv.admit(RequestId("A"), SCOPE, LONG, first_tokens=16)
    assert grant is not None
    done = compute(rig, row("A", grant, LONG, 0)).rows[0]
    rig.kv.commit(grant, LONG, 15, done.page_digests)
    raw = stale_copy(grant)
    assert rig.kv.trim(grant, 5) == 4
    rig.kv.purge(SCOPE)
    rig.answer("next", prompt(secret, 10), 2, scope=OTHER_SCOPE)
    return compute(rig, row("A", grant, [*LONG, 5], 15, table=raw)).rows[0]


def test_what_was_trimmed_is_not_read() -> None:
    result = trimmed(OracleBackend, 11)
    assert result.broken is not None and result.broken.law == "L3"  # type: ignore[attr-defined]


def test_without_the_seals_the_next_tenant_would_have_answered() -> None:
    assert read_from_strangers(lambda secret: trimmed(Unchecked, secret))


def test_after_a_trim_the_rest_is_computed_again_and_exact() -> None:
    rig = Rig(pages=8)
    grant = rig.kv.admit(RequestId("A"), SCOPE, LONG, first_tokens=16)
    assert grant is not None
    done = compute(rig, row("A", grant, LONG, 0)).rows[0]
    rig.kv.commit(grant, LONG, 15, done.page_digests)
    other = LONG[:5] + prompt(2, 6)
    valid = rig.kv.trim(grant, 5)
    assert rig.kv.grow(grant, len(other))
    assert compute(rig, row("A", grant, other, valid)).rows[0].token == truth(other, 1)[0]
