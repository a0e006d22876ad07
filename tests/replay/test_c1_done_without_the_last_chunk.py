"""C1 (vllm#52234): a receive failure is reported as finished, and the request decodes from pages that never came."""

from __future__ import annotations

import pytest

from kvseal.core.outcome import Completed
from kvseal.lab.pair import Pair

from .handing import OURS, OUTPUT_TOKENS, PAGES, ask, gullible, recomputed, right_answer, well


def test_pages_that_never_came_are_not_used() -> None:
    pair = Pair()
    pair.transport(pair.decode).skip_copy = True
    well(pair, ask(pair))
    recomputed(pair, "seal")


def test_only_the_last_page_is_missing() -> None:
    pair = Pair()
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    transport = pair.transport(pair.decode)
    transport.pages_per_poll = 1
    while transport.landed < PAGES - 1:
        pair.turn()
    transport.skip_copy = True
    pair.run()
    well(pair, heard)
    recomputed(pair, "seal")


def test_without_the_proof_the_answer_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = gullible(monkeypatch)
    pair.transport(pair.decode).skip_copy = True
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    while not heard.ended:
        pair.turn()
    assert isinstance(heard.outcome, Completed)
    assert heard.tokens[0] == right_answer()[0], "what the node that computed the prompt said is right"
    assert heard.tokens[1:] != right_answer()[1:], "and what was computed from pages that never came is not"
