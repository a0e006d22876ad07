"""Hand-offs under random schedules: who moves when, who leaves, which messages are lost, repeated, swapped or altered, who freezes, how the
clock jumps, and whether the transport can say that it is quiet. Whatever happens, each hand-off ends once at each end, within its deadline;
what is delivered is exactly what was computed; and all pages come back (L2, L8, L9, L11).
"""

from __future__ import annotations

import random

import pytest

from kvseal.handoff.messages import Reason
from kvseal.handoff.session import Delivered, Patience
from kvseal.lab.handoff_rig import Node, Rig
from kvseal.lab.local_transport import LocalTransport, LocalWorld

SCHEDULES = 200
QUICK_BLOCKS = 4
"""Of ten. The rest: ``pytest -m slow tests/property/test_handoff_schedules.py``."""
DEADLINE_S = 8.0
PATIENCE = Patience(silence_s=3.0, fence_s=1.0)
STEP_S = 0.1


class Wire:
    """Delivers, or does not."""

    def __init__(self, chance: random.Random, trouble: float) -> None:
        self._chance = chance
        self._trouble = trouble
        self._held: list[bytes] = []
        self.down = False
        self.struck = 0

    def __call__(self, body: bytes) -> list[bytes]:
        chance = self._chance
        if self.down:
            return []
        held, self._held = self._held, []
        if chance.random() >= self._trouble:
            return [body, *held]
        self.struck += 1
        kind = chance.randrange(4)
        if kind == 0:
            return held
        if kind == 1:
            return [body, body, *held]
        if kind == 2:
            self._held = [body]
            return held
        broken = bytearray(body)
        at = chance.randrange(4, len(broken))
        broken[at] ^= 1 << chance.randrange(8)
        return [bytes(broken), *held]


def tolerant(node: Node) -> None:
    """A node drops what is no message, as its link would."""
    from kvseal.handoff.messages import MessageInvalid

    take = node.take

    def taken(body: bytes, now_s: float) -> None:
        try:
            take(body, now_s)
        except MessageInvalid:
            return

    node.take = taken  # type: ignore[method-assign]


class Schedule:
    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.sticky = chance.random() < 0.4
        world = LocalWorld()
        make = LocalTransport.maker(world, sticky=self.sticky)
        sender, receiver = (Node(name, make, pages=chance.choice([12, 24, 64]), patience=PATIENCE) for name in ("prefill", "decode"))
        trouble = chance.choice([0.0, 0.02, 0.1])
        self.forth, self.back = Wire(chance, trouble), Wire(chance, trouble)
        self.rig = Rig(sender, receiver, forth=self.forth, back=self.back)
        for node in (sender, receiver):
            tolerant(node)
        self.now_s = 0.0
        self.open = []
        self.delivered = 0

    def begin(self, number: int) -> None:
        shared = [7] * self.chance.choice([0, 8, 16])
        tokens = [*shared, *(self.chance.randrange(50) for _ in range(self.chance.randrange(5, 24)))]
        size, kv = self.rig.sender.geometry.page_tokens, self.rig.sender.kv
        if -(-len(tokens) // size) <= kv.available_pages:
            self.open.append(self.rig.begin(f"handoff-{number}", tokens, self.now_s, deadline_s=DEADLINE_S))

    def step(self) -> None:
        chance, rig = self.chance, self.rig
        self.now_s += STEP_S
        roll = chance.random()
        if roll < 0.02:
            self.now_s += 5.0  # a clock that jumps, or a process that slept
        elif roll < 0.04:
            side = chance.choice([rig.sender.sending, rig.receiver.receiving])
            if self.open:
                side.cancel(chance.choice(self.open).name, Reason.CANCELLED, self.now_s)
        elif roll < 0.05:
            self.forth.down = self.back.down = chance.random() < 0.5
        elif roll < 0.06:
            rig.receiver.receiving.peer_gone(rig.sender.incarnation, self.now_s)
        for one in self.open:
            if one.sealed < one.pages and chance.random() < 0.7:
                rig.compute(one, min(one.pages, one.sealed + chance.randrange(1, 3)), self.now_s)
        rig.pump(self.now_s)
        self._stuck(chance.random() < 0.1)
        for one in list(self.open):
            self._over(one)

    def _stuck(self, writes: bool) -> None:
        for node in (self.rig.sender, self.rig.receiver):
            transport = node.transport
            assert isinstance(transport, LocalTransport)
            for name in list(transport.stuck) if writes else []:
                transport.late(name)

    def _over(self, one) -> None:  # type: ignore[no-untyped-def]
        end = self.rig.ends["receiver"].get(one.name)
        if end is None or one.name not in self.rig.ends["sender"]:
            return
        self.open.remove(one)
        self.rig.sender.kv.drop(one.grant)
        if isinstance(end.outcome, Delivered):
            self.delivered += 1
            assert end.grant is not None and self.rig.receiver.holds(end.grant, one.tokens), "delivered, and not what was computed"
            assert end.grant.table.valid_tokens == len(one.tokens)
            self.rig.receiver.kv.drop(end.grant)
        else:
            assert end.grant is None
            assert not isinstance(self.rig.ends["sender"][one.name].outcome, Delivered), "the sender believes in a receipt alone"

    def settle(self) -> None:
        """No new trouble: everything ends by its own deadlines."""
        self.forth.down = self.back.down = False
        deadline_s = self.now_s + DEADLINE_S + PATIENCE.fence_s + 1.0
        while not self.rig.idle or self.open:
            assert self.now_s < deadline_s, "a hand-off outlived its deadline"
            for one in self.open:
                self.rig.compute(one, one.pages, self.now_s)
            self.now_s += STEP_S
            self.rig.pump(self.now_s)
            for one in list(self.open):
                self._over(one)
        self._stuck(True)
        self.rig.pump(self.now_s + 10.0)
        self.rig.pump(self.now_s + 20.0)


@pytest.mark.parametrize("block", [pytest.param(at, marks=() if at < QUICK_BLOCKS else pytest.mark.slow) for at in range(10)])
def test_two_hundred_schedules(block: int) -> None:
    delivered = struck = 0
    for seed in range(block * SCHEDULES // 10, (block + 1) * SCHEDULES // 10):
        schedule = Schedule(seed)
        for step in range(36):
            if step % 6 == 0:
                schedule.begin(step)
            schedule.step()
            if step % 12 == 0:
                for node in (schedule.rig.sender, schedule.rig.receiver):
                    node.check()
        schedule.settle()
        for node in (schedule.rig.sender, schedule.rig.receiver):
            node.check()
            usage = node.kv.usage()
            assert usage.leased == usage.draining == usage.quarantined == 0, f"seed {seed}: {usage}"
            assert usage.free + usage.evictable == usage.total, f"seed {seed}: {usage}"
        delivered += schedule.delivered
        struck += schedule.forth.struck + schedule.back.struck
    assert delivered and struck, "schedules without success or without trouble show nothing"
