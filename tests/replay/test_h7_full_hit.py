"""H7 (sglang#22819 and others): the prompt is cached to its last token, or a trim is off by one; the first token is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Completed
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.prefix_key import PackedTokens, pack_tokens
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import Rig, truth

from .rigging import Unchecked, broken_seal, prompt, stranger


@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_around_every_page_end_a_hit_is_a_miss(tokens: int, page_tokens: int) -> None:
    rig = Rig(pages=64, page_tokens=page_tokens)
    cold = rig.answer("cold", prompt(1, tokens), 5)
    warm = rig.answer("warm", prompt(1, tokens), 5)
    assert warm.cached_tokens == (tokens - 1) // page_tokens * page_tokens < tokens
    assert cold.tokens == warm.tokens == truth(prompt(1, tokens), 5)


class OffByOne(KVManager):
    """Believes that one token more than was found is there."""

    off_by_one = False

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
        if self.off_by_one and grant is not None and grant.cached_tokens:
            grant.table.valid_tokens += 1
            grant.tokens = pack_tokens(tokens).first(grant.table.valid_tokens)
        return grant


def one_too_many(backend: type[OracleBackend]) -> Rig:
    rig = Rig(pages=16, backend_class=backend, manager_class=OffByOne)
    stranger(rig, 11)
    rig.answer("cold", [*prompt(1, 8), 5, 6], 2)
    assert isinstance(rig.kv, OffByOne)
    rig.kv.off_by_one = True
    rig.submit("warm", prompt(1, 10), 2)
    rig.run(checked=False)
    return rig


def test_the_slot_that_was_skipped_stops_the_request() -> None:
    broken = broken_seal(one_too_many(OracleBackend).answers["warm"].outcome)
    assert broken.check in ("nonce", "magic", "filled")


def test_without_the_seals_the_answer_would_have_been_wrong() -> None:
    warm = one_too_many(Unchecked).answers["warm"]
    assert isinstance(warm.outcome, Completed) and warm.tokens != truth(prompt(1, 10), 2)
