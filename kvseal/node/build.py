"""From options to an engine: the only file that names concrete parts.

Owns the sizing of the pool, the choice of backend and the start report. Law L1: the served context is never larger than the pool; a pool
that memory cannot hold, or that cannot hold what was promised, refuses to start and names what would do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvseal.core.clock import Clock, MonotonicClock
from kvseal.core.config import EngineConfig, cache_dir
from kvseal.core.errors import ConfigError, PoolTooSmall
from kvseal.exec.backend import Backend
from kvseal.exec.backends.reference import ReferenceBackend
from kvseal.exec.loader import load_model
from kvseal.exec.runner import Runner
from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.types import ModelWeights
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.kv.manager import KVManager
from kvseal.node.engine import Computes, Engine
from kvseal.node.report import StartReport
from kvseal.sched.receiving import HandoffScheduler
from kvseal.sched.scheduler import Scheduler

DEFAULT_POOL_REQUESTS = 8
"""Without an option the pool holds so many requests of the model's full context, if memory allows."""
DEFAULT_POOL_SHARE = 0.4
"""... but takes at most this share of the memory that is available beside the weights."""
STEP_TARGET_S = 1.0
"""Chunks are made smaller where a step would last longer: far below what counts as a stall (`client.STALL_AFTER_S`)."""
SPARE_BYTES = 256 * 2**20
"""Left for the process itself whatever the operator asks for."""


def build_engine(
    config: EngineConfig,
    *,
    clock: Clock | None = None,
    step_s: float | None = STEP_TARGET_S,
    around: Callable[[Computes], Computes] | None = None,
) -> Engine:
    """`step_s` (None: steps as large as they get) and `around`, which is put between scheduler and runner, are for measuring.

    Raises `SetupError`: ModelNotFound, ModelCorrupt, ModelUnsupported, PoolTooSmall or ConfigError.
    """
    weights = load_model(config.model, context_tokens=config.context_tokens)
    geometry = _geometry(config, weights)
    share = 1.0 if config.node is None else config.node.memory_share
    available_bytes = int(available_memory_bytes() * share) - weights.bytes
    pool_pages = pages_for_pool(config, geometry, weights.spec, available_bytes=available_bytes)
    capacity = Capacity.derive(
        model_context_tokens=weights.spec.context_tokens,
        pool_pages=pool_pages,
        page_tokens=geometry.page_tokens,
        fixed_context_tokens=config.context_tokens,
    )
    threads = config.threads or len(os.sched_getaffinity(0))
    built = _build_backend(config, weights, geometry, pool_pages, threads)
    report = start_report(
        config,
        weights.spec,
        geometry,
        capacity,
        weights_format=built.weights_format,
        weights_bytes=built.weights_bytes,
        threads=threads,
        instruction_set=built.instruction_set,
    )
    made = clock or MonotonicClock()
    return assemble(config, built.backend, capacity, report, clock=made, runner=built.runner, step_s=step_s, around=around)


def assemble(
    config: EngineConfig,
    backend: Backend,
    capacity: Capacity,
    report: StartReport,
    *,
    clock: Clock,
    runner: Computes | None = None,
    step_s: float | None = STEP_TARGET_S,
    around: Callable[[Computes], Computes] | None = None,
) -> Engine:
    """The parts above a backend, the same for every backend. `runner`: None computes through the backend's door and draws in NumPy."""

    def wipe(pages: Sequence[int]) -> None:
        backend.wipe(np.array(pages, dtype=np.int32))

    kv = KVManager(
        backend.geometry,
        pool_pages=capacity.pool_pages,
        capacity=capacity,
        secret=os.urandom(32),
        wipe=wipe if config.wipe_pages else None,
    )
    scheduler_class = Scheduler if config.node is None else HandoffScheduler
    scheduler = scheduler_class(
        kv,
        clock,
        chunk_tokens=config.chunk_tokens,
        max_running=config.max_running,
        max_queued=config.max_queued,
        page_tokens=backend.geometry.page_tokens,
        step_s=step_s,
    )
    runner = runner or Runner(backend)
    runner = runner if around is None else around(runner)
    if config.node is not None:
        from kvseal.node.build_node import assemble_node

        return assemble_node(config.node, scheduler, kv, report, runner, backend, clock)
    return Engine(report=report, kv=kv, scheduler=scheduler, runner=runner, backend=backend, clock=clock)


def pages_for_pool(config: EngineConfig, geometry: KVGeometry, spec: ModelSpec, *, available_bytes: int) -> int:
    """How many pages the pool gets. `available_bytes`: what memory holds beside the weights. Raises `PoolTooSmall` with what would fit."""
    most_pages = max(0, available_bytes - SPARE_BYTES) // geometry.page_bytes
    if config.kv_memory_bytes is not None:
        pages = config.kv_memory_bytes // geometry.page_bytes
        if pages < 1:
            raise PoolTooSmall(
                f"--kv-memory gives the pool {config.kv_memory_bytes} bytes, and one page of {geometry.page_tokens} tokens takes "
                f"{geometry.page_bytes}; give at least --kv-memory {geometry.page_bytes}"
            )
        asked = f"--kv-memory {config.kv_memory_bytes}"
    elif config.pool_tokens is not None:
        pages = geometry.pages_for(config.pool_tokens)
        asked = f"--pool-tokens {config.pool_tokens}"
    else:
        context_tokens = config.context_tokens or spec.context_tokens
        pages = min(
            DEFAULT_POOL_REQUESTS * geometry.pages_for(context_tokens),
            int(max(0, available_bytes) * DEFAULT_POOL_SHARE) // geometry.page_bytes,
        )
        if config.context_tokens is not None:  # a promise: more than the share, if memory holds it
            pages = max(pages, geometry.pages_for(config.context_tokens))
        asked = f"a pool for --context-tokens {config.context_tokens}" if config.context_tokens else "the smallest pool"
        pages = max(pages, 1)
    if pages > most_pages:
        fits_tokens = most_pages * geometry.page_tokens
        raise PoolTooSmall(
            f"{asked} needs {_mib(pages * geometry.page_bytes)} for {pages * geometry.page_tokens} tokens, and this machine has room for "
            f"{_mib(most_pages * geometry.page_bytes)} beside the weights: at most --pool-tokens {fits_tokens}"
            + ("" if config.kv_dtype in ("int8", "int4") else "; --kv-dtype int8 takes half as much")
        )
    return pages


def start_report(
    config: EngineConfig,
    spec: ModelSpec,
    geometry: KVGeometry,
    capacity: Capacity,
    *,
    weights_format: str,
    weights_bytes: int,
    threads: int,
    instruction_set: str,
) -> StartReport:
    return StartReport(
        model_name=config.model.stem if config.model.is_file() else config.model.name,
        family=spec.family,
        backend=config.backend,
        instruction_set=instruction_set,
        weights_format=weights_format,
        weights_bytes=weights_bytes,
        threads=threads,
        kv_dtype=config.kv_dtype,
        kv_format=f"{geometry.format:016x}",
        page_tokens=geometry.page_tokens,
        kv_token_bytes=geometry.token_bytes,
        kv_token_formula=token_formula(geometry),
        pool_pages=capacity.pool_pages,
        pool_tokens=capacity.pool_tokens,
        pool_bytes=capacity.pool_pages * geometry.page_bytes,
        model_context_tokens=spec.context_tokens,
        served_context_tokens=capacity.served_context_tokens,
        context_reason=capacity.context_reason,
        full_length_requests=capacity.full_length_requests,
        max_running=config.max_running,
        max_queued=config.max_queued,
        chunk_tokens=config.chunk_tokens,
        wipe_pages=config.wipe_pages,
        vocab_size=spec.vocab_size,
        eos_tokens=spec.eos_tokens,
        bos_token=spec.bos_token,
    )


def token_formula(geometry: KVGeometry) -> str:
    """How `KVGeometry.token_bytes` comes about, e.g. "2 (K and V) x 30 layers x 3 KV heads x 64 x 2 B"."""
    bits, scale_bytes = geometry.kv_dtype.element_bits, geometry.kv_dtype.scale_bytes
    each = f"{bits // 8} B" if bits % 8 == 0 else f"{bits / 8} B"
    head = f"{geometry.head_dim} x {each}"
    if scale_bytes:
        head = f"({head} + {scale_bytes} B scale)"
    return f"2 (K and V) x {geometry.layers} layers x {geometry.kv_heads} KV heads x {head}"


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process could still allocate: the kernel's MemAvailable, or what its control group has left if that is less."""
    available = _meminfo_bytes(proc / "meminfo", "MemAvailable:")
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        # Page cache counts as used, and is given back on demand.
        given_back = _meminfo_bytes(cgroup / "memory.stat", "inactive_file", unit=1) or 0
        left = max(0, limit - used + given_back)
        available = left if available is None else min(available, left)
    if available is None:  # Not Linux: half of the physical memory is a guess that cannot hurt much.
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return available


def _geometry(config: EngineConfig, weights: ModelWeights) -> KVGeometry:
    # Other arithmetic makes other K and V of the same weights, so the backend and its weight format are part of the name (L10).
    digest = hashlib.blake2b(weights.digest, digest_size=32, person=b"kvseal-computed")
    digest.update(f"{config.backend}|{config.weights}".encode())
    return KVGeometry(
        layers=weights.spec.layers,
        kv_heads=weights.spec.kv_heads,
        head_dim=weights.spec.head_dim,
        kv_dtype=KVDtype(config.kv_dtype),
        page_tokens=config.page_tokens,
        weights_digest=digest.digest(),
    )


@dataclass(frozen=True, slots=True)
class _Built:
    backend: Backend
    instruction_set: str
    weights_format: str
    weights_bytes: int
    """What the weights take in the form that is computed with."""
    runner: Computes | None = None


def _build_backend(config: EngineConfig, weights: ModelWeights, geometry: KVGeometry, pages: int, threads: int) -> _Built:
    if config.backend == "reference":
        if config.weights not in ("auto", "fp32"):
            raise ConfigError(f"--weights {config.weights} needs the cpu backend; the reference backend computes in fp32")
        return _Built(ReferenceBackend(weights, geometry, pages=pages), "NumPy", "fp32", weights.bytes)
    try:
        # Only here, so that the reference backend runs where nothing was compiled.
        from kvseal._native import CHECKED
        from kvseal.exec.backends.cpu import CPUBackend
        from kvseal.exec.backends.cpu_steady import SteadyRunner
        from kvseal.exec.weights.packed_cache import PackedCache
    except ImportError as error:
        raise ConfigError(
            f"the native kernels cannot be loaded from {Path(__file__).parents[1]} ({error}). If that is a source tree, run elsewhere what "
            "`pip install` built, or build in place with `pip install -e`; --backend reference needs no kernels"
        ) from error
    backend = CPUBackend(
        weights,
        geometry,
        pages=pages,
        weight_format=config.weights,
        threads=threads,
        packed_cache=PackedCache(cache_dir() / "packed"),
        shared_arena=config.node is not None,
    )
    if not CHECKED:
        raise ConfigError("these kernels were built without seal checks, for a benchmark; no engine starts on them")
    packings = backend.packings if config.weights == "auto" else config.weights
    runner = SteadyRunner(backend.stepper(), Runner(backend, backend.sampler()))
    return _Built(backend, backend.instruction_set, packings, backend.packed_bytes, runner)


def _meminfo_bytes(path: Path, name: str, *, unit: int = 1024) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * unit for line in lines if line.split()[:1] == [name]), None)


def _number(path: Path) -> int | None:
    """None for "max" and for a file that is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
