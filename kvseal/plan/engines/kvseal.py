"""KVSeal: pages of equal size with one seal line per layer, and a server that lowers its promise or refuses to start (L1).

Owns the page arithmetic for planning without NumPy; a test holds it equal to `kvseal.kv.geometry`.
"""

from __future__ import annotations

from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import KVFormat
from kvseal.plan.engines.base import EnginePlan, GroupPlan, Pool, Settings
from kvseal.plan.shape import Attention, Kind, ModelShape
from kvseal.plan.units import GIB, KIB, MIB, cdiv, round_up

RULE = (
    "KVSeal kv.geometry: page = layers x (64-byte seal + K run + V run, each padded to 64 bytes); never promises more than the pool holds"
)
SEAL_BYTES = 64
ALIGNMENT_BYTES = 64
PAGE_TOKENS = 16
_FORMATS = {
    "fp16": (16, 0), "bf16": (16, 0), "fp32": (32, 0), "int8_per_token_head": (8, 4), "int4_per_token_head": (4, 4),
}  # fmt: skip


def page_bytes(layers: int, kv_heads: int, head_dim: int, element_bits: int, scale_bytes: int, page_tokens: int) -> int:
    """One page of all layers, seals and padding included."""
    elements = kv_heads * page_tokens * head_dim * element_bits // 8
    run = round_up(elements + kv_heads * page_tokens * scale_bytes, ALIGNMENT_BYTES)
    return layers * (SEAL_BYTES + 2 * run)


def plan(shape: ModelShape, settings: Settings) -> EnginePlan:
    """Raises ConfigError for a model or a format that KVSeal does not serve."""
    cache = _only_cache(shape)
    if settings.parallel.tp * settings.parallel.pp > 1:
        raise ConfigError("KVSeal serves a model from one node's memory: --tp and --pp must be 1")
    kv_format = resolve_format(settings.kv_format)
    bits, scales = _FORMATS[kv_format.name]
    tokens = settings.block_tokens or PAGE_TOKENS
    if tokens not in (8, 16, 32, 64):
        raise ConfigError(f"KVSeal pages hold 8, 16, 32 or 64 tokens, not {tokens}")
    size = page_bytes(len(shape.layers), cache.kv_heads, cache.k_dim, bits, scales, tokens)
    pages = cdiv(settings.context_tokens, tokens)

    def pool_of(available: int) -> Pool:
        count = available // size
        return Pool(
            available_bytes=available, block_bytes=size, blocks=count, tokens=count * tokens,
            concurrency=count / pages, largest_context_tokens=count * tokens,
        )  # fmt: skip

    pool = None
    if settings.kv_bytes is not None:
        pool = pool_of(settings.kv_bytes)
    elif settings.pool_tokens is not None:
        pool = pool_of(cdiv(settings.pool_tokens, tokens) * size)
    starts = None if pool is None else pool.tokens >= settings.context_tokens
    group = GroupPlan(kind="full", layers=len(shape.layers), block_tokens=tokens, page_bytes=size, blocks_per_request=pages)
    return EnginePlan(
        engine="kvseal", version=settings.version_text, kv_format=kv_format.name, groups=(group,), bytes_per_block=size,
        blocks_per_request=pages, request_bytes=pages * size, budget=None, pool=pool, pool_low=None, pool_high=None, starts=starts,
        outcome=_outcome(pool, starts, settings), log_line=_log_line(pool, tokens),
        notes=(f"seals and padding cost {_overhead(cache, len(shape.layers), bits, scales, tokens, size):.2f} % over the logical bytes",),
        rule=RULE,
    )  # fmt: skip


def resolve_format(kv_format: KVFormat) -> KVFormat:
    """The format as KVSeal has it: 16 bits are fp16. Raises ConfigError for one that it does not have."""
    if kv_format.name not in _FORMATS:
        raise ConfigError(f"KVSeal has no {kv_format.name} cache; it has fp16, fp32, int8 and int4")
    return KVFormat("fp16") if kv_format.name == "bf16" else kv_format


def _only_cache(shape: ModelShape) -> Attention:
    caches = {cache for layer in shape.layers for cache in layer}
    if len(caches) != 1 or any(len(layer) != 1 for layer in shape.layers):
        raise ConfigError(f"KVSeal serves models of one kind of attention layer; {shape.name} has several kinds")
    cache = next(iter(caches))
    if not isinstance(cache, Attention) or cache.kind is not Kind.FULL or cache.k_dim != cache.v_dim:
        raise ConfigError(f"KVSeal serves full attention with K and V of one size; {shape.name} has {cache.kind}")
    return cache


def _overhead(cache: Attention, layers: int, bits: int, scales: int, tokens: int, size: int) -> float:
    logical = 2 * layers * cache.kv_heads * (cache.k_dim * bits // 8 + scales) * tokens
    return 100.0 * (size - logical) / logical


def _outcome(pool: Pool | None, starts: bool | None, settings: Settings) -> str:
    if pool is None or starts is None:
        return "give --kv-gib or --pool-tokens; a request that can never fit is refused with 400 before anything is reserved"
    if starts:
        return f"serves {settings.context_tokens:,} tokens; a longer request is refused with 400 before anything is reserved"
    return (
        f"lowers its advertised context to {pool.largest_context_tokens:,} and says so; "
        f"refuses to start if you fixed {settings.context_tokens:,}"
    )


def _log_line(pool: Pool | None, page_tokens: int) -> str:
    """The line of the start report, in its own rounding (`serve.server` may not be imported here; a test holds them equal)."""
    if pool is None:
        return ""
    size = pool.blocks * pool.block_bytes
    text = f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB" if size >= MIB else f"{size / KIB:.1f} KiB"
    return f"KV pool {pool.tokens} tokens in {pool.blocks} pages of {page_tokens}, {text}"
