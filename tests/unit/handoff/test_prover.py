"""The proof runs beside the engine: pages that are read for one are not reused, and what it finds late changes nothing (L8, L9, L11)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.exec.backends.cpu import new_arena
from kvseal.handoff import messages as m
from kvseal.handoff.proof import Landing, Move, PageFault
from kvseal.handoff.prover import Proof, ProverThread
from kvseal.handoff.session import Delivered, Failure, Patience
from kvseal.kv.geometry import KVGeometry
from kvseal.lab.handoff_rig import Node, Rig
from kvseal.lab.local_transport import LocalTransport, LocalWorld, ProverAtOnce

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8, page_tokens=4)
MOVES = [Move(0, 0, 7, 0, bytes(16), 4)]
TOKENS = list(range(100, 123))


class Slow(Landing):
    """Reads until it is told to stop."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__(new_arena(GEOMETRY, 4).memory, GEOMETRY, Scope(bytes(16)))
        self.reads, self.go, self.failure = threading.Event(), threading.Event(), failure

    def check(self, moves: Sequence[Move]) -> PageFault | None:  # type: ignore[override]
        self.reads.set()
        assert self.go.wait(20)
        if self.failure is not None:
            raise self.failure
        return None


def until(what: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 20
    while not what():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def test_a_proof_is_told_once_and_nobody_waits_for_it() -> None:
    prover, landing = ProverThread(), Slow()
    prover.begin("handoff-1", landing, MOVES)
    prover.begin("handoff-2", landing, MOVES)
    assert landing.reads.wait(20) and prover.done() == []
    landing.go.set()
    found: list[Proof] = []
    until(lambda: len(found.__iadd__(prover.done())) == 2)
    assert found == [Proof("handoff-1", None), Proof("handoff-2", None)] and prover.done() == []
    prover.close()
    prover.close()


def test_it_has_not_let_go_before_it_has_stopped_reading() -> None:
    prover, landing = ProverThread(), Slow()
    prover.begin("handoff-1", landing, MOVES)
    prover.begin("handoff-2", landing, MOVES)
    assert landing.reads.wait(20)
    assert not prover.let_go("handoff-1") and prover.let_go("handoff-2") and prover.let_go("handoff-3")
    landing.go.set()
    until(lambda: prover.let_go("handoff-1"))
    assert prover.done() == [], "nobody waits for them any more"
    prover.close()


def test_close_waits_for_what_is_being_read_and_begins_nothing_more() -> None:
    prover, landing = ProverThread(), Slow()
    prover.begin("handoff-1", landing, MOVES)
    assert landing.reads.wait(20)
    closer = threading.Thread(target=prover.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive(), "the arena may be unmapped after it"
    landing.go.set()
    closer.join(20)
    prover.begin("handoff-2", landing, MOVES)
    assert not closer.is_alive() and [proof.handoff for proof in prover.done()] == ["handoff-1"]


def test_closed_before_it_was_needed_it_starts_nothing() -> None:
    prover = ProverThread()
    prover.close()
    prover.begin("handoff-1", Slow(), MOVES)
    assert prover.done() == []


def test_a_proof_that_cannot_be_made_is_none() -> None:
    prover, landing = ProverThread(), Slow(ValueError("out of bounds"))
    landing.go.set()
    prover.begin("handoff-1", landing, MOVES)
    until(lambda: bool(prover._found))
    assert prover.done() == [Proof("handoff-1", "ValueError")]
    prover.close()


# --- in a hand-off -------------------------------------------------------------------------------------------


def proving() -> tuple[Rig, ProverAtOnce]:
    """Everything has landed, and the proof goes on reading."""
    prover = ProverAtOnce()
    prover.held = True
    make = LocalTransport.maker(LocalWorld())
    patience = Patience(silence_s=2.0, fence_s=1.0)
    rig = Rig(Node("prefill", make, patience=patience), Node("decode", make, patience=patience, prover=prover))
    one = rig.begin("handoff-1", TOKENS, 0.0)
    rig.compute(one, one.pages, 0.0)
    for turn in range(8):
        rig.pump(turn * 0.05)
    rig.sender.kv.drop(one.grant)
    assert not rig.ends["receiver"] and rig.receiver.kv.usage().leased == 6
    return rig, prover


@pytest.mark.parametrize("how", ["cancelled", "peer gone", "deadline"])
def test_pages_that_are_read_for_a_proof_are_not_free_when_the_hand_off_ends(how: str) -> None:
    rig, prover = proving()
    receiving, now_s = rig.receiver.receiving, 0.5
    if how == "cancelled":
        receiving.cancel("handoff-1", m.Reason.CANCELLED, now_s)
    elif how == "peer gone":
        receiving.peer_gone(rig.sender.incarnation, now_s)
    else:
        now_s = 31.0
    rig.pump(now_s)
    assert isinstance(rig.ends["receiver"]["handoff-1"].outcome, Failure)
    usage = rig.receiver.kv.usage()
    assert usage.draining == 6 and usage.free == usage.total - 6, "nobody may have them yet (L8)"
    prover.held = False
    rig.pump(now_s + 0.1)
    usage = rig.receiver.kv.usage()
    assert usage.free == usage.total and rig.idle
    rig.receiver.check()


def test_a_proof_that_never_ends_puts_the_pages_into_quarantine_and_its_end_brings_them_back() -> None:
    rig, prover = proving()
    rig.receiver.receiving.cancel("handoff-1", m.Reason.CANCELLED, 0.5)
    rig.pump(2.0)
    assert rig.receiver.kv.usage().quarantined == 6
    prover.held = False
    rig.pump(2.1)
    usage = rig.receiver.kv.usage()
    assert usage.free == usage.total and rig.receiver.receiving.counters.readmitted_pages == 6


def test_a_bit_that_flips_before_the_proof_is_found_by_it() -> None:
    make = LocalTransport.maker(LocalWorld())
    rig = Rig(Node("prefill", make), Node("decode", make, prover=ProverThread()))
    landing = Landing.check
    with pytest.MonkeyPatch.context() as patch:

        def flipped(self: Landing, moves: Sequence[Move]) -> PageFault | None:
            self.memory[moves[2].page, -1] ^= 1
            return landing(self, moves)

        patch.setattr(Landing, "check", flipped)
        one = rig.begin("handoff-1", TOKENS, 0.0)
        rig.compute(one, one.pages, 0.0)
        until(lambda: rig.pump(0.1) is None and "handoff-1" in rig.ends["receiver"])
    outcome = rig.ends["receiver"]["handoff-1"].outcome
    assert isinstance(outcome, Failure) and outcome.reason is m.Reason.SEAL and f"law {Law.L7}" in outcome.detail
    until(lambda: rig.pump(0.2) is None and rig.receiver.kv.usage().free == rig.receiver.kv.usage().total)
    assert not rig.receiver.kv.usage().sealed
    rig.close()


def test_a_late_proof_of_a_hand_off_that_is_over_is_nothing() -> None:
    rig, prover = proving()
    prover.held = False
    rig.pump(0.5)
    assert isinstance(rig.ends["receiver"]["handoff-1"].outcome, Delivered)
    prover._found.append(Proof("handoff-1", "late"))
    prover._found.append(Proof("handoff-9", None))
    rig.pump(0.6)
    assert isinstance(rig.ends["receiver"]["handoff-1"].outcome, Delivered)
