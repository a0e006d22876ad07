"""config.json of the Hugging Face layout -> `ModelSpec`.

Owns what the configuration keys of each family mean and which class defaults stand in for absent ones (those of the transformers library's
configuration classes: a saved file may leave them out). Never serves a configuration with a feature that it does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvseal.exec.families.fields import MAX_HEAD_DIM, MAX_LAYERS, Fields
from kvseal.exec.families.rope import from_config
from kvseal.exec.spec import ModelSpec

SUPPORTED = "Llama, Mistral, Qwen2, Qwen3, SmolLM3, Granite and Phi-3"

_FOREIGN_KEYS = {
    "quantization_config": "weights quantised by another tool; give the bf16 or fp16 checkpoint, or a GGUF file",
    "vision_config": "an image tower",
    "text_config": "a nested text model",
    "audio_config": "an audio tower",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "query_pre_attn_scalar": "a scaled query",
    "kv_lora_rank": "latent attention",
    "clip_qkv": "clipped queries and keys",
}
"""Keys that change what is computed, whatever the architecture is called."""


@dataclass(frozen=True, slots=True)
class _Family:
    """A family's class defaults and its differences from Llama."""

    name: str
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    tied: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    partial_rotary: bool = False
    fixed_biases: tuple[bool, bool, bool] | None = None
    """(q k v, o, MLP) when the family has them or not whatever the configuration says."""
    optional_mlp_bias: bool = False
    qk_norm: bool = False
    windows: Callable[[Fields, int], tuple[int, ...]] = lambda config, layers: ()


def _uniform_window(default: int | None) -> Callable[[Fields, int], tuple[int, ...]]:
    """One window for all layers; a key that is null means none, an absent key the class default."""

    def windows(config: Fields, layers: int) -> tuple[int, ...]:
        if "sliding_window" not in config and (config.names("sliding_window") or default is None):
            return ()
        return (config.count("sliding_window", default),) * layers

    return windows


def _windows_by_layer(config: Fields, layers: int) -> tuple[int, ...]:
    """Qwen: windows only with `use_sliding_window`, on the layers from `max_window_layers`, or those that `layer_types` names."""
    kinds = config.raw("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise config.corrupt("layer_types", f"must be a list of {layers} names")
    if isinstance(kinds, list) and (unknown := set(kinds) - {"full_attention", "sliding_attention"}):
        raise config.unsupported("layer_types", f"names {sorted(map(str, unknown))[0]!r}; KVSeal computes full and sliding attention")
    if not config.flag("use_sliding_window", False) or (config.names("sliding_window") and "sliding_window" not in config):
        return ()
    window = config.count("sliding_window", 4096)
    if isinstance(kinds, list):
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = config.count("max_window_layers", 28, low=0)
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _smollm3_windows(config: Fields, layers: int) -> tuple[int, ...]:
    """As Qwen's, except that without `layer_types` it is the layers without rotation that have the window."""
    if config.raw("layer_types") is not None or not config.flag("use_sliding_window", False) or "sliding_window" not in config:
        return _windows_by_layer(config, layers) if "sliding_window" in config else ()
    window = config.count("sliding_window")
    return tuple(window if nope else 0 for nope in _nope_layers(config, layers))


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", optional_mlp_bias=True),
    "MistralForCausalLM": _Family("mistral", kv_heads=8, fixed_biases=(False, False, False), windows=_uniform_window(4096)),
    "Qwen2ForCausalLM": _Family("qwen2", kv_heads=32, fixed_biases=(True, False, False), windows=_windows_by_layer),
    "Qwen3ForCausalLM": _Family("qwen3", kv_heads=32, head_dim=128, qk_norm=True, windows=_windows_by_layer),
    "SmolLM3ForCausalLM": _Family("smollm3", theta=2_000_000.0, kv_heads=4, tied=True, optional_mlp_bias=True, windows=_smollm3_windows),
    "GraniteForCausalLM": _Family("granite", optional_mlp_bias=True),
    "Phi3ForCausalLM": _Family(
        "phi3", norm_eps=1e-5, partial_rotary=True, fixed_biases=(False, False, False), windows=_uniform_window(None)
    ),
}
_MODEL_TYPES = {family.name: architecture for architecture, family in _FAMILIES.items()}


def spec_from_config(config: Fields, generation: Fields | None = None, *, context_tokens: int | None = None) -> ModelSpec:
    """The specification. Raises ModelCorrupt or ModelUnsupported, naming the key. `context_tokens`: see `rope.from_config`."""
    family = _family_of(config)
    _refuse_foreign(config)
    layers = config.count("num_hidden_layers", high=MAX_LAYERS)
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", heads if config.names("num_key_value_heads") else family.kv_heads or heads)
    head_dim = config.count("head_dim", family.head_dim or hidden // heads, low=2, high=MAX_HEAD_DIM)
    if heads % kv_heads:
        raise config.corrupt("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} query heads")
    if "head_dim" not in config and family.head_dim is None and hidden % heads:
        raise config.corrupt("hidden_size", f"is {hidden}, not a multiple of the {heads} heads, and head_dim is missing")
    rope, context = from_config(
        config, head_dim=head_dim, default_theta=family.theta, partial=family.partial_rotary, context_tokens=context_tokens
    )
    bias = config.flag("attention_bias", False)
    q_k_v_bias, o_bias, mlp_bias = family.fixed_biases or (bias, bias, family.optional_mlp_bias and config.flag("mlp_bias", False))
    windows = tuple(0 if window >= context else window for window in family.windows(config, layers))
    granite = family.name == "granite"
    bos = config.token_ids("bos_token_id")
    return ModelSpec(
        family=family.name,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", family.norm_eps),
        rope=rope,
        context_tokens=context,
        tied_embeddings=config.flag("tie_word_embeddings", family.tied),
        q_k_v_bias=q_k_v_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        windows=windows if any(windows) else (),
        nope_layers=_nope_layers(config, layers) if family.name == "smollm3" else (),
        attention_scale=config.number("attention_multiplier", 1.0) if granite else head_dim**-0.5,
        embedding_multiplier=config.number("embedding_multiplier", 1.0) if granite else 1.0,
        residual_multiplier=config.number("residual_multiplier", 1.0) if granite else 1.0,
        logits_divisor=config.number("logits_scaling", 1.0) if granite else 1.0,
        bos_token=bos[0] if bos else None,
        eos_tokens=_eos_tokens(config, generation),
    )


def _family_of(config: Fields) -> _Family:
    names = config.raw("architectures")
    if isinstance(names, list) and names:
        for name in names:
            if name in _FAMILIES:
                return _FAMILIES[name]
        raise config.unsupported("architectures", f"names {', '.join(map(str, names))[:200]}; KVSeal computes {SUPPORTED}")
    kind = config.text("model_type", "")
    if kind in _MODEL_TYPES:
        return _FAMILIES[_MODEL_TYPES[kind]]
    if kind:
        raise config.unsupported("model_type", f"is {kind!r}; KVSeal computes {SUPPORTED}")
    raise config.corrupt("architectures", "is missing: nothing says what the weights are")


def _refuse_foreign(config: Fields) -> None:
    for key, what in _FOREIGN_KEYS.items():
        if config.raw(key) not in (None, 0, False, {}, []):
            raise config.unsupported(key, f"means {what}, which KVSeal does not compute")
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.unsupported("hidden_act", f"is {activation!r}; KVSeal computes silu")


def _nope_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """SmolLM3's `no_rope_layers` holds 1 where a layer *does* rotate; absent, every `no_rope_layer_interval`-th does not."""
    marks = config.raw("no_rope_layers")
    if marks is None:
        interval = config.count("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    if not isinstance(marks, list) or len(marks) < layers or any(mark not in (0, 1) for mark in marks):
        raise config.corrupt("no_rope_layers", f"must be a list of at least {layers} zeros and ones")
    return tuple(mark == 0 for mark in marks[:layers])


def _eos_tokens(config: Fields, generation: Fields | None) -> tuple[int, ...]:
    """Ids of both files: generation_config.json often holds more (end of turn) than config.json (end of text)."""
    ids = list(generation.token_ids("eos_token_id")) if generation is not None else []
    ids += [token for token in config.token_ids("eos_token_id") if token not in ids]
    return tuple(dict.fromkeys(ids))
