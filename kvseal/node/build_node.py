"""From a node's configuration to its end of hand-offs: the transport, the sessions, the feed.

Owns the choice of transport. Never decides what is handed over: `node_engine` does.
"""

from __future__ import annotations

import secrets
from typing import Protocol, runtime_checkable

from kvseal.core.clock import Clock
from kvseal.core.config import NodeConfig
from kvseal.core.errors import LawBroken
from kvseal.core.laws import Law
from kvseal.exec.backend import Backend
from kvseal.handoff.make import make_transport
from kvseal.handoff.node import Receiving, Sending
from kvseal.handoff.prover import Prover
from kvseal.handoff.session import Patience
from kvseal.handoff.tcp import TLS
from kvseal.handoff.transport import Transport
from kvseal.kv.feed import CacheFeed
from kvseal.kv.manager import KVManager
from kvseal.kv.prefix_key import PrefixKeys
from kvseal.node.channel import client_context, server_context
from kvseal.node.engine import Computes
from kvseal.node.node_engine import NodeEngine
from kvseal.node.peer_messages import NodeCard
from kvseal.node.report import StartReport
from kvseal.sched.receiving import HandoffScheduler
from kvseal.sched.scheduler import Scheduler


@runtime_checkable
class SharedArena(Protocol):
    """An arena behind a file that another process may map."""

    @property
    def file(self) -> int: ...


def assemble_node(
    node: NodeConfig,
    scheduler: Scheduler,
    kv: KVManager,
    report: StartReport,
    runner: Computes,
    backend: Backend,
    clock: Clock,
    *,
    transport: Transport | None = None,
    prover: Prover | None = None,
) -> NodeEngine:
    """`transport`, `prover`: instead of the one that the configuration names and of a thread, for tests."""
    if not isinstance(scheduler, HandoffScheduler):
        raise LawBroken(Law.L8, "a node was given a scheduler that does not know of hand-offs")
    incarnation = secrets.token_hex(12)
    if transport is None:
        transport = new_transport(node, backend, incarnation)
    patience = Patience(silence_s=node.silence_s)
    return NodeEngine(
        report=report,
        kv=kv,
        scheduler=scheduler,
        runner=runner,
        backend=backend,
        clock=clock,
        node=node,
        card=NodeCard(node.name, node.role, transport.incarnation, transport.name),
        sending=Sending(kv, transport, key=node.secret, memory=backend.arena.memory, patience=patience),
        receiving=Receiving(kv, transport, key=node.secret, memory=backend.arena.memory, patience=patience, prover=prover),
        transport=transport,
        feed=CacheFeed(feed_keys(node.secret, report), report.pool_pages),
    )


def feed_keys(secret: bytes, report: StartReport) -> PrefixKeys:
    """The keys that a router looks for, the same on every node of a fleet. The format names weights, KV dtype and layout."""
    format = bytes.fromhex(report.kv_format)
    number = int.from_bytes(format, "big")
    return PrefixKeys(secret, weights_digest=format, adapter="", rope=b"", format=number, page_tokens=report.page_tokens)


def new_transport(node: NodeConfig, backend: Backend, incarnation: str) -> Transport:
    """What was asked for; else shared memory on one machine and TCP between machines, both placed by the receiver. An arena that cannot be
    shared (the reference backend's) is fetched over the loopback. Raises `ConfigError`."""
    arena = backend.arena
    file = arena.file if isinstance(arena, SharedArena) else -1
    name = node.transport or ("shm" if node.listen is None and file >= 0 else "tcp")
    tls = None if node.tls is None else TLS(server_context(node.tls), client_context(node.tls))
    host = node.listen or "127.0.0.1"
    return make_transport(name, arena.memory, file=file, incarnation=incarnation, secret=node.secret, host=host, tls=tls)
