"""What every engine plan has in common: the question, the pool, the verdict. Typed, frozen, JSON-ready.

Owns no rule of any engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import KVFormat
from kvseal.plan.footprint import Parallel

_VERSION = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6}x?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One question to an engine. None means: the engine's own default."""

    engine: str = "vllm"
    version: tuple[int, int, int] = (0, 33, 0)
    version_text: str = "0.33.0"
    parallel: Parallel = field(default_factory=Parallel)
    context_tokens: int = 4096
    users: int = 1
    kv_format: KVFormat
    kv_bytes: int | None = None
    """Pool memory per GPU when it is known: bypasses every estimate."""
    pool_tokens: int | None = None
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    memory_fraction: float | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None
    weights_dtype: str | None = None
    block_tokens: int | None = None
    max_batched_tokens: int | None = None
    max_sequences: int | None = None
    in_flight_batches: int | None = None
    prefix_caching: bool = True
    hybrid_manager: bool = True
    layout: str | None = None
    speculative_tokens: int = 0
    drafts: bool = False
    swa_ratio: float | None = None
    mamba_ratio: float | None = None
    max_total_tokens: int | None = None
    dp_attention: bool = False
    mm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One block table of the engine, as it allocates it."""

    kind: str
    layers: int
    block_tokens: int
    page_bytes: int
    blocks_per_request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool of a known size in bytes (one rank), in the engine's own units."""

    available_bytes: int
    block_bytes: int
    blocks: int
    tokens: int
    """What the engine prints, or advertises, as its number of tokens."""
    concurrency: float
    largest_context_tokens: int
    """The longest single request that this pool really holds."""
    detail: tuple[str, ...] = ()
    sub_pools: tuple[tuple[str, int, int], ...] = ()
    """(name, tokens or slots, bytes) for pools inside the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Where the memory of one GPU goes. `low` and `high` bound the KV pool; `kv` is the best figure."""

    gpu_total: int
    usable: int
    weights: int
    activation: int
    non_torch: int
    graphs: int
    kv: int
    kv_low: int
    kv_high: int
    how: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The engine's answer. `pool` is None when neither a GPU nor a pool size was given."""

    engine: str
    version: str
    kv_format: str
    groups: tuple[GroupPlan, ...]
    bytes_per_block: int
    blocks_per_request: int
    request_bytes: int
    """What one request of `context_tokens` makes the engine set aside on one rank."""
    budget: Budget | None
    pool: Pool | None
    pool_low: Pool | None
    pool_high: Pool | None
    starts: bool | None
    """Whether the engine would start with this context; None without a pool."""
    outcome: str
    """What happens to the request that does not fit."""
    log_line: str
    notes: tuple[str, ...]
    rule: str


def parse_version(text: str) -> tuple[int, int, int]:
    """Major, minor, patch; ``0.11.0``, ``v0.22``, ``~0.27 (Aug)``, ``0.5.1x`` (taken as 0.5.15) and llama.cpp's ``b4567`` all work."""
    found = _VERSION.search(text[:60])
    if found is None:
        raise ConfigError(f"--engine-version {text[:40]!r} is not a version; write 0.33.0")
    parts = [int(part[:-1] + "5") if part.endswith("x") else int(part) for part in found.group().split(".")[:3]]
    numbers = [*parts, 0, 0]
    return numbers[0], numbers[1], numbers[2]
