"""What a router and its nodes say to each other beyond `node.messages`: who hands what to whom, and what the caches hold.

Owns the message types; `node.messages` frames them. Nodes have no control connection of their own: what the two ends of a hand-off say
to each other (`handoff.messages`) goes through the router as `Relay`, unread, and the pages go directly. Law L9: nothing here means that
a page has arrived; only the receiver's own receipt does.
"""

from __future__ import annotations

import msgspec

from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import Request


class NodeCard(msgspec.Struct, array_like=True, frozen=True):
    """Who a node is, for as long as this process runs."""

    name: str
    role: str
    incarnation: str
    """Random, one per process start: what was meant for another process is never taken for this one's."""
    transport: str
    """How it moves pages; both ends of a hand-off must use the same."""


class Prefill(msgspec.Struct, tag="prefill", array_like=True, frozen=True):
    """Compute the prompt and the first token, and hand the full pages over to `receiver` (an incarnation)."""

    request: Request
    handoff: str
    receiver: str
    timeout_s: float


class Receive(msgspec.Struct, tag="receive", array_like=True, frozen=True):
    """Answer this request; `sender` (an incarnation) computes its prompt and hands the pages over."""

    request: Request
    handoff: str
    sender: str
    timeout_s: float


class Give(msgspec.Struct, tag="give", array_like=True, frozen=True):
    """Hand over what is cached of these tokens, no request being open."""

    handoff: str
    scope: Scope
    tokens: tuple[int, ...]
    receiver: str
    timeout_s: float


class Take(msgspec.Struct, tag="take", array_like=True, frozen=True):
    """The other end of `Give`: these pages go into the prefix cache."""

    handoff: str
    scope: Scope
    tokens: tuple[int, ...]
    sender: str
    timeout_s: float


class Relay(msgspec.Struct, tag="relay", array_like=True, frozen=True):
    """One end of a hand-off to the other: `peer` is the incarnation that it is for, on its way to the router, and is from, on its way to
    the node."""

    handoff: str
    peer: str
    body: bytes


class PeerGone(msgspec.Struct, tag="gone", array_like=True, frozen=True):
    """This incarnation is dead, unreachable or frozen: every hand-off with it has failed."""

    incarnation: str


class HandoffLost(msgspec.Struct, tag="lost", array_like=True, frozen=True):
    """The prompt of this request will not be handed over."""

    request_id: RequestId


class CacheChanges(msgspec.Struct, tag="cache", array_like=True, frozen=True):
    """What came to the node's prefix cache and what went: keys as `kv.feed` makes them, joined."""

    came: bytes
    went: bytes


ToNode = Prefill | Receive | Give | Take | Relay | PeerGone | HandoffLost
FromNode = Relay | CacheChanges
