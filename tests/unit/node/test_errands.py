"""Ready means that a page went from node to node; one that did not on a busy machine is sent again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvseal.core.errors import EngineDied
from kvseal.lab.rig import SCOPE
from kvseal.node import errands


@pytest.mark.parametrize(("arrives", "asked"), [([True], 1), ([False, True], 2), ([False] * errands.PROOF_ATTEMPTS, 0)])
def test_a_proof_is_tried_again(arrives: list[bool], asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(arrives)

    async def answer(*_: object) -> bool:
        return left.pop(0)

    monkeypatch.setattr(errands, "_arrives", answer)
    nodes: list[Any] = [SimpleNamespace(name="prefill-0"), SimpleNamespace(name="decode-0")]
    if asked:
        asyncio.run(errands.prove_pair(*nodes, SCOPE))
        assert len(arrives) - len(left) == asked
    else:
        with pytest.raises(EngineDied, match="no page goes from node prefill-0 to node decode-0"):
            asyncio.run(errands.prove_pair(*nodes, SCOPE))
