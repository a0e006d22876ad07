"""SGLang: a pool of tokens from what is left after loading, and a server that starts although the context does not fit.

Owns cell sizes, the sliding and state sub-pools, page flooring and the log lines. Source:
https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/model_executor/pool_configurator.py , .../arg_groups/memory_hook.py
"""

from __future__ import annotations

from dataclasses import dataclass

from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import KVFormat, index_bytes
from kvseal.plan.engines.base import EnginePlan, GroupPlan, Pool, Settings
from kvseal.plan.engines.memory import sglang_budget
from kvseal.plan.footprint import Parallel, cache_token_bytes, check_parallel, state_bytes, v4_state_bytes
from kvseal.plan.shape import Attention, Cache, Compressed, Index, Kind, Latent, ModelShape, State, group_layers
from kvseal.plan.units import GIB, cdiv

RULE = (
    "SGLang pool_configurator: tokens = available // cell size, floored to a page; context is not compared with the pool "
    "(https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/model_executor/pool_configurator.py)"
)
SWA_RATIO = 0.8
V4_SWA_RATIO = 0.1
MAMBA_RATIO = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Bytes per token of the full pool and of the sliding pool, and bytes of one sequence's state, on one rank."""

    full: int
    sliding: int
    compressed: float
    state: int
    page_tokens: int
    swa_ratio: float
    window_tokens: int
    notes: tuple[str, ...]

    @property
    def bytes_per_token(self) -> float:
        """Per token of the full pool; of the sliding pool when there is no other."""
        if not self.full and not self.compressed:
            return float(self.sliding)
        return self.full + self.compressed + self.swa_ratio * self.sliding


def resolve_layout(shape: ModelShape, kv_format: KVFormat) -> KVFormat:
    """fp8 on sparse latent attention: 656-byte rows with the FlashMLA kernels (raw 576 with TRT-LLM, Triton and HIP kernels)."""
    if kv_format.name == "fp8" and shape.dsa and not shape.is_compressed:
        return KVFormat("fp8_ds_mla")
    return kv_format


def cell_of(shape: ModelShape, kv_format: KVFormat, settings: Settings) -> Cell:
    """The bytes that SGLang divides by. Draft layers enter as a scaled share of the target's cell."""
    parallel = settings.parallel if not settings.dp_attention else Parallel()
    check_parallel(shape, parallel)
    full = sliding = state = window = 0
    compressed = 0.0
    notes: list[str] = []
    for group in group_layers(shape.layers):
        cache: Cache = group.cache
        # Pipeline slicing of the compressed pool came late; before it every stage was charged for all layers.
        sliced = not (isinstance(cache, Compressed) and settings.version < (0, 5, 18))
        layers = cdiv(group.layers, parallel.pp) if sliced else group.layers
        if isinstance(cache, State):
            state += layers * state_bytes(cache, parallel.tp, recurrent_bytes=None if cache.recurrent_dtype_known else 4)
        elif isinstance(cache, Compressed):
            share, swa = _compressed_cell(cache, kv_format, settings.speculative_tokens)
            compressed += layers * share
            sliding += round(layers * swa)
            window = cache.window_tokens
        elif isinstance(cache, Index) and cache.kind is Kind.DSA_INDEXER:
            counted, note = _indexer_layers(shape, group.layers, settings)
            # Index keys are kept whole on every rank although the rows are spread.
            full += cdiv(counted, parallel.pp) * index_bytes(cache.index_dim) * parallel.dcp
            notes.append(note)
        elif isinstance(cache, Attention) and cache.kind is Kind.CROSS:
            notes.append("cross-attention layers hold image tokens, not sized here")
        else:
            size = layers * cache_token_bytes(cache, kv_format, parallel)
            tokens = cache.window_tokens if isinstance(cache, Attention | Latent) else None
            if tokens is not None and isinstance(cache, Attention) and cache.kind is Kind.SLIDING:
                sliding, window = sliding + size, max(window, tokens)
            else:
                full += size
    if settings.drafts and shape.draft_layers:
        extra = len(shape.draft_layers)
        full += _draft_bytes(shape, kv_format, parallel)
        if shape.is_compressed:
            scale = (len(shape.layers) + extra) / len(shape.layers)
            compressed, sliding = compressed * scale, round(sliding * scale)
        notes.append(f"{extra} draft layer{'s' if extra > 1 else ''} in the same budget")
    ratio = settings.swa_ratio if settings.swa_ratio is not None else (V4_SWA_RATIO if shape.is_compressed else SWA_RATIO)
    return Cell(
        full=full, sliding=sliding, compressed=compressed, state=state, page_tokens=_page_tokens(shape, settings), swa_ratio=ratio,
        window_tokens=window, notes=tuple(notes),
    )  # fmt: skip


def _draft_bytes(shape: ModelShape, kv_format: KVFormat, parallel: Parallel) -> int:
    """Draft layers hold full pools of their own, and every one of them an index key where the target has any."""
    total = 0
    for layer in shape.draft_layers:
        for cache in layer:
            if isinstance(cache, Index) and cache.kind is Kind.DSA_INDEXER:
                total += index_bytes(cache.index_dim)
            elif isinstance(cache, Attention | Latent | Index):
                total += cache_token_bytes(cache, kv_format, parallel)
    return total


def _page_tokens(shape: ModelShape, settings: Settings) -> int:
    if settings.block_tokens is not None:
        return settings.block_tokens
    return 256 if shape.is_compressed else 64 if shape.dsa else 1


def _indexer_layers(shape: ModelShape, owners: int, settings: Settings) -> tuple[int, str]:
    """Early versions forgot the indexer, later ones charged it to every layer, newer ones to its owners only."""
    if settings.version < (0, 5, 4):
        return 0, "before 0.5.4 the indexer was not counted in the pool"
    if settings.version < (0, 5, 18):
        return len(
            shape.layers
        ), f"this version keeps an index key in all {len(shape.layers)} layers, not only in the {owners} that own one"
    return owners, f"index keys in the {owners} layers that own one"


def _compressed_cell(cache: Compressed, kv_format: KVFormat, drafts: int) -> tuple[float, float]:
    """(bytes per full token, bytes per sliding token) of one layer; float32 compressor states ride on the sliding slots."""
    row = v4_state_bytes(cache, kv_format)
    swa: float = row
    if cache.ratio == 4:
        ring = 16 if drafts else 8
        swa += ring / 256 * (4 * cache.head_dim + 4 * cache.index_dim) * 4
        return row / 4 + index_bytes(cache.index_dim) / 4, swa
    return (row / 128 if cache.ratio == 128 else 0.0), swa


def plan(shape: ModelShape, settings: Settings) -> EnginePlan:
    kv_format = resolve_layout(shape, settings.kv_format)
    cell = cell_of(shape, kv_format, settings)
    budget = sglang_budget(shape, settings) if settings.kv_bytes is None and settings.pool_tokens is None else None
    best = low = high = None
    if settings.pool_tokens is not None:
        best = _pool_of_tokens(settings.pool_tokens, cell, settings, int(settings.pool_tokens * cell.bytes_per_token))
    elif settings.kv_bytes is not None:
        best = pool_of(settings.kv_bytes, cell, settings)
    elif budget is not None:
        best, low, high = (pool_of(size, cell, settings) for size in (budget.kv, budget.kv_low, budget.kv_high))
    per_token = int(cell.bytes_per_token)
    tokens = settings.context_tokens
    request = int(tokens * (cell.full + cell.compressed)) + min(tokens, cell.window_tokens or tokens) * cell.sliding + cell.state
    pages = cdiv(tokens, cell.page_tokens)
    groups = [GroupPlan(kind="full pool", layers=len(shape.layers), block_tokens=cell.page_tokens,
                        page_bytes=int(cell.page_tokens * (cell.full + cell.compressed)), blocks_per_request=pages)]  # fmt: skip
    if cell.sliding:
        groups.append(GroupPlan(kind="sliding pool", layers=0, block_tokens=cell.page_tokens, page_bytes=cell.page_tokens * cell.sliding,
                                blocks_per_request=cdiv(min(tokens, cell.window_tokens) + cell.page_tokens, cell.page_tokens)))  # fmt: skip
    return EnginePlan(
        engine="sglang", version=settings.version_text, kv_format=kv_format.name, groups=tuple(groups),
        bytes_per_block=per_token * cell.page_tokens, blocks_per_request=pages, request_bytes=request, budget=budget,
        pool=best, pool_low=low, pool_high=high, starts=None if best is None else best.tokens > 0, outcome=_outcome(best, settings),
        log_line=_log_line(best, cell, shape),
        notes=cell.notes + _notes(shape, cell, settings), rule=RULE,
    )  # fmt: skip


def pool_of(available: int, cell: Cell, settings: Settings) -> Pool:
    """Tokens of a pool of so many bytes; hybrids first set a share aside for states."""
    rest = available
    if cell.state:
        ratio = settings.mamba_ratio if settings.mamba_ratio is not None else MAMBA_RATIO
        slots = max((int(available * ratio / (1 + ratio)) - cell.state) // cell.state, 0)
        rest = available - (slots + 1) * cell.state
    per_token = cell.bytes_per_token
    tokens = int(max(rest, 0) // per_token) if per_token else settings.context_tokens
    return _pool_of_tokens(tokens, cell, settings, available)


def _pool_of_tokens(tokens: int, cell: Cell, settings: Settings, available: int) -> Pool:
    if settings.max_total_tokens is not None:
        tokens = min(tokens, settings.max_total_tokens)
    page = cell.page_tokens
    tokens = tokens // page * page
    sub: list[tuple[str, int, int]] = []
    if cell.sliding and (cell.full or cell.compressed):
        swa = int(tokens * cell.swa_ratio) // page * page
        sub += [("full", tokens, int((tokens + page) * (cell.full + cell.compressed))), ("sliding", swa, (swa + page) * cell.sliding)]
    if cell.state:
        ratio = settings.mamba_ratio if settings.mamba_ratio is not None else MAMBA_RATIO
        slots = max((int(available * ratio / (1 + ratio)) - cell.state) // cell.state, 0)
        sub.append(("state slots", slots, (slots + 1) * cell.state))
    logical = tokens * settings.parallel.dcp
    return Pool(
        available_bytes=available,
        block_bytes=int(cell.bytes_per_token * page),
        blocks=tokens // page,
        tokens=logical,
        concurrency=logical / settings.context_tokens,
        largest_context_tokens=max(logical - 1, 0),
        detail=(f"longest accepted input {max(min(settings.context_tokens, logical) - 6, 0):,} tokens",),
        sub_pools=tuple(sub),
    )


def _outcome(pool: Pool | None, settings: Settings) -> str:
    if pool is None:
        return "give --gpu, --kv-gib or --pool-tokens to learn whether one request fits"
    context = settings.context_tokens
    if pool.tokens <= 0:
        return "refuses to start: not enough memory for one token"
    if pool.tokens - 1 >= context:
        return f"starts; {pool.concurrency:.2f} requests of {context:,} tokens fit; more wait"
    text = f"starts and advertises {context:,} although the pool holds {pool.tokens:,}: inputs over {pool.tokens - 6:,} tokens are rejected"
    if settings.version < (0, 5, 20):
        return text + "; DANGEROUS in prefill/decode disaggregation before 0.5.20: answered with HTTP 200 and wrong text"
    return text


def _log_line(pool: Pool | None, cell: Cell, shape: ModelShape) -> str:
    if pool is None:
        return ""
    size = (pool.blocks + 1) * cell.page_tokens * (cell.full + cell.compressed)
    if shape.is_mla or shape.is_compressed:
        return f"KV Cache is allocated. #tokens: {pool.tokens}, KV size: {size / GIB:.2f} GB"
    key = _k_share(shape)
    return f"KV Cache is allocated. #tokens: {pool.tokens}, K size: {size * key / GIB:.2f} GB, V size: {size * (1 - key) / GIB:.2f} GB"


def _k_share(shape: ModelShape) -> float:
    for group in shape.groups:
        if isinstance(group.cache, Attention):
            return group.cache.k_dim / (group.cache.k_dim + group.cache.v_dim)
    return 0.5


def _notes(shape: ModelShape, cell: Cell, settings: Settings) -> tuple[str, ...]:
    notes = [f"cell {cell.bytes_per_token:,.0f} B per token, pages of {cell.page_tokens}"]
    if cell.sliding:
        notes.append(f"sliding pool of {cell.swa_ratio:g} x tokens (--swa-full-tokens-ratio)")
    if cell.state:
        notes.append("states take 0.9/1.9 of the pool unless --mamba-full-memory-ratio says otherwise; slots bound the running requests")
    if settings.parallel.dcp > 1 and any(group.cache.kind is Kind.SLIDING for group in shape.groups):
        raise ConfigError("decode context parallel does not work with sliding-window layers")
    if shape.is_mla and settings.parallel.tp > 1 and not settings.dp_attention:
        notes.append(f"latent attention is copied on all {settings.parallel.tp} ranks: --enable-dp-attention holds more")
    return tuple(notes)
