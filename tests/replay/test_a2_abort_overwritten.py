"""A2 (sglang#33507): an abort that comes between the last chunk and the poll of the transfer is overwritten by a success."""

from __future__ import annotations

import pytest

from kvseal.core.outcome import Cancelled
from kvseal.lab.pair import Pair

from .handing import OURS, OUTPUT_TOKENS


@pytest.mark.parametrize("turns", range(1, 14, 2))
def test_a_cancelled_request_stays_cancelled_whenever_it_is_cancelled(turns: int) -> None:
    pair = Pair(prefill={"chunk_tokens": 16})
    heard = pair.submit("request-1", OURS, 40)
    for _ in range(turns):
        pair.turn()
    assert not heard.ended
    pair.cancel("request-1")
    seen = list(heard.tokens)
    pair.run()
    assert isinstance(heard.outcome, Cancelled)
    assert heard.tokens == seen
    pair.settled()


def test_between_the_last_page_and_the_receipt() -> None:
    """All pages have landed; the abort comes before the commit."""
    pair = Pair()
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    while pair.transport(pair.decode).landed < 5:
        pair.turn()
    pair.cancel("request-1")
    pair.run()
    assert isinstance(heard.outcome, Cancelled)
    pair.settled()
