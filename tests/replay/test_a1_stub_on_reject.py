"""A1 (sglang#30233): an oversize prompt is "rejected" by replacing it with a one-token stub that stays live. One page is written,
all reserved pages are read, and the client gets 200 with other users' text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvseal.core.errors import ContextLengthExceeded
from kvseal.core.ids import RequestId, Scope
from kvseal.core.laws import Law
from kvseal.core.outcome import Completed, Refused
from kvseal.kv.capacity import NeverFits
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.prefix_key import PackedTokens, pack_tokens
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import Rig

from .rigging import Unchecked, broken_seal, prompt, read_from_strangers, stranger

PROMPT = prompt(1, 30)


class StubManager(KVManager):
    """Reserves for the whole prompt and claims that all but its last token are there: length follows the reservation (against L5)."""

    stubbing = False

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
        grant = super().admit(request_id, scope, tokens, first_tokens=first_tokens, reuse=reuse, reserve_pages=reserve_pages)
        if self.stubbing and grant is not None:
            packed = pack_tokens(tokens)
            grant.table.valid_tokens = len(packed) - 1
            grant.tokens = packed.first(len(packed) - 1)
        return grant


def stubbed(backend: type[OracleBackend], secret: int) -> Rig:
    rig = Rig(pages=16, backend_class=backend, manager_class=StubManager)
    stranger(rig, secret)
    StubManager.stubbing = True
    try:
        rig.submit("victim", PROMPT, 1)
        rig.step()
    finally:
        StubManager.stubbing = False
    return rig


@pytest.mark.parametrize("output_tokens", [34, 35])
def test_first_layer_refuses_before_anything_is_reserved(output_tokens: int) -> None:
    rig = Rig(pages=16)
    answer = rig.submit("a", PROMPT, output_tokens)
    if output_tokens == 34:  # exactly the limit
        assert answer.outcome is None
        return
    assert isinstance(answer.outcome, Refused) and isinstance(answer.outcome.error, ContextLengthExceeded)
    assert isinstance(rig.kv.verdict(30, output_tokens), NeverFits)
    assert rig.kv.usage().free == 16 and not rig.engine.has_work


def test_last_layer_the_kernel_does_not_read_what_was_never_written() -> None:
    broken = broken_seal(stubbed(OracleBackend, 11).answers["victim"].outcome)
    assert (broken.law, broken.check) == (Law.L3, "nonce")


def test_without_the_seals_the_stranger_would_have_answered() -> None:
    def answer(secret: int) -> object:
        victim = stubbed(Unchecked, secret).answers["victim"]
        assert isinstance(victim.outcome, Completed)
        return victim.tokens

    assert read_from_strangers(answer)
