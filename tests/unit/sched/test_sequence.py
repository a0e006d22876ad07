"""States hold exactly what they may touch; every undrawn transition is an error (L11)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Cancelled
from kvseal.core.request import Request
from kvseal.kv.manager import Grant
from kvseal.lab.rig import SCOPE, Rig
from kvseal.sched.sequence import Decoding, Ended, Prefilling, Received, Sequence, Waiting


def grant() -> Grant:
    got = Rig().kv.admit(RequestId("a"), SCOPE, [1, 2, 3], first_tokens=3)
    assert got is not None
    return got


def sequence_in(state: type) -> Sequence:
    sequence = Sequence(Request(request_id=RequestId("a"), prompt_tokens=(1, 2, 3), max_output_tokens=2, scope=SCOPE), 1, (1, 1))
    path: dict[type, list[str]] = {
        Waiting: [],
        Received: ["receive"],
        Prefilling: ["admit"],
        Decoding: ["admit", "decode"],
        Ended: ["end"],
    }
    for step in path[state]:
        MOVES[step](sequence)
    assert type(sequence.state) is state
    return sequence


MOVES: dict[str, Callable[[Sequence], object]] = {
    "admit": lambda sequence: sequence.admit(sequence.state.grant if isinstance(sequence.state, Received) else grant()),
    "receive": lambda sequence: sequence.receive(grant()),
    "decode": lambda sequence: sequence.decode(),
    "preempt": lambda sequence: sequence.preempt(),
    "end": lambda sequence: sequence.end(Cancelled(sequence.usage)),
}
DRAWN = {
    (Waiting, "admit"): Prefilling,
    (Waiting, "receive"): Received,
    (Waiting, "end"): Ended,
    (Received, "admit"): Prefilling,
    (Received, "preempt"): Waiting,
    (Received, "end"): Ended,
    (Prefilling, "decode"): Decoding,
    (Prefilling, "preempt"): Waiting,
    (Prefilling, "end"): Ended,
    (Decoding, "preempt"): Waiting,
    (Decoding, "end"): Ended,
}


@pytest.mark.parametrize("state, move", list(itertools.product([Waiting, Received, Prefilling, Decoding, Ended], MOVES)))
def test_only_drawn_transitions_exist(state: type, move: str) -> None:
    sequence = sequence_in(state)
    if (state, move) in DRAWN:
        MOVES[move](sequence)
        assert type(sequence.state) is DRAWN[state, move]
    else:
        before = sequence.state
        with pytest.raises(LawBroken, match="L11"):
            MOVES[move](sequence)
        assert sequence.state is before


@pytest.mark.parametrize("state", [Waiting, Ended])
def test_no_pages_without_a_grant(state: type) -> None:
    with pytest.raises(LawBroken, match="L11"):
        _ = sequence_in(state).grant


def test_end_hands_the_grant_back_once() -> None:
    assert sequence_in(Waiting).end(Cancelled(sequence_in(Waiting).usage)) is None
    running = sequence_in(Decoding)
    held = running.grant
    assert running.end(Cancelled(running.usage)) is held


def test_counts() -> None:
    sequence = sequence_in(Prefilling)
    assert (sequence.pending_tokens, sequence.output_tokens, sequence.usage.prompt_tokens) == (3, 0, 3)
