"""vLLM's per-layer cache specs, in our own words: block size, page bytes and how many blocks one request may hold.

Source: https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/kv_cache_interface.py , .../platforms/interface.py (hybrid block size),
vllm/models/deepseek_v4 (compressed attention). Sizing note 1.3 to 1.9.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd

from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import FormatMissing, KVFormat, index_bytes
from kvseal.plan.footprint import Parallel, cache_token_bytes, state_bytes, v4_state_bytes
from kvseal.plan.shape import Attention, Cache, Compressed, Index, Kind, Latent, Layer, ModelShape, State
from kvseal.plan.units import cdiv, round_up

FULL, MLA, SLIDING, SLIDING_MLA = "full_attention", "mla_attention", "sliding_window", "sliding_window_mla"
CHUNKED, MAMBA = "chunked_local_attention", "mamba"
V4_BLOCK_TOKENS = 256
V4_SWA_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a version of vLLM does; every field can be set by hand."""

    block_tokens: int | None = None
    """None: 16, or 64 for latent attention, or what hybrids and compressed attention force."""
    in_flight_tokens: int = 16384
    """max_num_batched_tokens x batches in flight."""
    prefix_caching: bool = True
    speculative_tokens: int = 0
    dcp: int = 1
    layout: str = "LBNHC"
    hybrid_manager: bool = True
    packed_repeats: bool = False
    """Before 0.30: packed groups were padded to whole repeats of the layer pattern."""
    latent_unit_tokens: int = 128
    """Multiple that hybrids of latent attention and state round their block to."""
    null_block_reserved: bool = True
    groups_divide_report: bool = False
    """Up to 0.20 the log said blocks // groups x block size."""

    @property
    def block_outermost(self) -> bool:
        return self.layout.startswith("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One layer's cache. Equal specs share a group."""

    kind: str
    block_tokens: int
    page_bytes: int
    window_tokens: int = 0
    slots: int = 0
    row_bytes: int = 0
    """Latent rows: the block-outermost layout keeps blocks a whole number of kernel pages apart."""
    sharded: bool = False
    detail: str = ""
    """What else must be equal (heads, sizes, role)."""
    stage: int = field(default=0, compare=False)
    """Pipeline stage of the layer; groups are made over the whole model, memory is paid per stage."""

    def blocks_per_request(self, tokens: int, rules: Rules) -> int:
        """Blocks that one request of `tokens` tokens may hold at its worst."""
        if self.kind in (FULL, MLA):
            return cdiv(cdiv(tokens, rules.dcp) if self.sharded and rules.dcp > 1 else tokens, self.block_tokens)
        if self.kind in (SLIDING, SLIDING_MLA):
            return cdiv(min(self.window_tokens - 1 + rules.in_flight_tokens, tokens), self.block_tokens) + 1
        if self.kind == CHUNKED:
            return cdiv(min(self.window_tokens + rules.in_flight_tokens, tokens), self.block_tokens)
        return self.slots


def layer_specs(shape: ModelShape, kv_format: KVFormat, parallel: Parallel, rules: Rules, layers: tuple[Layer, ...]) -> list[Spec]:
    """One spec per cache, in layer order. Cross-attention layers hold no text and get none."""
    if shape.is_compressed:
        return [spec for layer in layers for cache in layer for spec in _compressed_specs(cache, kv_format)]
    block = rules.block_tokens or (64 if shape.is_mla and not shape.has_state else 16)
    if shape.has_state:
        block = hybrid_block_tokens(shape, kv_format, parallel, rules)
    page = _attention_page(shape, kv_format, parallel, block)
    specs: list[Spec] = []
    for layer in layers:
        for cache in layer:
            if not (isinstance(cache, Attention) and cache.kind is Kind.CROSS):
                specs.append(_spec(cache, kv_format, parallel, rules, block, page))
    return specs


def _attention_page(shape: ModelShape, kv_format: KVFormat, parallel: Parallel, block: int) -> int:
    """The page that state layers are padded to; 0 when there is no attention."""
    sizes = [
        cache_token_bytes(cache, kv_format, parallel) for layer in shape.layers for cache in layer if isinstance(cache, Attention | Latent)
    ]
    return max(sizes) * block if sizes else 0


def _spec(cache: Cache, kv_format: KVFormat, parallel: Parallel, rules: Rules, block: int, page: int) -> Spec:
    if isinstance(cache, State):
        size = state_bytes(cache, parallel.tp, rules.speculative_tokens)
        slots = (2 if rules.prefix_caching else 1) + rules.speculative_tokens
        if cache.kind is Kind.KDA and rules.prefix_caching:
            slots += 1
        return Spec(kind=MAMBA, block_tokens=block, page_bytes=max(size, page), slots=slots, detail=f"{cache.kind} {size}")
    if isinstance(cache, Compressed):
        raise ConfigError("compressed attention does not mix with other caches")
    size = cache_token_bytes(cache, kv_format, parallel)
    if isinstance(cache, Index):
        return Spec(kind=MLA, block_tokens=block, page_bytes=size * block, sharded=False, detail=f"index {cache.index_dim}")
    if isinstance(cache, Latent):
        kind = SLIDING_MLA if cache.window_tokens else MLA
        return Spec(
            kind=kind, block_tokens=block, page_bytes=size * block, window_tokens=cache.window_tokens or 0, row_bytes=size, sharded=True,
            detail=f"latent {size}",
        )  # fmt: skip
    kind = {Kind.FULL: FULL, Kind.SLIDING: SLIDING, Kind.CHUNKED: CHUNKED}[cache.kind]
    window = cache.window_tokens or 0
    if kind == SLIDING and parallel.dcp > 1:
        raise ConfigError("decode context parallel does not work with sliding-window layers in vLLM")
    return Spec(
        kind=kind, block_tokens=block, page_bytes=size * block, window_tokens=window, sharded=kind == FULL,
        detail=f"{cache.kv_heads}x{cache.k_dim}+{cache.v_dim}",
    )  # fmt: skip


def hybrid_block_tokens(shape: ModelShape, kv_format: KVFormat, parallel: Parallel, rules: Rules) -> int:
    """The attention block grown until its page holds one state (sizing note 1.9)."""
    state = max(
        state_bytes(cache, parallel.tp, rules.speculative_tokens) for layer in shape.layers for cache in layer if isinstance(cache, State)
    )
    per_token = _attention_page(shape, kv_format, parallel, 1)
    unit = rules.block_tokens or 16
    if shape.is_mla:
        unit = max(unit, rules.latent_unit_tokens)
    return unit if per_token == 0 else max(unit * cdiv(state, unit * per_token), unit)


def _compressed_specs(cache: Cache, kv_format: KVFormat) -> list[Spec]:
    """DeepSeek-V4: up to five specs for a layer. Pages are rounded to 576 bytes in the packed layout, to 512 otherwise."""
    if not isinstance(cache, Compressed):
        raise ConfigError("compressed attention does not mix with other caches")
    packed = kv_format.name in ("fp8", "fp8_ds_mla")
    if kv_format.name not in ("fp8", "fp8_ds_mla", "bf16", "fp16"):
        raise FormatMissing(f"{kv_format.name} does not exist for DeepSeek-V4's compressed attention; it has bf16 and fp8")
    align = 576 if packed else 512
    row = v4_state_bytes(cache, kv_format)

    def sliding(window: int, block: int, row_bytes: int, detail: str) -> Spec:
        return Spec(
            kind=SLIDING_MLA, block_tokens=block, page_bytes=round_up(block * row_bytes, align), window_tokens=window, detail=detail
        )

    specs = [sliding(cache.window_tokens, V4_SWA_BLOCK_TOKENS, row, "swa")]
    if cache.ratio not in (4, 128):
        return specs
    states = V4_BLOCK_TOKENS // cache.ratio
    specs.append(Spec(kind=MLA, block_tokens=V4_BLOCK_TOKENS, page_bytes=round_up(states * row, align), detail=f"c{cache.ratio}"))
    coefficient = 2 if cache.ratio == 4 else 1
    state_row = 2 * coefficient * cache.head_dim * 4
    specs.append(sliding(coefficient * cache.ratio, 4 if cache.ratio == 4 else 8, state_row, f"compressor {cache.ratio}"))
    if cache.ratio == 4:
        index = states * index_bytes(cache.index_dim)
        specs.append(Spec(kind=MLA, block_tokens=V4_BLOCK_TOKENS, page_bytes=round_up(index, align), detail="c4 index"))
        specs.append(sliding(8, 4, 2 * coefficient * cache.index_dim * 4, "index compressor"))
    return specs


def promote_local(specs: list[Spec]) -> list[Spec]:
    """Hybrid manager off: windows and chunks are allocated like full attention."""
    kinds = {SLIDING: FULL, CHUNKED: FULL, SLIDING_MLA: MLA}
    if not any(spec.kind in (FULL, MLA) for spec in specs):
        return specs
    return [replace(spec, kind=kinds[spec.kind], window_tokens=0) if spec.kind in kinds else spec for spec in specs]


def stride_alignment(spec: Spec) -> int:
    """Bytes that the distance between blocks must be a multiple of, in the block-outermost layout."""
    if not spec.row_bytes:
        return 1
    return spec.row_bytes * gcd(spec.block_tokens, 64)
