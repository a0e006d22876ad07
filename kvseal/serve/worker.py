"""A worker's life: one node, a link for routers, and perhaps an HTTP API of its own.

Owns start and stop of ``kvseal worker``. The node's engine is a process that is started again when it dies, as under ``kvseal serve``; the
link is there as long as this process. On SIGTERM or SIGINT nothing new is taken, what is open may finish within the drain timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import sys
import time

from kvseal.core.config import NodeConfig, WorkerConfig
from kvseal.core.errors import ConfigError
from kvseal.node.link_server import LinkServer
from kvseal.node.node_client import NODE_MODULE, NodeClient
from kvseal.node.transfer_desk import TransferDesk
from kvseal.serve.auth import KeyRing
from kvseal.serve.boot import listen
from kvseal.serve.server import serve_http
from kvseal.serve.tokenizer_files import load_tokenizer

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
    started_s = time.monotonic()
    keys = KeyRing(None if config.http is None else config.http.api_keys)  # before the model is loaded
    client = await NodeClient.start_node(config.engine, module=module)
    links = LinkServer(client, node.secret, config.tls)
    desk = TransferDesk(client, links, secret=node.secret, host=config.host, tls=config.tls)
    try:
        await links.listen(config.host, config.port)
        _say(config, node, client, links)
        if config.http is None:
            await _until_stopped(client)
        else:
            http = config.http
            tokenizer = await asyncio.to_thread(load_tokenizer, http.engine.model)
            with listen(http.host, http.port) as listener:
                await serve_http(
                    http, listener, tokenizer, client, None, keys, started_s=started_s, transfers=desk, secret=scope_secret(node.secret)
                )
    finally:
        await links.close()
        await desk.close()
        await client.close()


async def _until_stopped(client: NodeClient) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    _log.warning("draining: %d open requests have %.0f s to finish", client.open_requests, DRAIN_S)
    await client.drain(DRAIN_S)


def scope_secret(secret: bytes) -> bytes:
    """The same on every worker, so that a tenant's prefix is the same prefix everywhere."""
    return hashlib.blake2b(secret, digest_size=32, person=b"kvseal-scopes").digest()


def _say(config: WorkerConfig, node: NodeConfig, client: NodeClient, links: LinkServer) -> None:
    report = client.report
    print(
        f"KVSeal {node.role} worker {node.name} is ready at {config.host}:{links.port}: {report.model_name}, "
        f"{report.pool_tokens} tokens in the pool, {report.served_context_tokens} per request, "
        f"{'TLS and ' if config.tls else ''}shared secret needed",
        file=sys.stderr,
        flush=True,
    )
