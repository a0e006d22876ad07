"""What a model keeps per token and per sequence, layer by layer, before any engine touches it.

Owns the typed layer list that everything else is derived from: bytes, engine pools, plots. A model is a list of layers; a layer owns
zero or more caches (zero: an MLP-only or sharing layer; two: attention plus an indexer, or attention plus a state). Never reads files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What sort of cache; the words of the layer reference."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    CROSS = "cross"
    MLA = "mla"
    DSA_INDEXER = "dsa_indexer"
    SPARSE_INDEX = "sparse_index"
    COMPRESSED = "dsv4"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    GDN = "gdn"
    KDA = "kda"
    SHORT_CONV = "short_conv"
    LIGHTNING = "lightning"
    RG_LRU = "rg_lru"
    RWKV = "rwkv"


STATE_KINDS = frozenset({Kind.MAMBA1, Kind.MAMBA2, Kind.GDN, Kind.KDA, Kind.SHORT_CONV, Kind.LIGHTNING, Kind.RG_LRU, Kind.RWKV})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Ordinary K and V per head. `window_tokens` is the sliding window or the chunk."""

    kind: Kind
    kv_heads: int
    k_dim: int
    v_dim: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: one vector per token, no heads, the same on every tensor-parallel rank."""

    latent_dim: int
    rope_dim: int
    window_tokens: int | None = None
    kind: Kind = Kind.MLA


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """One index key per token. DSA_INDEXER is stored in fp8 with a float32 scale per 128; SPARSE_INDEX at the KV dtype."""

    kind: Kind
    index_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """DeepSeek-V4: a sliding cache in every layer, plus compressed states of one per `ratio` tokens (0 or 1: none)."""

    ratio: int
    window_tokens: int
    head_dim: int
    rope_dim: int
    index_dim: int
    kind: Kind = Kind.COMPRESSED


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A constant number of bytes per sequence. Elements below are for the whole layer (tensor parallel 1, no speculation)."""

    kind: Kind
    conv_columns: int
    """Columns kept by the convolution: kernel - 1."""
    conv_channels: int
    """Channels that divide by tensor parallel, groups not included."""
    groups: int = 0
    group_channels: int = 0
    """Channels per group; groups are replicated when they do not divide."""
    heads: int = 0
    recurrent_per_head: int = 0
    conv_bytes: int = 2
    recurrent_bytes: int = 2
    recurrent_dtype_known: bool = False
    """False: the file does not say, so engines differ (vLLM: model dtype; SGLang: float32)."""

    @property
    def conv_elements(self) -> int:
        return self.conv_columns * (self.conv_channels + self.groups * self.group_channels)

    @property
    def recurrent_elements(self) -> int:
        return self.heads * self.recurrent_per_head


Cache = Attention | Latent | Index | Compressed | State
Layer = tuple[Cache, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Equal caches counted together."""

    cache: Cache
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the parameter count needs. Zero means absent."""

    intermediate: int = 0
    experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    moe_layers: int = 0
    gated: bool = True
    q_lora_rank: int = 0
    qk_nope_dim: int = 0
    value_dim: int = 0
    tied: bool = False
    quantization: str | None = None
    method: str | None = None
    file_bytes: int | None = None
    """Sum of the weight files next to the config, when they are there: exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model, ready to be sized. Every number came from the file or is listed in `defaults`."""

    name: str
    architecture: str
    model_type: str
    family: str
    layers: tuple[Layer, ...]
    draft_layers: tuple[Layer, ...] = ()
    """Layers outside the model's own count that only speculative decoding uses (MTP); counted on request."""
    query_heads: int
    hidden: int
    vocab: int
    max_context_tokens: int | None
    """After the rope scaling that the file itself asks for."""
    model_dtype: str
    """bfloat16, float16 or float32 as the checkpoint says."""
    kv_dtype_hint: str | None
    """What the checkpoint itself asks for the cache (kv_cache_scheme); never inferred from quantised weights."""
    dsa: bool
    """Sparse MLA with its own indexer (DeepSeek V3.2, GLM-5)."""
    rules: tuple[str, ...]
    defaults: tuple[str, ...]
    notes: tuple[str, ...]
    weights: Weights = field(default_factory=Weights)
    context_stated: bool = True
    """False when the limit is a default of the class, not a word of the file."""
    head_split: int = 0
    """Heads that must divide by tensor parallel besides the query heads; 0: none."""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return group_layers(self.layers)

    @property
    def has_state(self) -> bool:
        return any(isinstance(cache, State) for layer in self.layers for cache in layer)

    @property
    def is_mla(self) -> bool:
        return any(isinstance(cache, Latent) for layer in self.layers for cache in layer)

    @property
    def is_compressed(self) -> bool:
        return any(isinstance(cache, Compressed) for layer in self.layers for cache in layer)


def group_layers(layers: Iterable[Layer]) -> tuple[LayerGroup, ...]:
    """Equal caches together, in order of first appearance."""
    counts: dict[Cache, int] = {}
    for layer in layers:
        for cache in layer:
            counts[cache] = counts.get(cache, 0) + 1
    return tuple(LayerGroup(cache=cache, layers=count) for cache, count in counts.items())
