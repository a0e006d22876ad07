"""llama.cpp: no pool from left-over memory; the whole n_ctx is allocated at start, per sequence.

Owns cell padding, the sliding cache's own size, float32 states and the log lines. Source:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-kv-cache.cpp (and -iswa, llama-memory-recurrent, llama-memory-hybrid).
"""

from __future__ import annotations

from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import KVFormat
from kvseal.plan.engines.base import Budget, EnginePlan, GroupPlan, Pool, Settings
from kvseal.plan.engines.memory import gpu_memory, weights_per_gpu
from kvseal.plan.families.states import elements_at
from kvseal.plan.footprint import Parallel, cache_token_bytes
from kvseal.plan.shape import Attention, Compressed, Kind, Latent, ModelShape, State, group_layers
from kvseal.plan.units import GIB, MIB, round_up

RULE = (
    "llama.cpp: cells = n_ctx padded to 256 per sequence; K row + V row per layer; sliding layers min(n_ctx, window x sequences + batch) "
    "(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-kv-cache.cpp)"
)
PAD_TOKENS = 256
MICRO_BATCH_TOKENS = 512


def resolve_layout(shape: ModelShape, kv_format: KVFormat) -> KVFormat:
    """f16 unless a cache type is named; fp8 does not exist here."""
    if shape.is_compressed:
        raise ConfigError("llama.cpp's compressed-attention cache is not modelled here; use --engine vllm or sglang")
    if kv_format.name == "bf16":
        return KVFormat("fp16")
    if kv_format.name.startswith(("fp8", "nvfp4", "mxfp8", "turboquant", "ultraquant")):
        raise ConfigError(f"llama.cpp has no {kv_format.name} cache; its types are f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl")
    return {"int8_per_token_head": KVFormat("q8_0"), "int4_per_token_head": KVFormat("q4_0")}.get(kv_format.name, kv_format)


def plan(shape: ModelShape, settings: Settings) -> EnginePlan:
    """What `-c context x users -np users` allocates; with a GPU, whether it fits and the largest n_ctx that would."""
    kv_format = resolve_layout(shape, settings.kv_format)
    sequences = settings.users
    need, groups, sub = _allocate(shape, kv_format, settings.context_tokens, sequences, settings)
    budget = _budget(shape, settings)
    limit = settings.kv_bytes if settings.kv_bytes is not None else (budget.kv if budget else None)

    def pool(available: int) -> Pool:
        largest = _largest(shape, kv_format, sequences, settings, available)
        tokens = settings.context_tokens if available >= need else largest
        return Pool(
            available_bytes=available, block_bytes=need // max(settings.context_tokens, 1), blocks=tokens, tokens=tokens,
            concurrency=available / need * sequences if need else 0.0, largest_context_tokens=largest, sub_pools=tuple(sub),
        )  # fmt: skip

    best = pool(limit) if limit is not None else None
    starts = None if limit is None else need <= limit
    return EnginePlan(
        engine="llama.cpp", version=settings.version_text, kv_format=kv_format.name, groups=tuple(groups), bytes_per_block=0,
        blocks_per_request=round_up(settings.context_tokens, _pad(settings)), request_bytes=need // sequences, budget=budget, pool=best,
        pool_low=pool(budget.kv_low) if budget and settings.kv_bytes is None else None,
        pool_high=pool(budget.kv_high) if budget and settings.kv_bytes is None else None,
        starts=starts, outcome=_outcome(starts, best, settings, need), log_line=_log_line(sub, settings, sequences),
        notes=(f"-c {settings.context_tokens * sequences} -np {sequences}: the slots share the context, {settings.context_tokens:,} each",),
        rule=RULE,
    )  # fmt: skip


def _pad(settings: Settings) -> int:
    return settings.block_tokens or PAD_TOKENS


def _allocate(
    shape: ModelShape, kv_format: KVFormat, context: int, sequences: int, settings: Settings
) -> tuple[int, list[GroupPlan], list[tuple[str, int, int]]]:
    """(bytes of everything, groups, [(buffer, cells, bytes)]) over the whole model; layers are split over GPUs, never heads."""
    cells = round_up(context, _pad(settings))
    total, groups, buffers = 0, [], {"KV": (0, 0), "SWA": (0, 0), "R": (0, 0), "S": (0, 0)}
    for group in group_layers(shape.layers):
        cache = group.cache
        if isinstance(cache, State):
            conv, recurrent = elements_at(cache, 1)
            for name, elements in (("R", conv), ("S", recurrent)):
                buffers[name] = (sequences, buffers[name][1] + elements * 4 * group.layers * sequences)
            continue
        if isinstance(cache, Compressed) or (isinstance(cache, Attention) and cache.kind is Kind.CROSS):
            continue
        size = cache_token_bytes(cache, kv_format, Parallel())
        window = cache.window_tokens if isinstance(cache, Attention | Latent) else None
        name, own = "KV", cells
        if window is not None:
            name, own = "SWA", min(cells, round_up(window + MICRO_BATCH_TOKENS, PAD_TOKENS))
        buffers[name] = (own, buffers[name][1] + own * sequences * size * group.layers)
        groups.append(GroupPlan(kind=str(cache.kind), layers=group.layers, block_tokens=1, page_bytes=size, blocks_per_request=own))
    total = sum(size for _, size in buffers.values())
    return total, groups, [(name, count, size) for name, (count, size) in buffers.items() if size]


def _largest(shape: ModelShape, kv_format: KVFormat, sequences: int, settings: Settings, available: int) -> int:
    """The largest n_ctx per sequence, a multiple of the padding, whose caches fit."""
    low, high = 0, 1 << 26
    while low < high:
        middle = (low + high + 1) // 2
        if _allocate(shape, kv_format, middle * _pad(settings), sequences, settings)[0] <= available:
            low = middle
        else:
            high = middle - 1
    return low * _pad(settings)


def _budget(shape: ModelShape, settings: Settings) -> Budget | None:
    """All GPUs together, less weights and compute buffers."""
    memory = gpu_memory(settings)
    if memory is None:
        return None
    gpus = settings.parallel.tp * settings.parallel.pp * settings.parallel.dp
    total = memory[0] * gpus
    weights = weights_per_gpu(shape, settings)
    split = settings.parallel.tp * settings.parallel.pp
    compute = settings.activation_bytes or 300 * MIB + shape.vocab * MICRO_BATCH_TOKENS * 4
    other = (settings.non_torch_bytes or 300 * MIB) * gpus
    kv = total - weights.best * split - compute - other
    return Budget(
        gpu_total=total, usable=total, weights=weights.best * split, activation=compute, non_torch=other, graphs=0, kv=max(kv, 0),
        kv_low=max(total - weights.high * split - 2 * compute - 2 * other, 0),
        kv_high=max(total - weights.low * split - compute // 2 - other // 2, 0),
        how=(memory[1], weights.how, "compute buffers and driver estimated"),
    )  # fmt: skip


def _outcome(starts: bool | None, pool: Pool | None, settings: Settings, need: int) -> str:
    if starts is None or pool is None:
        return "allocates the whole context at start; a longer prompt is rejected with an error"
    if starts:
        return "starts with the whole context allocated; a longer prompt is rejected with an error"
    return (
        f"fails to allocate {need / GIB:.2f} GiB; about {pool.largest_context_tokens:,} tokens per sequence would fit "
        "(newer builds lower n_ctx by themselves)"
    )


def _log_line(buffers: list[tuple[str, int, int]], settings: Settings, sequences: int) -> str:
    sizes = {name: size for name, _, size in buffers}
    lines = []
    for name, cells, size in buffers:
        if name in ("KV", "SWA"):
            lines.append(
                f"llama_kv_cache{'_iswa' if 'SWA' in sizes else ''}: size = {size / MIB:.2f} MiB ({cells} cells, {sequences} seqs)"
            )
    if "R" in sizes or "S" in sizes:
        r, s = sizes.get("R", 0), sizes.get("S", 0)
        lines.append(f"llama_memory_recurrent: size = {(r + s) / MIB:.2f} MiB, R (f32): {r / MIB:.2f} MiB, S (f32): {s / MIB:.2f} MiB")
    return "; ".join(lines)
