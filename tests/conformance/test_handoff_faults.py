"""Whole hand-offs over every transport, with a layer between that drops, truncates, repeats, reorders, corrupts, writes late, falls silent
or closes: each ends delivered with exactly the right content, or failed with nothing visible, and every page comes back (L8, L9)."""

from __future__ import annotations

import time

import pytest
from conformance.transports import KINDS_OF_TRANSPORT, SECRET

from kvseal.exec.backends.cpu import NativeArena
from kvseal.handoff.make import make_transport
from kvseal.handoff.prover import ProverThread
from kvseal.handoff.session import Delivered, Failure, Patience
from kvseal.handoff.transport import Transport
from kvseal.lab.faulty_transport import Fault, FaultyTransport
from kvseal.lab.handoff_rig import SCOPE, Node, Rig

PATIENCE = Patience(silence_s=1.5, fence_s=1.0)
TOKENS = list(range(50, 50 + 4 * 12 + 3))
FAULTS_THAT_MAY_PASS = {Fault.LATE}
"""A late write that hits nothing that is in use harms nobody."""


def outcome_of(rig: Rig, name: str, tokens: list[int], chunk: int) -> Delivered | Failure:
    """Runs one hand-off to its end, everything settled at both nodes."""
    one = rig.begin(name, tokens, time.monotonic(), deadline_s=20.0)
    give_up_s = time.monotonic() + 40.0
    while not rig.idle or name not in rig.ends["receiver"]:
        now_s = time.monotonic()
        if one.sealed < one.pages:
            rig.compute(one, min(one.pages, one.sealed + chunk), now_s)
        rig.pump(now_s)
        assert now_s < give_up_s, "it never ended"
        time.sleep(0.001)
    rig.sender.kv.drop(one.grant)
    return rig.ends["receiver"][name].outcome


def check_and_drop(rig: Rig, name: str, tokens: list[int]) -> None:
    end = rig.ends["receiver"][name]
    if end.grant is not None:
        assert rig.receiver.holds(end.grant, tokens), "delivered, and not the content that was computed"
        assert end.grant.table.valid_tokens == len(tokens)
        rig.receiver.kv.drop(end.grant)
    for node in (rig.sender, rig.receiver):
        node.check()
        usage = node.kv.usage()
        assert usage.leased == usage.draining == usage.quarantined == 0
        assert usage.free + usage.evictable == usage.total


@pytest.mark.parametrize("kind", KINDS_OF_TRANSPORT)
def test_good_hand_offs_both_ways_and_over_shared_prefixes(kind: str) -> None:
    def make(arena: NativeArena, incarnation: str) -> Transport:
        return make_transport(kind, arena.memory, file=arena.file, incarnation=incarnation, secret=SECRET)

    rig = Rig(Node("prefill", make, patience=Patience()), Node("decode", make, patience=Patience(), prover=ProverThread()))
    try:
        for number, tokens in enumerate((TOKENS, TOKENS, TOKENS[:30], [*TOKENS[:20], *range(900, 930)])):
            found = outcome_of(rig, f"handoff-{number}", tokens, chunk=3)
            assert isinstance(found, Delivered), found
            check_and_drop(rig, f"handoff-{number}", tokens)
        back = Rig(rig.receiver, rig.sender)
        tokens = list(range(2000, 2040))
        found = outcome_of(back, "handoff-back", tokens, chunk=4)
        assert isinstance(found, Delivered) and found.sent_pages == 10
        check_and_drop(back, "handoff-back", tokens)
        assert rig.sender.kv.probe(SCOPE, tokens) == 36, "what the other node computed is found here"
    finally:
        rig.close()


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("kind", KINDS_OF_TRANSPORT)
def test_a_faulty_layer_never_makes_a_wrong_page_visible(kind: str, fault: Fault) -> None:
    layers: list[FaultyTransport] = []

    def make_plain(arena: NativeArena, incarnation: str) -> Transport:
        return make_transport(kind, arena.memory, file=arena.file, incarnation=incarnation, secret=SECRET)

    def make_faulty(arena: NativeArena, incarnation: str) -> Transport:
        layers.append(FaultyTransport(make_plain(arena, incarnation), fault, seed=len(layers)))
        return layers[-1]

    struck = failed = 0
    for _ in range(1 if fault is Fault.SILENCE else 2):  # each silence is waited for
        rig = Rig(Node("prefill", make_plain, patience=PATIENCE), Node("decode", make_faulty, patience=PATIENCE, prover=ProverThread()))
        try:
            for number in range(6):
                tokens = [number, *TOKENS]
                found = outcome_of(rig, f"handoff-{number}", tokens, chunk=4)
                check_and_drop(rig, f"handoff-{number}", tokens)
                failed += isinstance(found, Failure)
                if layers[-1].struck:
                    break
            struck += layers[-1].struck
        finally:
            rig.close()
    assert struck, "the fault never struck: the test shows nothing"
    if fault not in FAULTS_THAT_MAY_PASS:
        assert failed == struck, "each strike must fail its hand-off"
