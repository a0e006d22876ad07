"""A model's architecture as plain numbers, the same for every family and backend.

Owns `ModelSpec`: what `exec.families` reads out of a config.json or a GGUF header and what a backend needs to compute a forward pass.
Never holds weights. Whatever a family does that these fields cannot express is `ModelUnsupported`.

The computed function, for hidden states h of one sequence::

    h = embedding[token] * embedding_multiplier
    per layer:
      x = rms_norm(h) ; q, k, v = linear(x) (+ bias) ; q, k = rms_norm per head (if qk_norm) ; rope(q, k) unless nope_layers[i]
      h += residual_multiplier * o_proj(attention(q, K, V, scale=attention_scale, window=windows[i]))
      x = rms_norm(h) ; h += residual_multiplier * down(silu(gate(x)) * up(x))
    logits = lm_head(rms_norm(h)) / logits_divisor
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding, already resolved: backends only multiply and rotate.

    Dimension i of the first half is paired with i + rotary_dims/2 (the Hugging Face order; GGUF rows are un-permuted at load).
    Only the first `rotary_dims` dimensions of a head rotate.
    """

    rotary_dims: int
    inverse_frequencies: tuple[float, ...]
    """rotary_dims / 2 values, scaling (linear, llama3, yarn, longrope) included."""
    magnitude: float = 1.0
    """Factor on cos and sin (yarn's and longrope's attention factor)."""
    scaling: str = "none"
    """Name for people and for the format digest; no backend reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    context_tokens: int
    """The longest sequence that the model promises."""
    tied_embeddings: bool = False
    q_k_v_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    """Per layer: 0 = full attention, w = a token sees itself and the w - 1 before it."""
    nope_layers: tuple[bool, ...] = ()
    """Per layer: True = no rotary embedding (SmolLM3)."""
    attention_scale: float = 0.0
    """Factor on q.k; head_dim ** -0.5 unless the family says otherwise."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()
