"""GGUF metadata -> `ModelSpec`.

Owns what the metadata keys of each architecture mean. Never serves a file with a feature that it does not compute.
Key names: the GGUF specification of the ggml project; tensor `rope_freqs.weight` holds llama3's divisors of the frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvseal.exec.families.fields import MAX_HEAD_DIM, MAX_LAYERS, Fields
from kvseal.exec.families.rope import Float64, linear, longrope, longrope_magnitude, plain_frequencies, spec_of, yarn, yarn_magnitude
from kvseal.exec.spec import ModelSpec, RopeSpec
from kvseal.exec.weights.checkpoint import TensorTaker
from kvseal.exec.weights.gguf_header import StringArray


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How a GGUF architecture is stored."""

    interleaved: bool
    """q and k rows are stored for interleaved rotation (pairs 2 i, 2 i + 1) and have to be gathered back."""
    qk_norm: bool = False
    fused: bool = False
    q_k_v_bias: bool | None = None
    """None: as the tensors say."""


ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(interleaved=True),
    "mistral": GGUFArchitecture(interleaved=True),
    "smollm3": GGUFArchitecture(interleaved=True, q_k_v_bias=False),
    "granite": GGUFArchitecture(interleaved=True),
    "qwen2": GGUFArchitecture(interleaved=False, q_k_v_bias=True),
    "qwen3": GGUFArchitecture(interleaved=False, qk_norm=True),
    "phi3": GGUFArchitecture(interleaved=False, fused=True, q_k_v_bias=False),
}
_NOPE_INTERVAL = 4
"""SmolLM3's layers without rotation are not in the metadata; every fourth, as in its configuration."""


def architecture_of(fields: Fields) -> tuple[str, GGUFArchitecture]:
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise fields.unsupported("general.architecture", f"is {name!r}; KVSeal computes {', '.join(ARCHITECTURES)}")
    return name, ARCHITECTURES[name]


def spec_from_gguf(fields: Fields, taker: TensorTaker, *, context_tokens: int | None = None) -> ModelSpec:
    """The specification; takes the rotary factor tensors out of `taker`. `context_tokens`: see `rope.from_config`."""
    name, architecture = architecture_of(fields)
    _refuse_foreign(fields, name)
    heads, hidden = fields.count(f"{name}.attention.head_count"), fields.count(f"{name}.embedding_length")
    layers = fields.count(f"{name}.block_count", high=MAX_LAYERS)
    kv_heads = fields.count(f"{name}.attention.head_count_kv", heads)
    head_dim = fields.count(f"{name}.attention.key_length", hidden // heads, low=2, high=MAX_HEAD_DIM)
    if heads % kv_heads:
        raise fields.corrupt(f"{name}.attention.head_count_kv", f"is {kv_heads}, which does not divide the {heads} query heads")
    if fields.count(f"{name}.attention.value_length", head_dim) != head_dim:
        raise fields.unsupported(f"{name}.attention.value_length", "differs from the key length")
    rope, context = _rope(fields, taker, name, head_dim, context_tokens)
    if architecture.interleaved and rope.rotary_dims != head_dim:
        raise fields.unsupported(
            f"{name}.rope.dimension_count", f"is {rope.rotary_dims} of {head_dim}; this architecture rotates whole heads"
        )
    window = fields.count(f"{name}.attention.sliding_window", 0, low=0)
    granite = name == "granite"
    scale = fields.number(f"{name}.attention.scale", 0.0, positive=False) if granite else 0.0
    tied = not taker.has("output.weight")
    return ModelSpec(
        family="llama" if name == "mistral" else name,
        vocab_size=fields.count(f"{name}.vocab_size", _tokens(fields)),
        hidden_size=hidden,
        intermediate_size=fields.count(f"{name}.feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        context_tokens=context,
        tied_embeddings=tied,
        q_k_v_bias=taker.has("blk.0.attn_q.bias") if architecture.q_k_v_bias is None else architecture.q_k_v_bias,
        o_bias=taker.has("blk.0.attn_output.bias"),
        mlp_bias=taker.has("blk.0.ffn_gate.bias"),
        qk_norm=architecture.qk_norm,
        windows=(window,) * layers if 0 < window < context else (),
        nope_layers=tuple((layer + 1) % _NOPE_INTERVAL == 0 for layer in range(layers)) if name == "smollm3" else (),
        attention_scale=scale or head_dim**-0.5,
        embedding_multiplier=fields.number("granite.embedding_scale", 1.0) if granite else 1.0,
        residual_multiplier=fields.number("granite.residual_scale", 1.0) if granite else 1.0,
        logits_divisor=fields.number("granite.logit_scale", 1.0) if granite else 1.0,
        bos_token=fields.count("tokenizer.ggml.bos_token_id", low=0) if "tokenizer.ggml.bos_token_id" in fields else None,
        eos_tokens=_eos_tokens(fields),
    )


def _tokens(fields: Fields) -> int | None:
    """The vocabulary's length, for files that do not state `vocab_size`."""
    tokens = fields.raw("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, StringArray) else None


def _eos_tokens(fields: Fields) -> tuple[int, ...]:
    """End of sequence, of turn and of message, where stated."""
    keys = ("eos", "eot", "eom")
    return tuple(dict.fromkeys(token for key in keys for token in fields.token_ids(f"tokenizer.ggml.{key}_token_id")))


def _refuse_foreign(fields: Fields, name: str) -> None:
    for key, what in (
        ("expert_count", "a mixture of experts"),
        ("attn_logit_softcapping", "soft-capped attention"),
        ("attention.layer_norm_epsilon", "layer norm with a mean"),
        ("attention.clamp_kqv", "clipped queries and keys"),
        ("attention.shared_kv_layers", "layers that share K and V"),
    ):
        if fields.raw(f"{name}.{key}") not in (None, 0, 0.0):
            raise fields.unsupported(f"{name}.{key}", f"means {what}, which KVSeal does not compute")
    if isinstance(fields.raw(f"{name}.attention.head_count_kv"), np.ndarray):
        raise fields.unsupported(f"{name}.attention.head_count_kv", "differs by layer")
    if fields.raw(f"{name}.attention.causal") is False:
        raise fields.unsupported(f"{name}.attention.causal", "is false: an encoder")
    if fields.raw("general.type") not in (None, "model"):
        raise fields.unsupported("general.type", f"is {fields.raw('general.type')!r}: not a model but a part of one")


def _rope(fields: Fields, taker: TensorTaker, name: str, head_dim: int, context_tokens: int | None) -> tuple[RopeSpec, int]:
    promised = fields.count(f"{name}.context_length")
    dims = fields.count(f"{name}.rope.dimension_count", head_dim)
    if dims > head_dim or dims % 2:
        raise fields.corrupt(f"{name}.rope.dimension_count", f"is {dims}; it must be even and at most the head's {head_dim}")
    theta = fields.number(f"{name}.rope.freq_base", 10_000.0)
    frequencies = plain_frequencies(theta, dims)
    original = fields.count(f"{name}.rope.scaling.original_context_length", promised)
    if name == "phi3" and taker.has("rope_factors_short.weight"):
        return _longrope(fields, taker, frequencies, promised, original, context_tokens)
    kind = fields.text(f"{name}.rope.scaling.type", "none")
    factor = fields.number(f"{name}.rope.scaling.factor", fields.number(f"{name}.rope.scale_linear", 1.0))
    if taker.has("rope_freqs.weight"):
        if kind != "none" and factor != 1.0:
            raise fields.unsupported(f"{name}.rope.scaling.type", f"is {kind!r} beside a tensor rope_freqs.weight")
        divisors = taker.vector("rope_freqs.weight", dims // 2)
        return spec_of(frequencies / divisors.astype(np.float64), scaling="llama3"), promised
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return spec_of(frequencies), promised
    if kind == "linear":
        return linear(frequencies, factor), promised
    if kind != "yarn":
        raise fields.unsupported(f"{name}.rope.scaling.type", f"is {kind!r}; KVSeal computes none, linear, yarn and Phi-3's longrope")
    if f"{name}.rope.scaling.yarn_log_multiplier" in fields:
        raise fields.unsupported(f"{name}.rope.scaling.yarn_log_multiplier", "is set, which belongs to another family")
    magnitude = yarn_magnitude(factor) * fields.number(f"{name}.rope.scaling.attn_factor", 1.0)
    betas = [fields.number(f"{name}.rope.scaling.yarn_{beta}", value) for beta, value in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    scaled = yarn(
        frequencies,
        theta=theta,
        factor=factor,
        original_tokens=original,
        beta_fast=betas[0],
        beta_slow=betas[1],
        magnitude=magnitude,
    )
    return scaled, max(promised, int(original * factor))


def _longrope(
    fields: Fields, taker: TensorTaker, frequencies: Float64, promised: int, original: int, context_tokens: int | None
) -> tuple[RopeSpec, int]:
    long = context_tokens is not None and context_tokens > original
    sets = {part: taker.vector(f"rope_factors_{part}.weight", len(frequencies)) for part in ("short", "long")}
    magnitude = fields.number("phi3.rope.scaling.attn_factor", longrope_magnitude(promised / original, original))
    part = "long" if long else "short"
    factors = tuple(float(x) for x in sets[part])
    return longrope(frequencies, factors, magnitude=magnitude, name=part), promised if long else min(promised, original)
