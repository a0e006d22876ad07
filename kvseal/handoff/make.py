"""Which transports there are, by name.

Owns what each needs. NIXL is imported only when it is asked for: it is the extra ``[nixl]``.
"""

from __future__ import annotations

from collections.abc import Callable

from kvseal.core.config import TRANSPORTS
from kvseal.core.errors import ConfigError
from kvseal.handoff.nixl import Nixl
from kvseal.handoff.proof import Memory
from kvseal.handoff.shm import SharedMemory
from kvseal.handoff.tcp import TCP, TLS
from kvseal.handoff.transport import Transport


def make_transport(
    name: str,
    memory: Memory,
    *,
    file: int,
    incarnation: str,
    secret: bytes,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: TLS | None = None,
    wake: Callable[[], None] | None = None,
) -> Transport:
    """`memory` [pages, page_bytes], `file`: the arena's (shared memory alone needs it; -1: none). Raises `ConfigError`."""
    if name == "shm":
        return SharedMemory(memory, file, incarnation=incarnation, secret=secret, wake=wake)
    if name == "tcp":
        return TCP(memory, incarnation=incarnation, secret=secret, host=host, port=port, tls=tls, wake=wake)
    if name == "nixl":
        return Nixl(memory, incarnation=incarnation, host=host, wake=wake)
    raise ConfigError(f"there is no transport {name!r}; choose from {', '.join(TRANSPORTS)}")
