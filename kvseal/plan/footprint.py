"""Logical bytes: what a model must keep, engine left aside. Three numbers, because one is not enough.

Owns bytes per token that grow for ever, bytes per token that stop at a window, and constant bytes per sequence, on one rank.
Rules: sizing note 1.1 to 1.8 and 1.11.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import FormatMissing, KVFormat, index_bytes, parse_format
from kvseal.plan.families.states import elements_at
from kvseal.plan.shape import Attention, Cache, Compressed, Index, Kind, Latent, LayerGroup, ModelShape, State, group_layers
from kvseal.plan.units import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the model is spread. Bytes are always those of one rank of one pipeline stage."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("--tp", self.tp), ("--pp", self.pp), ("--dp", self.dp), ("--dcp", self.dcp)):
            if not 1 <= value <= 4096:
                raise ConfigError(f"{name} is {value}; it must be between 1 and 4,096")
        if self.tp % self.dcp:
            raise ConfigError(f"--dcp {self.dcp} must divide --tp {self.tp}: decode context parallel uses the tensor-parallel ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBytes:
    """One attention group on one rank. At most one of the three figures is not zero, except for compressed attention."""

    group: LayerGroup
    growing_per_token: int = 0
    growing_block_bytes: int = 0
    growing_block_tokens: int = 1
    windowed_per_token: int = 0
    window_tokens: int | None = None
    constant_per_sequence: int = 0
    per_encoder_token: int = 0
    shards: int = 1
    """Ranks over which token positions are spread (decode context parallel)."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """All groups of a model in one format on one rank; `unavailable` says why the format does not exist for it."""

    kv_format: KVFormat
    groups: tuple[GroupBytes, ...]
    unavailable: str | None = None

    @property
    def growing_per_token(self) -> int:
        return sum(group.growing_per_token for group in self.groups)

    @property
    def windowed_per_token(self) -> int:
        return sum(group.windowed_per_token for group in self.groups)

    @property
    def constant_per_sequence(self) -> int:
        return sum(group.constant_per_sequence for group in self.groups)

    def sequence_bytes(self, tokens: int) -> int:
        """Logical bytes of one sequence of `tokens` tokens."""
        total = 0
        for group in self.groups:
            if group.growing_block_bytes:
                total += cdiv(tokens, group.growing_block_tokens) * group.growing_block_bytes
            live = tokens if group.window_tokens is None else min(tokens, group.window_tokens)
            total += group.growing_per_token * cdiv(live, group.shards)
            total += group.windowed_per_token * live + group.constant_per_sequence
        return total


def heads_on_rank(heads: int, tp: int, what: str = "KV heads") -> int:
    """KV heads of one rank. More ranks than heads: each keeps a copy of one. Uneven splits are refused, as the engines do."""
    if heads >= tp:
        if heads % tp:
            raise ConfigError(f"{heads} {what} do not divide by tensor parallel {tp}: the engines refuse this; use a divisor of {heads}")
        return heads // tp
    if tp % heads:
        raise ConfigError(f"tensor parallel {tp} is not a multiple of the {heads} {what}: the engines refuse this")
    return 1


def check_parallel(shape: ModelShape, parallel: Parallel) -> None:
    """Raises ConfigError when the model cannot be split so."""
    if shape.query_heads % parallel.tp:
        raise ConfigError(
            f"{shape.query_heads} query heads of {shape.name} do not divide by tensor parallel {parallel.tp}; "
            f"possible: {', '.join(str(n) for n in (1, 2, 4, 8, 16, 32, 64) if shape.query_heads % n == 0)}"
        )
    if parallel.pp > len(shape.layers):
        raise ConfigError(f"--pp {parallel.pp} is more than the {len(shape.layers)} layers of {shape.name}")
    for group in shape.groups:
        if isinstance(group.cache, Attention):
            heads_on_rank(group.cache.kv_heads, parallel.tp)


def resolve_format(shape: ModelShape, name: str) -> tuple[KVFormat, str]:
    """The format behind `auto` and where it came from; fp8 of a sparse MLA model stays `fp8` here (engines pick the layout)."""
    if name != "auto":
        return parse_format(name), "--kv-dtype"
    if shape.kv_dtype_hint is not None:
        return parse_format(shape.kv_dtype_hint), "the checkpoint's own KV quantisation (kv_cache_scheme)"
    if shape.is_compressed:
        return parse_format("fp8"), "the engines' own default for compressed attention"
    plain = {"bfloat16": "bf16", "float16": "fp16", "float32": "bf16"}[shape.model_dtype]
    return parse_format(plain), f"model dtype {shape.model_dtype}" + (", served in 16 bit" if shape.model_dtype == "float32" else "")


def footprint(shape: ModelShape, kv_format: KVFormat, parallel: Parallel | None = None, *, drafts: bool = False) -> Footprint:
    """Bytes of every group on one rank of the fullest pipeline stage. Raises ConfigError when the split is impossible."""
    parallel = parallel or Parallel()
    check_parallel(shape, parallel)
    groups = group_layers(shape.layers + shape.draft_layers if drafts else shape.layers)
    try:
        limit = shape.max_context_tokens if shape.context_stated else None
        sized = tuple(_never_closing(group_bytes(group, kv_format, parallel), limit) for group in groups)
    except FormatMissing as missing:
        return Footprint(kv_format=kv_format, groups=(), unavailable=str(missing))
    return Footprint(kv_format=kv_format, groups=sized)


def cache_token_bytes(cache: Attention | Latent | Index, kv_format: KVFormat, parallel: Parallel) -> int:
    """Bytes per token of one layer on one rank."""
    if isinstance(cache, Attention):
        tp = max(parallel.tp // parallel.dcp, 1) if cache.kind is Kind.FULL else parallel.tp
        return heads_on_rank(cache.kv_heads, tp) * kv_format.head_bytes(cache.k_dim, cache.v_dim)
    if isinstance(cache, Latent):
        size = kv_format.latent_bytes(cache.latent_dim, cache.rope_dim)
        if size is None:
            raise FormatMissing(f"{kv_format.name} does not exist for multi-head latent attention of {cache.latent_dim}+{cache.rope_dim}")
        return size
    if cache.kind is Kind.DSA_INDEXER:
        return index_bytes(cache.index_dim)
    if kv_format.name in ("bf16", "fp16", "fp32", "fp8"):
        return cache.index_dim * kv_format.element_bytes
    return cache.index_dim * 2


def state_bytes(state: State, tp: int, speculative_tokens: int = 0, recurrent_bytes: int | None = None) -> int:
    """One layer, one sequence, one rank."""
    conv, recurrent = elements_at(state, tp, speculative_tokens)
    return conv * state.conv_bytes + recurrent * (recurrent_bytes or state.recurrent_bytes)


def group_bytes(group: LayerGroup, kv_format: KVFormat, parallel: Parallel) -> GroupBytes:
    cache: Cache = group.cache
    if isinstance(cache, State):
        return GroupBytes(group=group, constant_per_sequence=group.layers * state_bytes(cache, parallel.tp))
    if isinstance(cache, Compressed):
        return _compressed(group, cache, kv_format)
    each = group.layers * cache_token_bytes(cache, kv_format, parallel)
    if isinstance(cache, Attention) and cache.kind is Kind.CROSS:
        return GroupBytes(group=group, per_encoder_token=each, note="image or encoder tokens only")
    window = cache.window_tokens if isinstance(cache, Attention | Latent) else None
    if window is not None:
        return GroupBytes(group=group, windowed_per_token=each, window_tokens=window)
    shards = 1 if isinstance(cache, Index) else parallel.dcp
    return GroupBytes(group=group, growing_per_token=each, shards=shards)


def _never_closing(sized: GroupBytes, limit_tokens: int | None) -> GroupBytes:
    """A window as long as the model's own limit stops nothing: its bytes grow like any others."""
    if sized.window_tokens is None or sized.growing_block_bytes or limit_tokens is None or sized.window_tokens < limit_tokens:
        return sized
    return replace(sized, windowed_per_token=0, growing_per_token=sized.windowed_per_token, note="the window never closes")


V4_STATE_BYTES = 584
"""448 fp8 without rope + 64 bf16 with rope + 8 bytes of scales (the fp8 layout of DeepSeek-V4)."""


def v4_state_bytes(cache: Compressed, kv_format: KVFormat) -> int:
    """One stored vector; every 8-bit name means the packed layout, as vLLM resolves it."""
    if kv_format.name in ("bf16", "fp16"):
        return cache.head_dim * 2
    if kv_format.name in ("fp8", "fp8_ds_mla"):
        return cache.head_dim - cache.rope_dim + 2 * cache.rope_dim + cdiv(cache.head_dim, 64)
    raise FormatMissing(f"{kv_format.name} does not exist for DeepSeek-V4's compressed attention; it has bf16 and fp8")


def _compressed(group: LayerGroup, cache: Compressed, kv_format: KVFormat) -> GroupBytes:
    """Growth comes in 256-token blocks of compressed states; the sliding cache and the float32 compressor states are bounded."""
    state = v4_state_bytes(cache, kv_format)
    grow, bounded = 0, 0
    if cache.ratio in (4, 128):
        grow = 256 // cache.ratio * state
        coefficient = 2 if cache.ratio == 4 else 1
        bounded = cache.ratio * coefficient * coefficient * cache.head_dim * 2 * 4
        if cache.ratio == 4:
            grow += 64 * index_bytes(cache.index_dim)
            bounded += cache.ratio * coefficient * coefficient * cache.index_dim * 2 * 4
    return GroupBytes(
        group=group,
        growing_block_bytes=group.layers * grow,
        growing_block_tokens=256,
        windowed_per_token=group.layers * state,
        window_tokens=cache.window_tokens,
        constant_per_sequence=group.layers * bounded,
        note=f"ratio {cache.ratio}: one state per {cache.ratio} tokens" if cache.ratio > 1 else "sliding only",
    )
