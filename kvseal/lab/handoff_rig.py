"""Two nodes without a model, joined by a transport and a wire that can be told to misbehave.

Owns what the hand-off's own tests drive: a cache, an arena and both ends of the hand-off per node, and content that is a function of the
tokens, so that whoever compares bytes compares everything. Time is handed in.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvseal.core.ids import RequestId, Scope
from kvseal.exec.backends.cpu import NativeArena, new_arena
from kvseal.handoff.messages import AnyMessage, Role, decode, encode
from kvseal.handoff.node import End, Receiving, Sending
from kvseal.handoff.proof import PageFault
from kvseal.handoff.prover import Prover
from kvseal.handoff.session import Patience
from kvseal.handoff.transport import Transport
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import Grant, KVManager
from kvseal.lab.local_transport import ProverAtOnce
from kvseal.lab.pages import closed, compute, payload, read_payload, seed_of

KEY = b"key of the hand-off rig"
SCOPE = Scope(b"scope of the rig")
GEOMETRY = KVGeometry(layers=2, kv_heads=1, head_dim=8, page_tokens=4, weights_digest=b"rig")

MakeTransport = Callable[[NativeArena, str], Transport]
"""From the arena and the incarnation."""
Deliver = Callable[[bytes], list[bytes]]
"""What a wire does with one message: normally ``[body]``."""


class Node:
    def __init__(
        self,
        name: str,
        make: MakeTransport,
        *,
        pages: int = 64,
        patience: Patience | None = None,
        geometry: KVGeometry = GEOMETRY,
        quarantine_cap_pages: int = 0,
        prover: Prover | None = None,
    ) -> None:
        self.geometry = geometry
        capacity = Capacity.derive(model_context_tokens=pages * geometry.page_tokens, pool_pages=pages, page_tokens=geometry.page_tokens)
        self.kv = KVManager(geometry, pool_pages=pages, capacity=capacity, secret=name.encode().ljust(16, b"."))
        self.arena = new_arena(geometry, pages, shared=True)
        self.memory: npt.NDArray[np.uint8] = self.arena.memory
        self.incarnation = f"{name}-{secrets.token_hex(4)}"
        self.transport = make(self.arena, self.incarnation)
        self.sending = Sending(self.kv, self.transport, key=KEY, memory=self.memory, patience=patience)
        self.receiving = Receiving(
            self.kv,
            self.transport,
            key=KEY,
            memory=self.memory,
            patience=patience,
            quarantine_cap_pages=quarantine_cap_pages,
            prover=prover or ProverAtOnce(),
        )

    def turn(self, now_s: float) -> None:
        self.sending.turn(now_s)
        self.receiving.turn(now_s)

    def outbox(self) -> list[AnyMessage]:
        return [*self.sending.outbox(), *self.receiving.outbox()]

    def take(self, body: bytes, now_s: float) -> None:
        message = decode(body)
        if message.role is Role.SENDER:
            self.receiving.message(message, now_s)
        else:
            self.sending.message(message, now_s)

    def admit(self, name: str, tokens: Sequence[int]) -> Grant:
        cached = self.kv.probe(SCOPE, tokens)
        grant = self.kv.admit(RequestId(name), SCOPE, tokens, first_tokens=len(tokens) - cached)
        if grant is None:
            raise RuntimeError("the rig's pool is too small for its test")
        return grant

    def holds(self, grant: Grant, tokens: Sequence[int]) -> bool:
        """Whether every valid page of this grant has exactly the content that these tokens make, byte for byte; zeros behind the last."""
        size, valid_tokens = self.geometry.page_tokens, grant.table.valid_tokens
        for ordinal in range(-(-valid_tokens // size)):
            end = min((ordinal + 1) * size, valid_tokens)
            content = payload(self.geometry, seed_of(tokens[:end]))
            if end % size:
                content = closed(self.geometry, content, end % size)
            if not np.array_equal(read_payload(self.memory, self.geometry, grant.table.stamps[2 * ordinal]), content):
                return False
        return True

    def check(self) -> None:
        """All laws, ledger against seals included."""
        self.kv.check(self.memory)

    def close(self) -> None:
        self.transport.close()
        self.receiving.close()


def as_it_is(body: bytes) -> list[bytes]:
    return [body]


@dataclass
class HandOff:
    name: str
    tokens: Sequence[int]
    pages: int
    grant: Grant
    sealed: int = 0
    next_token: int | None = None
    """What is said to follow, with the last page."""


class Rig:
    """`sender` computes, `receiver` answers. `forth` and `back` are the wires; what they return is delivered, in that order."""

    def __init__(self, sender: Node, receiver: Node, *, forth: Deliver = as_it_is, back: Deliver = as_it_is) -> None:
        self.sender, self.receiver = sender, receiver
        self.forth, self.back = forth, back
        self.ends: dict[str, dict[str, End]] = {"sender": {}, "receiver": {}}

    def begin(self, name: str, tokens: Sequence[int], now_s: float, *, deadline_s: float = 30.0) -> HandOff:
        """Both ends know the request; nothing is computed yet."""
        sender, receiver, valid_tokens = self.sender, self.receiver, len(tokens)
        receiver.receiving.expect(
            name, sender=sender.incarnation, scope=SCOPE, tokens=tokens, valid_tokens=valid_tokens, deadline_s=deadline_s, now_s=now_s
        )
        grant = sender.admit(f"prefill-{name}", tokens)
        sender.sending.begin(
            name, receiver=receiver.incarnation, scope=SCOPE, tokens=tokens, valid_tokens=valid_tokens, deadline_s=deadline_s, now_s=now_s
        )
        return HandOff(name, tokens, sender.geometry.pages_for(valid_tokens), grant)

    def compute(self, one: HandOff, pages: int, now_s: float) -> None:
        """The next pages of the prompt, up to `pages` in all, and they are offered; the last one is closed if it is not full."""
        node, table = self.sender, one.grant.table
        size = node.geometry.page_tokens
        end = min(pages * size, len(one.tokens))
        if end > table.valid_tokens:
            compute(node.kv, node.memory, one.grant, one.tokens, end)
        full, tail = end // size, None
        if end % size and one.sealed < pages:
            closed_tail = node.sending.close_tail(SCOPE, table.stamps[2 * full : 2 * full + 2], full, end % size)
            if isinstance(closed_tail, PageFault):
                raise RuntimeError(f"the rig's own page is broken: {closed_tail}")
            tail = closed_tail
        follows = one.next_token if end == len(one.tokens) else None
        node.sending.sealed(one.name, one.grant.pin, table.stamps[2 * one.sealed : 2 * full], now_s, tail=tail, next_token=follows)
        one.sealed = pages

    def pump(self, now_s: float) -> None:
        """One turn of both nodes, and what they say is delivered."""
        self.sender.turn(now_s)
        self.receiver.turn(now_s)
        while out := [(self.receiver, self.forth, m) for m in self.sender.outbox()] + [
            (self.sender, self.back, m) for m in self.receiver.outbox()
        ]:
            for node, wire, message in out:
                for body in wire(encode(message)):
                    node.take(body, now_s)
        for side, node in (("sender", self.sender), ("receiver", self.receiver)):
            for end in (*node.sending.ended(), *node.receiving.ended()):
                if end.handoff in self.ends[side]:
                    raise RuntimeError("a hand-off ended twice")
                self.ends[side][end.handoff] = end

    @property
    def idle(self) -> bool:
        """Nothing is held by a hand-off at either end."""
        nodes = (self.sender, self.receiver)
        return not any(node.sending.open_handoffs or node.receiving.open_handoffs for node in nodes)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
