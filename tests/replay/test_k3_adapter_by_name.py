"""K3 (vllm#30931, vllm#42125, vllm#3264, vllm#44250, llm-d-kv-cache#189): an adapter is keyed by its name, or not at all; after it is
loaded again with other weights its old K and V are hit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvseal.core.ids import RequestId
from kvseal.kv.prefix_key import scope_id
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import Rig, truth

from .rigging import Unchecked, compute, prompt, row

SECRET = b"0123456789abcdef"
OLD = scope_id(SECRET, "tenant", "", "adapter-content-1", b"weights")
NEW = scope_id(SECRET, "tenant", "", "adapter-content-2", b"weights")
OTHER_WEIGHTS = scope_id(SECRET, "tenant", "", "adapter-content-1", b"other weights")
PROMPT = prompt(1, 10)


def test_content_is_part_of_the_scope() -> None:
    assert len({OLD, NEW, OTHER_WEIGHTS}) == 3


def test_a_reloaded_adapter_hits_nothing_of_the_old_one() -> None:
    rig = Rig()
    rig.answer("old", PROMPT, 3, scope=OLD)
    assert rig.answer("same", PROMPT, 3, scope=OLD).cached_tokens == 8
    fresh = rig.answer("new", PROMPT, 3, scope=NEW)
    assert fresh.cached_tokens == 0 and fresh.tokens == truth(PROMPT, 3)


class OtherWeights(OracleBackend):
    """The model after the reload: the same shapes, other values, hence another format."""

    def _row(self, row, tokens, start, step):  # type: ignore[no-untyped-def]
        return super()._row(row, tokens ^ np.uint64(0x5555), start, step)


class OtherWeightsUnchecked(OtherWeights, Unchecked):
    pass


def reloaded(backend: type[OracleBackend], *, cached: bool) -> object:
    """One scope for both, as if keyed by name; the second model reads what the first one computed."""
    rig = Rig(pages=16)
    if cached:
        rig.answer("old", PROMPT, 3)
    geometry = replace(rig.backend.geometry, weights_digest=b"the model after the reload")
    assert geometry.format != rig.backend.geometry.format
    after = backend(rig.backend.spec, geometry, 16)
    after.arena.memory[:] = rig.backend.arena.memory
    rig.runner._backend = after
    grant = rig.kv.admit(RequestId("new"), bytes(range(16)), PROMPT, first_tokens=10)  # type: ignore[arg-type]
    assert grant is not None and grant.cached_tokens == (8 if cached else 0)
    return compute(rig, row("new", grant, PROMPT, grant.cached_tokens)).rows[0]


def test_even_with_the_name_alone_the_format_refuses() -> None:
    result = reloaded(OtherWeights, cached=True)
    assert result.broken is not None and (result.broken.law, result.broken.check) == ("L10", "format")  # type: ignore[attr-defined]


def test_without_the_seals_the_old_adapter_would_have_answered() -> None:
    right = reloaded(OtherWeightsUnchecked, cached=False)
    wrong = reloaded(OtherWeightsUnchecked, cached=True)
    assert right.broken is None and wrong.broken is None and right.token != wrong.token  # type: ignore[attr-defined]
