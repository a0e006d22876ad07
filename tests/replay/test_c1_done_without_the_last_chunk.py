"""C1 (vllm#52234): a receive failure is reported as finished, and the request decodes from pages that never came."""

from __future__ import annotations

import pytest

from kvseal.core.errors import KVTransferFailed
from kvseal.core.outcome import Failed
from kvseal.lab.pair import Pair

from .handing import OURS, OUTPUT_TOKENS, ask, gullible, recomputed, right_answer, well


def test_pages_that_never_came_are_not_used() -> None:
    pair = Pair()
    pair.transport(pair.decode).skip_copy = True
    well(pair, ask(pair))
    recomputed(pair, "seal")


def test_only_the_last_page_is_missing() -> None:
    pair = Pair()
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    transport = pair.transport(pair.decode)
    while transport.landed < 4:
        pair.turn()
    transport.skip_copy = True
    pair.run()
    well(pair, heard)
    recomputed(pair, "seal")


def test_without_the_proof_the_two_nodes_differ_and_nothing_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = gullible(monkeypatch)
    pair.transport(pair.decode).skip_copy = True
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    while not heard.ended:
        pair.turn()
    assert isinstance(heard.outcome, Failed) and isinstance(heard.outcome.error, KVTransferFailed)
    assert heard.tokens == right_answer()[:1]  # What the prefill node said is right; the other's token was never emitted.
