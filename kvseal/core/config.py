"""What the operator asked for, checked once, then frozen.

Owns the server's options and the only reads of the environment. Never edited after start-up: what was *derived* from it (pool size,
served context) is a `StartReport` of its own. Unknown options are errors. There is no option that turns a check off.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from kvseal.core.errors import ConfigError
from kvseal.core.files import read_file

WEIGHT_FORMATS = ("auto", "fp32", "bf16", "q8", "q4")
KV_DTYPES = ("fp16", "fp32", "int8", "int4")
BACKENDS = ("cpu", "reference")
PAGE_TOKENS = (8, 16, 32, 64)
MAX_THREADS = 1024
ROLES = ("prefill", "decode")
ON_HANDOFF_FAILURE = ("recompute", "fail")
TRANSPORTS = ("shm", "tcp", "nixl")
"""How pages go: shared memory of one machine, TCP, or NIXL (the extra ``[nixl]``)."""
MIN_SECRET_BYTES = 16
MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """This end's certificate and key, and the authority that must have signed the other end's. PEM."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What makes an engine one node of several."""

    role: str
    name: str
    secret: bytes = field(repr=False)
    """Shared by all nodes and the router: prefix keys, token digests and links rest on it."""
    on_failure: str = "recompute"
    """A failed hand-off: compute the prompt on the decode node, or fail the request."""
    silence_s: float = 25.0
    """A peer of which nothing is heard for so long, in the middle of a hand-off, is given up: more than a step of its engine may take."""
    listen: str | None = None
    """HOST where pages are fetched; None: nodes of one machine."""
    transport: str | None = None
    """None: shared memory for nodes of one machine, else TCP."""
    tls: TLSFiles | None = None
    """For the pages, where they go over TCP."""
    memory_share: float = 1.0
    """Of the machine's free memory, for a pool whose size is not given: several nodes of one machine share it."""

    def __post_init__(self) -> None:
        _one_of("--role", self.role, ROLES)
        _one_of("--on-handoff-failure", self.on_failure, ON_HANDOFF_FAILURE)
        if self.transport is not None:
            _one_of("--transport", self.transport, TRANSPORTS)
        if self.transport == "nixl" and self.tls is not None:
            raise ConfigError("--transport nixl cannot use TLS: its pages do not go through connections of ours; leave one of the two out")
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"the shared secret has {len(self.secret)} bytes; it needs at least {MIN_SECRET_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs to build itself."""

    model: Path
    backend: str = "cpu"
    weights: str = "auto"
    kv_dtype: str = "fp16"
    page_tokens: int = 16
    context_tokens: int | None = None
    """None: as much as the model promises and the pool holds. A number is a promise: start or refuse (L1)."""
    pool_tokens: int | None = None
    kv_memory_bytes: int | None = None
    """At most one of pool_tokens and kv_memory_bytes. Neither: a default from the machine's free memory."""
    threads: int = 0
    """0: one per core that this process may use."""
    chunk_tokens: int = 512
    """Most new tokens computed in one step, over all requests."""
    max_running: int = 64
    max_queued: int = 1024
    wipe_pages: bool = False
    node: NodeConfig | None = None
    """None: an engine by itself."""

    def __post_init__(self) -> None:
        _one_of("--backend", self.backend, BACKENDS)
        _one_of("--weights", self.weights, WEIGHT_FORMATS)
        _one_of("--kv-dtype", self.kv_dtype, KV_DTYPES)
        if self.page_tokens not in PAGE_TOKENS:
            raise ConfigError(f"--page-tokens is {self.page_tokens}; choose from {', '.join(map(str, PAGE_TOKENS))}")
        if self.pool_tokens is not None and self.kv_memory_bytes is not None:
            raise ConfigError("--pool-tokens and --kv-memory both size the KV pool; give one of them")
        _at_least("--context-tokens", self.context_tokens, 1)
        _at_least("--pool-tokens", self.pool_tokens, 1)
        _at_least("--kv-memory", self.kv_memory_bytes, 1)
        _at_least("--threads", self.threads, 0)
        if self.threads > MAX_THREADS:
            raise ConfigError(f"--threads is {self.threads}; at most {MAX_THREADS}, and more than one per core only costs time")
        _at_least("--chunk-tokens", self.chunk_tokens, 1)
        _at_least("--max-running", self.max_running, 1)
        _at_least("--max-queued", self.max_queued, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One node for routers on other machines."""

    engine: EngineConfig
    """Its `node` is set."""
    host: str
    port: int
    tls: TLSFiles | None = None
    http: ServeConfig | None = None
    """With an HTTP API of its own, for a front that speaks ``kv_transfer_params``."""
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Several nodes behind one API: so many processes here, or workers elsewhere."""

    prefill: int = 0
    decode: int = 0
    workers: tuple[str, ...] = ()
    """HOST:PORT of each worker's link; then nothing is started here."""
    secret: bytes | None = field(default=None, repr=False)
    """Shared with the workers. Nodes that are started here get one of their own."""
    on_failure: str = "recompute"
    tls: TLSFiles | None = None

    def __post_init__(self) -> None:
        _one_of("--on-handoff-failure", self.on_failure, ON_HANDOFF_FAILURE)
        if self.workers:
            if self.secret is None:
                raise ConfigError("workers are reached with a shared secret only; give --secret-file")
        elif self.prefill < 1 or self.decode < 1:
            raise ConfigError(
                f"--prefill {self.prefill} --decode {self.decode}: a hand-off needs at least one node of each role; "
                "leave both out for one engine that does everything"
            )
        if max(self.prefill + self.decode, len(self.workers)) > MAX_NODES:
            raise ConfigError(f"at most {MAX_NODES} nodes stand behind one API")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything the HTTP process needs."""

    engine: EngineConfig
    fleet: FleetConfig | None = None
    """None: one engine."""
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: Path | None = None
    chat_template: Path | None = None
    strict_fields: bool = False
    max_body_bytes: int = 4 * 2**20
    request_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; ports run from 0 (any free one) to 65535")
        _at_least("--max-body", self.max_body_bytes, 1024)
        if self.request_timeout_s is not None and not 0 < self.request_timeout_s < math.inf:
            raise ConfigError(f"--request-timeout is {self.request_timeout_s}; give seconds above 0, or leave it out for no deadline")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"--drain-timeout is {self.drain_timeout_s}; give seconds, 0 for no patience at all")


def read_secret(file: Path) -> bytes:
    """The shared secret of a fleet: the file's content without the white space around it. Raises `ConfigError`."""
    try:
        secret = read_file(file).strip()
    except OSError as error:
        raise ConfigError(f"--secret-file: {file} cannot be read ({error.strerror})") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--secret-file: {file} holds {len(secret)} bytes and a secret needs at least {MIN_SECRET_BYTES}; make one with: "
            "openssl rand -hex 32"
        )
    return secret


def cache_dir() -> Path:
    """Where fetched models and packed weights are kept: KVSEAL_CACHE, else XDG_CACHE_HOME/kvseal, else ~/.cache/kvseal."""
    own = os.environ.get("KVSEAL_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvseal"


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} is {value!r}; choose from {', '.join(allowed)}")


def _at_least(flag: str, value: float | None, low: float) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{flag} is {value}; it must be at least {low}")
