"""How many bytes the weights take. Exact when the weight files lie next to the config, otherwise a count of parameters.

Owns the count and its honest spread. Only the GPU pool depends on it; bytes of KV never do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from kvseal.plan.fields import Fields
from kvseal.plan.shape import Attention, Cache, Compressed, Index, Kind, Latent, ModelShape, State, Weights
from kvseal.plan.units import round_up

_BITS = {
    "bf16": 16.0, "bfloat16": 16.0, "fp16": 16.0, "float16": 16.0, "fp32": 32.0, "float32": 32.0, "fp8": 8.03, "int8": 8.06, "w8a8": 8.06,
    "fp4": 4.5, "nvfp4": 4.56, "mxfp4": 4.28, "int4": 4.25, "awq": 4.25,
    "gptq": 4.25, "q8_0": 8.5, "q4_0": 4.5, "q4_k_m": 4.85, "q5_k_m": 5.7,
    "q6_k": 6.56,
}  # fmt: skip
WEIGHT_DTYPES = tuple(_BITS)
_SQUARE = (Kind.GDN, Kind.KDA, Kind.LIGHTNING)


def read_weights(fields: Fields, config: Mapping[str, Any], layers: int) -> Weights:
    """What the parameter count needs, leniently: a missing key means a dense gated MLP of 4 x hidden."""

    def number(*keys: str) -> int:
        for key in keys:
            value = fields.raw.get(key, fields.class_defaults.get(key))
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 24:
                return value
        return 0

    experts = number("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    dense = number("first_k_dense_replace") if experts > 1 else layers
    freq = fields.raw.get("moe_layer_freq") or fields.raw.get("mlp_layer_types")
    if experts > 1 and isinstance(freq, list):
        dense = sum(1 for item in freq[:layers] if item in (0, "dense", False))
    step = number("decoder_sparse_step", "interleave_moe_layer_step") or 1
    moe = (layers - dense) // step if experts > 1 else 0
    expert_size = number("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
    shared = number("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim")
    shared = shared or number("n_shared_experts", "num_shared_experts") * expert_size
    tied = fields.raw.get("tie_word_embeddings", config.get("tie_word_embeddings", fields.class_defaults.get("tie_word_embeddings", False)))
    quant = config.get("quantization_config") or fields.raw.get("quantization_config")
    method, bits = _quantization(quant if isinstance(quant, dict) else {})
    if experts > 1 and fields.raw.get("expert_dtype") == "fp4":
        method, bits = "fp8", "fp4"
    return Weights(
        intermediate=number("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
        experts=experts if experts > 1 else 0,
        expert_intermediate=expert_size if experts > 1 else 0,
        shared_intermediate=shared if experts > 1 else 0,
        dense_layers=layers - moe,
        moe_layers=moe,
        gated=fields.raw.get("model_type") not in ("gpt2", "falcon", "RefinedWebModel", "nemotron_h", "gpt_neox", "opt", "bloom", "phi"),
        q_lora_rank=number("q_lora_rank"),
        qk_nope_dim=number("qk_nope_head_dim"),
        value_dim=number("v_head_dim"),
        tied=bool(tied),
        quantization=bits,
        method=method,
    )


def _quantization(quant: Mapping[str, Any]) -> tuple[str | None, str | None]:
    method = quant.get("quant_method") or quant.get("quant_algo") or quant.get("quant_type")
    if not isinstance(method, str):
        return None, None
    text = method.lower()
    if "mxfp4" in text:
        return method, "mxfp4"
    if "nvfp4" in text or "fp4" in text or "nvfp4" in str(quant.get("format", "")).lower():
        return method, "nvfp4"
    if text in ("awq", "gptq", "auto-round") or quant.get("bits") == 4:
        return method, "int4"
    if "fp8" in text or quant.get("bits") == 8:
        return method, "fp8"
    if text == "compressed-tensors":
        words = str(quant)[:20000].lower()
        bits = "int4" if "'num_bits': 4" in words else "fp8"
        return method, bits
    return method, None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEstimate:
    """Bytes of the whole model: the best figure and how far it may be off on either side."""

    total_bytes: int
    low_bytes: int
    high_bytes: int
    parameters: int
    expert_share: float
    """Of the bytes, the part in routed experts."""
    how: str


def estimate(shape: ModelShape, dtype: str | None = None) -> WeightEstimate:
    """Weight bytes of the whole model. `dtype` overrides what the config says of its quantisation.

    Quantised checkpoints keep embedding and head in 16 bits; 4-bit float ones quantise the experts only.
    """
    weights = shape.weights
    parameters, experts, plain = count_parameters(shape)
    name = dtype or weights.quantization or "bf16"
    bits = _BITS[name]
    body = parameters - experts - plain
    body_bits = bits if bits >= 8 or not experts or dtype is not None else 8.0 if weights.method == "fp8" else 16.0
    expert_bytes = int(experts * bits / 8)
    if name == "mxfp4" and shape.hidden:
        # The MXFP4 kernels store experts with the hidden size padded (gpt-oss: 2,880 becomes 3,072).
        expert_bytes = expert_bytes * round_up(shape.hidden, 256) // shape.hidden
    size = expert_bytes + int(body * body_bits / 8) + int(plain * max(bits, 16.0) / 8)
    share = expert_bytes / size if size else 0.0
    if weights.file_bytes and dtype is None:
        exact = weights.file_bytes
        return WeightEstimate(
            total_bytes=exact, low_bytes=exact, high_bytes=exact * 103 // 100, parameters=parameters, expert_share=share, how="weight files"
        )
    spread = 4 if bits >= 16 else 12
    return WeightEstimate(
        total_bytes=size,
        low_bytes=size * (100 - spread) // 100,
        high_bytes=size * (100 + spread) // 100,
        parameters=parameters,
        expert_share=share,
        how=f"{parameters / 1e9:.2f} G parameters x {bits:g} bit ({name})",
    )


def count_parameters(shape: ModelShape) -> tuple[int, int, int]:
    """(all, in routed experts, in embedding and head). Norms and biases are left out."""
    weights, hidden = shape.weights, shape.hidden
    embedding = shape.vocab * hidden * (1 if weights.tied else 2)
    attention = sum(_cache_parameters(cache, shape) for layer in shape.layers for cache in layer)
    factor = 3 if weights.gated else 2
    dense_size = weights.intermediate or 4 * hidden
    mlp_layers = weights.dense_layers
    if shape.family == "nemotron_h":
        empty = sum(1 for layer in shape.layers if not layer)
        mlp_layers = 0 if weights.experts else empty
        moe_layers = empty if weights.experts else 0
    else:
        moe_layers = weights.moe_layers
    dense = mlp_layers * factor * hidden * dense_size
    experts = moe_layers * weights.experts * factor * hidden * weights.expert_intermediate
    shared = moe_layers * factor * hidden * weights.shared_intermediate
    router = moe_layers * weights.experts * hidden
    return embedding + attention + dense + experts + shared + router, experts, embedding


def _cache_parameters(cache: Cache, shape: ModelShape) -> int:
    """Projection weights that belong to one cache."""
    hidden, heads, weights = shape.hidden, shape.query_heads, shape.weights
    if isinstance(cache, Attention):
        width = cache.k_dim
        return hidden * (heads * width + cache.kv_heads * (cache.k_dim + cache.v_dim)) + heads * cache.v_dim * hidden
    if isinstance(cache, Latent):
        q_dim = weights.qk_nope_dim + cache.rope_dim
        query = hidden * weights.q_lora_rank + weights.q_lora_rank * heads * q_dim if weights.q_lora_rank else hidden * heads * q_dim
        up = cache.latent_dim * heads * (weights.qk_nope_dim + weights.value_dim)
        return query + hidden * (cache.latent_dim + cache.rope_dim) + up + heads * weights.value_dim * hidden
    if isinstance(cache, Compressed):
        rank = weights.q_lora_rank or hidden
        return hidden * rank + rank * heads * cache.head_dim + 2 * hidden * cache.head_dim + heads * cache.head_dim * hidden // 8
    if isinstance(cache, Index):
        return hidden * cache.index_dim * 2
    return _state_parameters(cache, hidden)


def _state_parameters(state: State, hidden: int) -> int:
    """Input projection (convolved channels and a gate) and output projection."""
    channels = state.conv_channels + state.groups * state.group_channels
    value = state.heads * isqrt(state.recurrent_per_head) if state.kind in _SQUARE else state.conv_channels
    channels = channels or 3 * value
    return hidden * (channels + value) + value * hidden
