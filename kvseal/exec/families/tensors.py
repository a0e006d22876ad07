"""Tensor names of the two layouts -> `LayerWeights`.

Owns the names, the fused tensors and the order of GGUF's q and k rows. Every tensor of a checkpoint is either used or known to be
redundant; any other is an error that names it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvseal.core.errors import ModelUnsupported
from kvseal.exec.families.gguf import GGUFArchitecture
from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.checkpoint import Checkpoint, TensorTaker
from kvseal.exec.weights.quants import Float32
from kvseal.exec.weights.types import LayerWeights, TensorSource

Parts = tuple[TensorSource, TensorSource | None, Float32, tuple[LayerWeights, ...]]
"""Embedding, output projection (None when tied), final norm, layers."""


def from_huggingface(spec: ModelSpec, checkpoint: Checkpoint, *, fused: bool) -> Parts:
    """`fused`: qkv_proj and gate_up_proj instead of five projections (Phi-3)."""
    taker = TensorTaker(checkpoint)
    embedding = taker.take("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    lm_head = _lm_head(spec, checkpoint, taker, embedding)
    layers = []
    for index in range(spec.layers):
        prefix = f"model.layers.{index}"
        taker.drop([f"{prefix}.self_attn.rotary_emb.inv_freq"])  # written by old exporters; computed from the configuration instead
        layers.append(_huggingface_layer(spec, taker, prefix, fused=fused))
    norm = taker.vector("model.norm.weight", spec.hidden_size)
    taker.finish()
    return embedding, lm_head, norm, tuple(layers)


def _lm_head(spec: ModelSpec, checkpoint: Checkpoint, taker: TensorTaker, embedding: TensorSource) -> TensorSource | None:
    if not spec.tied_embeddings:
        return taker.take("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    if taker.has("lm_head.weight"):
        twin = taker.take("lm_head.weight", (spec.vocab_size, spec.hidden_size))
        if twin.type != embedding.type or not np.array_equal(twin.raw, embedding.raw):
            raise ModelUnsupported(
                f"{checkpoint.path}: the configuration ties the output to the embedding (tie_word_embeddings), yet lm_head.weight differs "
                "from model.embed_tokens.weight; set tie_word_embeddings to false if the file is right"
            )
    return None


def _huggingface_layer(spec: ModelSpec, taker: TensorTaker, prefix: str, *, fused: bool) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    if fused:
        q, k, v = _split(taker.take(f"{attention}.qkv_proj.weight", (queries + 2 * keys, hidden)), (queries, keys, keys))
        gate, up = _split(taker.take(f"{mlp}.gate_up_proj.weight", (2 * inner, hidden)), (inner, inner))
    else:
        q = taker.take(f"{attention}.q_proj.weight", (queries, hidden))
        k = taker.take(f"{attention}.k_proj.weight", (keys, hidden))
        v = taker.take(f"{attention}.v_proj.weight", (keys, hidden))
        gate = taker.take(f"{mlp}.gate_proj.weight", (inner, hidden))
        up = taker.take(f"{mlp}.up_proj.weight", (inner, hidden))

    def bias(wanted: bool, name: str, length: int) -> Float32 | None:
        return taker.vector(f"{name}.bias", length) if wanted else None

    return LayerWeights(
        q=q,
        k=k,
        v=v,
        o=taker.take(f"{attention}.o_proj.weight", (hidden, queries)),
        gate=gate,
        up=up,
        down=taker.take(f"{mlp}.down_proj.weight", (hidden, inner)),
        attn_norm=taker.vector(f"{prefix}.input_layernorm.weight", hidden),
        mlp_norm=taker.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        q_bias=bias(spec.q_k_v_bias, f"{attention}.q_proj", queries),
        k_bias=bias(spec.q_k_v_bias, f"{attention}.k_proj", keys),
        v_bias=bias(spec.q_k_v_bias, f"{attention}.v_proj", keys),
        o_bias=bias(spec.o_bias, f"{attention}.o_proj", hidden),
        gate_bias=bias(spec.mlp_bias, f"{mlp}.gate_proj", inner),
        up_bias=bias(spec.mlp_bias, f"{mlp}.up_proj", inner),
        down_bias=bias(spec.mlp_bias, f"{mlp}.down_proj", hidden),
        q_norm=taker.vector(f"{attention}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=taker.vector(f"{attention}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
    )


def from_gguf(spec: ModelSpec, taker: TensorTaker, architecture: GGUFArchitecture) -> Parts:
    embedding = taker.take("token_embd.weight", (spec.vocab_size, spec.hidden_size))
    lm_head = None if spec.tied_embeddings else taker.take("output.weight", (spec.vocab_size, spec.hidden_size))
    layers = tuple(_gguf_layer(spec, taker, f"blk.{index}", architecture) for index in range(spec.layers))
    norm = taker.vector("output_norm.weight", spec.hidden_size)
    taker.finish()
    return embedding, lm_head, norm, layers


def _gguf_layer(spec: ModelSpec, taker: TensorTaker, prefix: str, architecture: GGUFArchitecture) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if architecture.fused:
        q, k, v = _split(taker.take(f"{prefix}.attn_qkv.weight", (queries + 2 * keys, hidden)), (queries, keys, keys))
        gate, up = _split(taker.take(f"{prefix}.ffn_up.weight", (2 * inner, hidden)), (inner, inner))
    else:
        q = taker.take(f"{prefix}.attn_q.weight", (queries, hidden))
        k = taker.take(f"{prefix}.attn_k.weight", (keys, hidden))
        v = taker.take(f"{prefix}.attn_v.weight", (keys, hidden))
        gate = taker.take(f"{prefix}.ffn_gate.weight", (inner, hidden))
        up = taker.take(f"{prefix}.ffn_up.weight", (inner, hidden))
    query_order = _row_order(spec.heads, spec.head_dim) if architecture.interleaved else None
    key_order = _row_order(spec.kv_heads, spec.head_dim) if architecture.interleaved else None
    if architecture.interleaved:
        q = TensorSource(q.raw, q.type, q.shape, query_order)
        k = TensorSource(k.raw, k.type, k.shape, key_order)

    def bias(wanted: bool, name: str, length: int, order: npt.NDArray[np.int32] | None = None) -> Float32 | None:
        if not wanted:
            return None
        values = taker.vector(f"{prefix}.{name}.bias", length)
        return values if order is None else values[order]

    return LayerWeights(
        q=q,
        k=k,
        v=v,
        o=taker.take(f"{prefix}.attn_output.weight", (hidden, queries)),
        gate=gate,
        up=up,
        down=taker.take(f"{prefix}.ffn_down.weight", (hidden, inner)),
        attn_norm=taker.vector(f"{prefix}.attn_norm.weight", hidden),
        mlp_norm=taker.vector(f"{prefix}.ffn_norm.weight", hidden),
        q_bias=bias(spec.q_k_v_bias, "attn_q", queries, query_order),
        k_bias=bias(spec.q_k_v_bias, "attn_k", keys, key_order),
        v_bias=bias(spec.q_k_v_bias, "attn_v", keys),
        o_bias=bias(spec.o_bias, "attn_output", hidden),
        gate_bias=bias(spec.mlp_bias, "ffn_gate", inner),
        up_bias=bias(spec.mlp_bias, "ffn_up", inner),
        down_bias=bias(spec.mlp_bias, "ffn_down", hidden),
        q_norm=taker.vector(f"{prefix}.attn_q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=taker.vector(f"{prefix}.attn_k_norm.weight", spec.head_dim) if spec.qk_norm else None,
    )


def _split(source: TensorSource, rows: tuple[int, ...]) -> list[TensorSource]:
    parts, start = [], 0
    for count in rows:
        parts.append(source.row_slice(start, start + count))
        start += count
    return parts


def _row_order(heads: int, head_dim: int) -> npt.NDArray[np.int32]:
    """[heads * head_dim]: where row (head, half, i) is stored when the file keeps (head, i, half)."""
    stored = np.arange(heads * head_dim, dtype=np.int32).reshape(heads, head_dim // 2, 2)
    return np.ascontiguousarray(stored.swapaxes(1, 2)).reshape(-1)
