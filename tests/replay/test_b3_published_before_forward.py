"""B3 (vllm#38606, vllm#37152): a block is published when it is scheduled, before its forward; a request with the same prefix hits it."""

from __future__ import annotations

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import RequestId
from kvseal.kv.manager import Grant
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import SCOPE, Rig

from .rigging import Unchecked, compute, prompt, read_from_strangers, row, stranger

PROMPT = prompt(1, 10)


def admit(rig: Rig, name: str, tokens: list[int]) -> Grant:
    grant = rig.kv.admit(RequestId(name), SCOPE, tokens, first_tokens=len(tokens))
    assert grant is not None
    return grant


def publish_early(rig: Rig, grant: Grant, tokens: list[int]) -> None:
    """What `commit` does after the forward, done before it, with made-up evidence."""
    pages = len(tokens) // 4
    for page in grant.lease.stamps[: 2 * pages : 2]:
        rig.kv.pool.commit(grant.lease, page, 4)
    sealed = rig.kv.pool.seal(grant.lease, grant.pin, (bytes(16),) * pages)
    packed = rig.kv.pack(tokens[: 4 * pages])
    rig.kv.cache.publish(grant.pin, None, packed.data, sealed)


def second_reader(backend: type[OracleBackend], secret: int) -> object:
    rig = Rig(pages=16, backend_class=backend)
    stranger(rig, secret)
    publish_early(rig, admit(rig, "first", PROMPT), PROMPT)
    second = rig.kv.admit(RequestId("second"), SCOPE, PROMPT, first_tokens=2)
    assert second is not None and second.cached_tokens == 8
    return compute(rig, row("second", second, PROMPT, 8)).rows[0]


def test_the_kernel_refuses_pages_that_still_bear_old_seals() -> None:
    result = second_reader(OracleBackend, 11)
    assert result.broken is not None and result.broken.check == "nonce" and result.token is None  # type: ignore[attr-defined]


def test_without_the_seals_the_stranger_would_have_answered() -> None:
    assert read_from_strangers(lambda secret: second_reader(Unchecked, secret))


def test_pages_cannot_be_sealed_without_evidence() -> None:
    rig = Rig(pages=16)
    grant = admit(rig, "first", PROMPT)
    with pytest.raises(LawBroken, match="L7"):
        rig.kv.pool.seal(grant.lease, grant.pin, (b"",))
    with pytest.raises(LawBroken, match="L7"):
        rig.kv.commit(grant, PROMPT, 10, ())


def test_the_engine_publishes_after_the_forward_only() -> None:
    rig = Rig(pages=16)
    rig.submit("first", PROMPT, 2)
    batch = rig.scheduler.schedule()
    assert rig.kv.probe(SCOPE, PROMPT) == 0
    rig.scheduler.apply(rig.runner.run(batch, rig.kv.ledger_nonces))
    assert rig.kv.probe(SCOPE, PROMPT) == 8
