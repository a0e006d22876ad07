"""vLLM: blocks, tokens and the start-up verdict, by version.

Owns the version table and the arithmetic from bytes to the log line. Integer until the one division that vLLM itself does in floating
point. Source: https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/core/kv_cache_planning.py , kv_cache_utils.py, gpu_worker.py
"""

from __future__ import annotations

from dataclasses import replace

from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import KVFormat
from kvseal.plan.engines.base import EnginePlan, GroupPlan, Pool, Settings
from kvseal.plan.engines.memory import vllm_budget
from kvseal.plan.engines.vllm_groups import Grouping, group_layers
from kvseal.plan.engines.vllm_specs import Rules, layer_specs
from kvseal.plan.gpu import find_gpu
from kvseal.plan.shape import Attention, Kind, Layer, ModelShape
from kvseal.plan.units import GIB, cdiv, gib

RULE = (
    "vLLM kv_cache_planning: groups of equal pages, blocks = memory // bytes per block, tokens = concurrency x max_model_len "
    "(https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/core/kv_cache_planning.py)"
)


def batch_tokens(settings: Settings) -> int:
    """Default max_num_batched_tokens of the OpenAI server, by GPU class and version."""
    if settings.max_batched_tokens is not None:
        return settings.max_batched_tokens
    memory = settings.gpu_memory_bytes or (find_gpu(settings.gpu).memory_bytes if settings.gpu else 80 * GIB)
    name = (settings.gpu or "").lower()
    if settings.version < (0, 8, 0):
        return max(settings.context_tokens, 2048) if settings.context_tokens <= 32768 else 2048
    if memory >= 160 * GIB and settings.version >= (0, 11, 0):
        return 16384 if settings.version >= (0, 27, 0) else 8192
    return 8192 if memory >= 70 * GIB and "a100" not in name and "gb10" not in name else 2048


def rules_for(settings: Settings) -> Rules:
    """What this version does. Every number can be overridden by a flag."""
    batches = settings.in_flight_batches
    if batches is None:
        # Two with asynchronous scheduling, else one batch per pipeline stage.
        pp = settings.parallel.pp
        batches = 1 if settings.version < (0, 20, 0) else (2 if pp == 1 else pp)
    return Rules(
        block_tokens=settings.block_tokens,
        in_flight_tokens=batches * batch_tokens(settings),
        # Hybrids had no prefix caching by default in the old versions: one state block per request, not two.
        prefix_caching=settings.prefix_caching and settings.version >= (0, 20, 0),
        latent_unit_tokens=128 if settings.version >= (0, 20, 0) else 64,
        speculative_tokens=settings.speculative_tokens,
        dcp=settings.parallel.dcp,
        layout=settings.layout or "LBNHC",
        hybrid_manager=settings.hybrid_manager,
        packed_repeats=settings.version < (0, 30, 0),
        null_block_reserved=settings.version >= (0, 30, 0),
        groups_divide_report=settings.version < (0, 21, 0),
    )


def resolve_layout(shape: ModelShape, kv_format: KVFormat) -> KVFormat:
    """fp8 on sparse latent attention means the packed 656-byte rows; elsewhere raw rows."""
    if kv_format.name == "fp8" and shape.dsa and not shape.is_compressed and not shape.has_state:
        return KVFormat("fp8_ds_mla")
    return kv_format


def stages(shape: ModelShape, pp: int, drafts: bool) -> list[tuple[Layer, ...]]:
    """Layers of each pipeline stage, as even as can be: the first and the last stage take fewer. Draft layers sit on the last."""
    count = len(shape.layers)
    sizes = [count // pp] * pp
    for i in range(count % pp):
        sizes[-2 - i if pp > 1 else 0] += 1
    made: list[tuple[Layer, ...]] = []
    start = 0
    for i, size in enumerate(sizes):
        part = shape.layers[start : start + size]
        made.append(part + shape.draft_layers if drafts and i == pp - 1 else part)
        start += size
    return made


def plan(shape: ModelShape, settings: Settings) -> EnginePlan:
    """vLLM's answer on the poorest pipeline stage. Raises ConfigError when vLLM would refuse the split or the layout."""
    rules = rules_for(settings)
    _check_dcp(shape, settings)
    if shape.is_compressed and settings.layout is None:
        rules = replace(rules, layout="BLHNC")
    kv_format = resolve_layout(shape, settings.kv_format)
    parts = stages(shape, settings.parallel.pp, settings.drafts)
    specs = [
        replace(spec, stage=stage)
        for stage, layers in enumerate(parts)
        for spec in layer_specs(shape, kv_format, settings.parallel, rules, layers)
    ]
    grouping = group_layers(specs, rules)
    budget = vllm_budget(shape, settings, batch_tokens(settings)) if settings.kv_bytes is None else None
    context = settings.context_tokens
    per_request = grouping.blocks_per_request(context, rules)

    def pool(available: int, used: Rules = rules) -> Pool:
        return pool_of(grouping, used, available, context)

    # Whether scheduling is asynchronous is not known from outside: the optimistic end supposes one batch in flight.
    calm = rules if settings.in_flight_batches is not None else replace(rules, in_flight_tokens=batch_tokens(settings))

    best = pool(settings.kv_bytes) if settings.kv_bytes is not None else (pool(budget.kv) if budget else None)
    if best is None and settings.pool_tokens is not None:
        blocks = cdiv(settings.pool_tokens, grouping.groups[0].block_tokens) if grouping.groups else 0
        best = pool(blocks * grouping.bytes_per_block)
    starts = None if best is None else fits(grouping, rules, best.available_bytes, context)
    return EnginePlan(
        engine="vllm",
        version=settings.version_text,
        kv_format=kv_format.name,
        groups=tuple(
            GroupPlan(
                kind=group.kind,
                layers=group.layers,
                block_tokens=group.block_tokens,
                page_bytes=group.specs[0].page_bytes,
                blocks_per_request=group.blocks_per_request(context, rules),
            )
            for group in grouping.groups
        ),
        bytes_per_block=grouping.bytes_per_block,
        blocks_per_request=per_request,
        request_bytes=per_request * grouping.bytes_per_block,
        budget=budget,
        pool=best,
        pool_low=pool(budget.kv_low) if budget else None,
        pool_high=pool(budget.kv_high, calm) if budget else None,
        starts=starts,
        outcome=_outcome(grouping, best, starts, context, per_request),
        log_line=_log_line(best, settings),
        notes=_notes(shape, grouping, rules, settings),
        rule=RULE,
    )


def _check_dcp(shape: ModelShape, settings: Settings) -> None:
    """Positions are spread over the ranks that would hold copies of a KV head; there are no more than tp / KV heads of them."""
    tp, dcp = settings.parallel.tp, settings.parallel.dcp
    for group in shape.groups:
        if dcp > 1 and isinstance(group.cache, Attention) and group.cache.kind is Kind.FULL and dcp > max(tp // group.cache.kv_heads, 1):
            raise ConfigError(f"--dcp {dcp} is more than tp / KV heads = {max(tp // group.cache.kv_heads, 1)}: vLLM refuses it")


def pool_of(grouping: Grouping, rules: Rules, available: int, context: int) -> Pool:
    """Blocks, the logged figure and the longest request, for a pool of `available` bytes."""
    size = grouping.bytes_per_block
    blocks = max(available, 0) // size if size else 1
    per_request = grouping.blocks_per_request(context, rules)
    concurrency = blocks / per_request if per_request else 0.0
    tokens = int(concurrency * context)
    if rules.groups_divide_report and grouping.groups:
        tokens = blocks // len(grouping.groups) * min(group.block_tokens for group in grouping.groups)
    return Pool(
        available_bytes=available,
        block_bytes=size,
        blocks=blocks,
        tokens=tokens,
        concurrency=concurrency,
        largest_context_tokens=largest_context(grouping, rules, available),
    )


def fits(grouping: Grouping, rules: Rules, available: int, context: int) -> bool:
    """vLLM's start-up check: one request of the whole context, with the null block set aside."""
    if not grouping.bytes_per_block:
        return True
    usable = available - (grouping.bytes_per_block if rules.null_block_reserved else 0)
    return usable > 0 and grouping.blocks_per_request(context, rules) * grouping.bytes_per_block <= usable


def largest_context(grouping: Grouping, rules: Rules, available: int, limit: int = 1 << 34) -> int:
    """The longest request that passes the check, by bisection; 0 when not even one token does."""
    if not fits(grouping, rules, available, 1):
        return 0
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(grouping, rules, available, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _outcome(grouping: Grouping, pool: Pool | None, starts: bool | None, context: int, per_request: int) -> str:
    if pool is None or starts is None:
        return "give --gpu, --kv-gib or --prefill-pool to learn whether one request fits"
    if starts:
        return f"starts; a request of {context:,} tokens fits {pool.concurrency:.2f} times; more wait or are preempted and recomputed"
    need = per_request * grouping.bytes_per_block
    return (
        f"refuses to start: {gib(need)} GiB KV cache needed for {context:,} tokens, {gib(pool.available_bytes)} GiB available; "
        f"the estimated maximum model length is {pool.largest_context_tokens:,}"
    )


def _log_line(pool: Pool | None, settings: Settings) -> str:
    if pool is None:
        return ""
    if settings.version < (0, 8, 0):
        return f"# GPU blocks: {pool.blocks}; Maximum concurrency for {settings.context_tokens} tokens per request: {pool.concurrency:.2f}x"
    return (
        f"GPU KV cache size: {pool.tokens:,} tokens; "
        f"Maximum concurrency for {settings.context_tokens:,} tokens per request: {pool.concurrency:.2f}x"
    )


def _notes(shape: ModelShape, grouping: Grouping, rules: Rules, settings: Settings) -> tuple[str, ...]:
    notes = [f"grouping: {grouping.how}"]
    if settings.parallel.dp > 1:
        notes.append(
            f"every one of the {settings.parallel.dp} data-parallel replicas has a pool of its own: multiply concurrency, not length"
        )
    if grouping.padding_layers:
        notes.append(f"{grouping.padding_layers} padding layers are paid for and hold nothing")
    if any(group.kind.startswith(("sliding", "chunked")) for group in grouping.groups):
        notes.append(f"windows reserve the window plus {rules.in_flight_tokens:,} tokens in flight per request")
    if shape.has_state and grouping.groups:
        notes.append(f"attention block enlarged to {grouping.groups[0].block_tokens:,} tokens so that its page holds one state")
    if shape.is_mla and settings.parallel.tp > 1 and settings.parallel.dcp == 1:
        notes.append(f"latent attention is copied on all {settings.parallel.tp} ranks: use DP attention or DCP to hold more")
    if len(grouping.groups) > 1 and not rules.groups_divide_report:
        notes.append("the logged token figure is concurrency x context, not a physical size")
    if rules.groups_divide_report and len(grouping.groups) > 1:
        notes.append(f"up to 0.20 the log divides by {len(grouping.groups)} groups: it understates what a long request can use")
    return tuple(notes)
