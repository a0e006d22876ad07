"""A worker's life: one node, a link for routers, and perhaps an HTTP API of its own.

Owns start and stop of ``kvseal worker``. The node's engine is a process that is started again when it dies, as under ``kvseal serve``; the
link is there as long as this process. On SIGTERM or SIGINT nothing new is taken, what is open may finish within the drain timeout.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from kvseal.core.config import NodeConfig, WorkerConfig
from kvseal.core.errors import ConfigError
from kvseal.node.link_server import LinkServer
from kvseal.node.node_client import NODE_MODULE, NodeClient

DRAIN_S = 30.0

_log = logging.getLogger("kvseal.worker")


def run_worker(config: WorkerConfig, *, module: str = NODE_MODULE) -> None:
    """Serves until told to stop. Raises `SetupError` when it cannot start as asked."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    asyncio.run(_serve(config, module))


async def _serve(config: WorkerConfig, module: str) -> None:
    node = config.engine.node
    if node is None:
        raise ConfigError("a worker needs a role")
    client = await NodeClient.start_node(config.engine, module=module)
    try:
        links = LinkServer(client, node.secret, config.tls)
        await links.listen(config.host, config.port)
        _say(config, node, client, links)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        _log.warning("draining: %d open requests have %.0f s to finish", client.open_requests, DRAIN_S)
        await client.drain(DRAIN_S)
        await links.close()
    finally:
        await client.close()


def _say(config: WorkerConfig, node: NodeConfig, client: NodeClient, links: LinkServer) -> None:
    report = client.report
    print(
        f"KVSeal {node.role} worker {node.name} is ready at {config.host}:{links.port}: {report.model_name}, "
        f"{report.pool_tokens} tokens in the pool, {report.served_context_tokens} per request, "
        f"{'TLS and ' if config.tls else ''}shared secret needed",
        file=sys.stderr,
        flush=True,
    )
