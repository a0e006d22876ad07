"""The first moments of ``kvseal serve``: the port, then the engine process, then everything else.

Owns their order. The port is taken before the model is loaded, so that a port in use is known at once; the engine process starts before
this one imports what speaks HTTP, so that neither waits for the other. Imports little itself.
"""

from __future__ import annotations

import errno
import gc
import socket

from kvseal.core.config import ServeConfig
from kvseal.core.errors import ConfigError, PortInUse, SetupError
from kvseal.node.spawn import SpawnedEngine

LISTEN_BACKLOG = 2048


def serve(config: ServeConfig) -> None:
    """Serves until told to stop. Raises `SetupError` when it cannot start as asked."""
    with listen(config.host, config.port) as listener:
        gc.disable()  # Whatever a start makes stays: looking for garbage in it takes a tenth of the time. `server` enables it again.
        spawned = SpawnedEngine(config.engine) if config.fleet is None else None
        try:
            from kvseal.serve.server import run_server

            run_server(config, listener=listener, spawned=spawned)
        finally:
            if spawned is not None:
                spawned.discard()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; connections wait in its line until the server is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host is {host!r}, which is no address of this machine ({error.strerror or error})") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another program; choose another with --port, or --port 0 for any"
            ) from error
        raise SetupError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return listener
