"""Two hundred seeded schedules of everything that can go wrong between two nodes: clients leave, messages are lost, repeated, swapped and
broken, pages are not copied, nodes freeze and die, the clock jumps.

Whatever happens: a completed answer is the one-node answer, an unfinished one is a beginning of it, every request ends, and every page of
both nodes is accounted for. A failure prints its seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from kvseal.core.errors import EngineDied, KVTransferFailed
from kvseal.core.outcome import Cancelled, Completed, Failed
from kvseal.lab.pair import Pair
from kvseal.lab.rig import truth
from kvseal.node import peer_messages as p
from kvseal.node.node_engine import NodeEngine

SEEDS = 200
QUICK_SEEDS = 80
"""The rest: ``pytest -m slow tests/property/test_handoff_aborts.py``."""
OUTPUT_TOKENS = 5
PROMPTS = [[(seed * 7919 + at * 104_729) % 4000 for at in range(tokens)] for seed, tokens in enumerate((18, 25, 33, 41, 60))]
PROMPTS += [[*PROMPTS[4][:32], 7, 7, 7], [*PROMPTS[4][:48], 9]]


@pytest.fixture(scope="module")
def truths() -> list[list[int]]:
    return [truth(prompt, OUTPUT_TOKENS) for prompt in PROMPTS]


class Chaos:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.on_failure = self.draw.choice(("recompute", "recompute", "fail"))
        self.rate = self.draw.choice((0.0, 0.02, 0.1))
        pages = self.draw.choice((12, 20, 40))
        self.pair = Pair(
            on_failure=self.on_failure,
            prefill={"pages": self.draw.choice((12, 20, 40)), "chunk_tokens": self.draw.choice((8, 16, 64))},
            decode={"pages": pages, "chunk_tokens": 16},
        )
        self.pages = pages
        self.pair.filter = self.filter
        self.held: list[p.Relay] = []
        self.asked: dict[str, int] = {}
        self.left: set[str] = set()
        self.deaths = 0

    def filter(self, node: NodeEngine, relay: p.Relay) -> Iterable[p.Relay]:
        if self.draw.random() >= self.rate:
            return (relay,)
        match self.draw.randrange(5):
            case 0:
                return ()
            case 1:
                return (relay, relay)
            case 2:
                self.held.append(relay)
                return ()
            case 3:
                held, self.held = self.held, []
                return (relay, *(old for old in held if old.peer == relay.peer))
            case _:
                at = self.draw.randrange(len(relay.body))
                broken = relay.body[:at] + bytes([relay.body[at] ^ (1 << self.draw.randrange(8))]) + relay.body[at + 1 :]
                return (p.Relay(relay.handoff, relay.peer, broken),)

    def event(self) -> None:
        pair, draw = self.pair, self.draw
        name = draw.choice(sorted(self.asked)) if self.asked else None
        match draw.randrange(12):
            case 0 | 1 if name is not None and not pair.heard[name].ended:
                self.left.add(name)
                pair.cancel(name)
            case 2:
                pair.frozen.add(draw.choice((pair.prefill, pair.decode)))
            case 3 | 4:
                pair.frozen.clear()
            case 5 if self.deaths < 2:
                self.deaths += 1
                pair.restart(draw.choice(("prefill", "decode")), pages=self.pages)
            case 6:
                pair.clock.advance(draw.choice((0.5, 3.0, 20.0, 1e6)))
            case 7:
                transport = pair.transport(pair.decode)
                transport.skip_copy, transport.frozen = draw.choice(((True, False), (False, True), (False, False)))
            case 8:
                self.flip_a_bit()
            case 9 if name is not None:
                pair.lose(name)
            case _:
                pass

    def flip_a_bit(self) -> None:
        """In a page on the prefill node that is not in use there: what is announced and what stands there differ."""
        memory, free = self.pair.transport(self.pair.prefill).memory, self.pair.prefill.kv.pool.ledger.state == 0
        pages = free.nonzero()[0]
        if len(pages):
            memory[self.draw.choice(pages.tolist()), self.draw.randrange(memory.shape[1])] ^= 1 << self.draw.randrange(8)

    def run(self) -> None:
        pair, draw = self.pair, self.draw
        for number in range(draw.randrange(2, 6)):
            which = draw.randrange(len(PROMPTS))
            name = f"request-{number}"
            self.asked[name] = which
            pair.submit(name, PROMPTS[which], OUTPUT_TOKENS)
            for _ in range(draw.randrange(12)):
                pair.turn()
                if draw.random() < 0.3:
                    self.event()
        for turn in range(40):
            pair.turn()
            if draw.random() < 0.15:
                self.event()
            if turn % 8 == 0:
                pair.check()
        pair.frozen.clear()
        pair.transport(pair.decode).frozen = False
        pair.run(checked=False)


@pytest.mark.parametrize("block", [pytest.param(at, marks=() if at < QUICK_SEEDS else pytest.mark.slow) for at in range(0, SEEDS, 20)])
def test_every_schedule_ends_well(block: int, truths: list[list[int]]) -> None:
    for seed in range(block, block + 20):
        chaos = Chaos(seed)
        chaos.run()
        for name, which in chaos.asked.items():
            heard, right = chaos.pair.heard[name], truths[which]
            place = f"seed {seed}, {name}"
            match heard.outcome:
                case Completed():
                    assert heard.tokens == right, place
                case Cancelled():
                    assert name in chaos.left and heard.tokens == right[: len(heard.tokens)], place
                case Failed(error):
                    assert isinstance(error, EngineDied | KVTransferFailed), f"{place}: {error}"
                    assert heard.tokens == right[: len(heard.tokens)], place
                    assert not isinstance(error, KVTransferFailed) or (chaos.on_failure == "fail" and not heard.tokens), f"{place}: {error}"
                case other:
                    raise AssertionError(f"{place}: {other}")
        chaos.pair.settled()
