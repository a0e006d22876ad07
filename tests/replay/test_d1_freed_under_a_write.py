"""D1 (sglang#24527): an abort frees pages that a remote writer still writes, and the next request gets them.

D10 (SGLang's and NIXL's 30 s timeouts): a timeout is taken as proof that the writer has stopped.
"""

from __future__ import annotations

import pytest

from kvseal.core.errors import BrokenSeal
from kvseal.core.outcome import Cancelled, Failed
from kvseal.handoff.proof import Landing, Move
from kvseal.lab.pair import LoopTransport, Pair

from .handing import OURS, OUTPUT_TOKENS, PAGES, right_answer
from .rigging import prompt

OTHER = prompt(9, 45)


class OneSided(LoopTransport):
    """A transport whose writer is somewhere else: an abort does not stop it, and only `stopped` says that it has."""

    local_fence = False
    stopped = False
    pending: tuple[tuple[Move, Landing], ...] = ()

    def fence(self, transfer: str) -> bool:
        self.pending += tuple((move, landing) for _, move, landing in self._wanted.get(transfer, ()))
        super().fence(transfer)
        return self.stopped

    def reset(self) -> bool:
        super().reset()
        return self.stopped


@pytest.fixture
def one_sided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.lab.pair.LoopTransport", OneSided)


def aborted_in_flight(pages: int = 16) -> tuple[Pair, OneSided]:
    pair = Pair(decode={"pages": pages})
    transport = pair.transport(pair.decode)
    assert isinstance(transport, OneSided)
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    while transport.landed < 2:
        pair.turn()
    pair.cancel("request-1")
    pair.turn()
    assert isinstance(heard.outcome, Cancelled)
    return pair, transport


@pytest.mark.usefixtures("one_sided")
def test_pages_under_a_write_are_nobody_elses() -> None:
    pair, transport = aborted_in_flight()
    usage = pair.decode.kv.usage()
    assert (usage.draining, usage.free) == (PAGES, 16 - PAGES)
    for _ in range(40):
        pair.turn()
    assert pair.decode.kv.usage().quarantined == PAGES  # After the patience with the fence: out of use, never free (L8).
    pair.check()
    assert transport.pending
    for move, landing in transport.pending:
        landing.copy(pair.transport(pair.prefill).memory, [move])  # The writer wakes up.
    transport.stopped = True
    heard = pair.submit("request-2", OTHER, OUTPUT_TOKENS)
    pair.run()
    assert heard.tokens == right_answer(OTHER)
    pair.settled()  # With proof they have come back.
    assert pair.decode.stats().handoff["readmitted_pages"] == PAGES


@pytest.mark.usefixtures("one_sided")
def test_while_nobody_proves_anything_the_pages_stay_away() -> None:
    pair, transport = aborted_in_flight(40)
    for number in range(3):
        heard = pair.submit(f"request-{number + 2}", prompt(20 + number, 45), OUTPUT_TOKENS)
        while not heard.ended:
            pair.turn()
        assert heard.tokens == right_answer(prompt(20 + number, 45))
    usage = pair.decode.kv.usage()
    assert usage.draining + usage.quarantined >= PAGES
    transport.stopped = True
    pair.run()
    for _ in range(5):
        pair.turn()
    pair.settled()


def test_a_late_write_brings_its_own_nonce_and_the_reader_stops() -> None:
    """Were the pages freed all the same: the late bytes bear the sender's nonce, so whoever reads there is stopped, not misled."""
    pair = Pair(decode={"pages": 16})
    heard = pair.submit("request-1", OURS, 40)
    while len(heard.tokens) < 3:
        pair.turn()
    memory, source = pair.transport(pair.decode).memory, pair.transport(pair.prefill).memory
    (sequence,) = pair.decode._scheduler._open.values()
    written = source[:, 8:16].view("<u8")[:, 0].nonzero()[0]
    memory[sequence.grant.table.stamps[2]] = source[written[-1]]
    while not heard.ended:
        pair.turn()
    assert isinstance(heard.outcome, Failed) and isinstance(heard.outcome.error, BrokenSeal)
    assert heard.outcome.error.check == "nonce"
