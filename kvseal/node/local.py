"""Where a router's nodes come from: started on this machine by one command, each a process of its own, or workers elsewhere.

Owns how the machine is divided: each node gets its share of the cores and of the free memory unless the operator says otherwise. The nodes
share a secret that nobody else has, and pages go through shared memory.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import replace

from kvseal.core.config import EngineConfig, FleetConfig, NodeConfig
from kvseal.node.channel import address_of
from kvseal.node.node_client import NODE_MODULE, NodeClient
from kvseal.node.remote import RemoteNode
from kvseal.node.router import Router

SECRET_BYTES = 32
WORKER_PATIENCE_S = 60.0
"""A router and its workers may be started in any order."""


async def start_local(config: EngineConfig, fleet: FleetConfig, *, module: str = NODE_MODULE) -> Router:
    """Starts every node and waits until all can serve. Raises the first node's `SetupError`, or `EngineDied`."""
    secret = fleet.secret or secrets.token_bytes(SECRET_BYTES)
    configs = node_configs(config, fleet, secret, cores=len(os.sched_getaffinity(0)))
    starting = [asyncio.create_task(NodeClient.start_node(one, module=module)) for one in configs]
    try:
        nodes = await asyncio.gather(*starting)
        return Router(nodes, secret=secret, on_failure=fleet.on_failure)
    except BaseException:
        for task in starting:
            task.cancel()
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, NodeClient):
                await result.close()
        raise


async def connect_workers(fleet: FleetConfig) -> Router:
    """A router over workers that run, or will soon. Raises `SetupError` when one cannot be reached, trusted or combined with the others."""
    secret = fleet.secret or b""
    addresses = [address_of(worker, "--workers") for worker in fleet.workers]
    connecting = [RemoteNode.connect(*at, secret=secret, tls=fleet.tls, patience_s=WORKER_PATIENCE_S) for at in addresses]
    results = await asyncio.gather(*connecting, return_exceptions=True)
    nodes = [result for result in results if isinstance(result, RemoteNode)]
    try:
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return Router(nodes, secret=secret, on_failure=fleet.on_failure)
    except BaseException:
        for node in nodes:
            await node.close()
        raise


def node_configs(config: EngineConfig, fleet: FleetConfig, secret: bytes, *, cores: int) -> list[EngineConfig]:
    """One for each node. Sizes that were given are each node's; what was not given is divided."""
    names = [("prefill", f"prefill-{i}") for i in range(fleet.prefill)] + [("decode", f"decode-{i}") for i in range(fleet.decode)]
    return [
        replace(
            config,
            threads=config.threads or max(1, cores // len(names)),
            node=NodeConfig(role=role, name=name, secret=secret, on_failure=fleet.on_failure, memory_share=1 / len(names)),
        )
        for role, name in names
    ]
