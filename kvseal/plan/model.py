"""From an untrusted config to a `ModelShape`, or to one clear sentence why not.

Owns the search for the text part, the choice of the family, and the refusal of what is unknown. Never guesses an architecture: with
`assume_gqa` the reader takes the responsibility, and the result says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvseal.core.errors import ModelCorrupt, ModelUnsupported
from kvseal.plan.classes import BUILDERS, FAMILY_OF, class_defaults, class_entry, class_table, model_type_of
from kvseal.plan.families.common import HIDDEN_KEYS, ClassInfo
from kvseal.plan.fields import Fields
from kvseal.plan.shape import ModelShape
from kvseal.plan.units import printable
from kvseal.plan.weights import read_weights

TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model", "text_model_config")
CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length", "model_max_length",
    "max_target_positions",
)  # fmt: skip
_STRUCTURE = ("num_hidden_layers", "n_layer", "num_layers", "num_attention_heads", "n_head", "hidden_size", "n_embd", "d_model")
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32", "bf16": "bfloat16"}


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The dictionary that describes the decoder, and its path."""
    part: Mapping[str, Any] = config
    where = ""
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict):
        part, where = thinker, "thinker_config."
    for key in TEXT_KEYS:
        inner = part.get(key)
        if isinstance(inner, dict) and inner:
            return inner, f"{where}{key}."
        if inner is not None and not isinstance(inner, dict):
            if key == "language_model" and isinstance(inner, str):
                continue
            raise ModelCorrupt(f"{where}{key} is not an object")
    return part, where


def identify(config: Mapping[str, Any], part: Mapping[str, Any]) -> tuple[str, str | None]:
    """(architecture or model type as named, model type known here or None). The inner names come first, then the outer ones."""
    named: list[str] = []
    for holder in (part, config) if part is not config else (config,):
        architecture = _first_architecture(holder)
        model_type = holder.get("model_type")
        model_type = printable(model_type[:100]) if isinstance(model_type, str) else model_type
        if architecture is not None:
            named.append(architecture)
            known = model_type_of(architecture)
            if known is not None and known in FAMILY_OF:
                # A file may name a class shared by several model types (Llama code serving internlm3); its own type is the finer word.
                if isinstance(model_type, str) and FAMILY_OF.get(model_type) == FAMILY_OF[known]:
                    return architecture, model_type
                return architecture, known
        if isinstance(model_type, str) and model_type:
            named.append(model_type)
            known_here = model_type.lower() in FAMILY_OF
            if known_here and (architecture is None or part is not config):
                return architecture or _first_architecture(config) or model_type, model_type.lower()
    return (named[0] if named else ""), None


def _first_architecture(holder: Mapping[str, Any]) -> str | None:
    value = holder.get("architectures")
    if isinstance(value, list) and value and isinstance(value[0], str):
        return printable(value[0][:100])
    if value not in (None, []):
        raise ModelCorrupt("architectures must be a list of class names")
    return None


def read_shape(config: Mapping[str, Any], name: str, *, assume_gqa: bool = False, file_bytes: int | None = None) -> ModelShape:
    """The shape behind a config. Raises ModelUnsupported (unknown kind, by name) or ModelCorrupt (a key is wrong, by name)."""
    part, where = text_part(config)
    named, model_type = identify(config, part)
    if model_type is None:
        if not named and not any(key in part for key in _STRUCTURE):
            raise ModelUnsupported(f"{name} is not a model config: it has neither architectures nor model_type nor layer counts")
        if not assume_gqa:
            raise ModelUnsupported(_refusal(named, part))
        model_type = "assumed-gqa"
    _refuse_negative_sizes(part, where)
    entry = class_entry(model_type)
    info = ClassInfo(
        model_type=model_type,
        family=FAMILY_OF.get(model_type, "gqa"),
        layer_rule=entry.get("layer_types"),
    )
    defaults = entry.get("defaults") or class_defaults(model_type)
    if part is config and not set(part) & set(_STRUCTURE):
        # A composite class without its text part: the composite's own idea of it, not the text class's.
        defaults = {**defaults, **class_table().get(model_type, {}).get("text_defaults", {})}
    fields = Fields(part, defaults, where)
    if model_type == "assumed-gqa":
        fields.notes.append(f"{named or 'the architecture'} is unknown: sized as plain grouped-query attention because you said so")
        fields.rules.append("assumed: 2 x layers x KV heads x head size")
    built = BUILDERS[info.family](fields, info)
    limit, stated = context_limit(fields, model_type)
    return ModelShape(
        name=printable(name),
        architecture=named,
        model_type=model_type,
        family=info.family,
        layers=tuple(built.layers),
        draft_layers=tuple(built.drafts),
        query_heads=built.query_heads,
        hidden=fields.integer(*HIDDEN_KEYS, fallback=0, minimum=0),
        vocab=fields.optional("vocab_size", "padded_vocab_size", limit="count") or 0,
        max_context_tokens=limit,
        context_stated=stated,
        model_dtype=_model_dtype(fields, config),
        kv_dtype_hint=_kv_hint(config, part),
        dsa=built.dsa,
        rules=tuple(dict.fromkeys(fields.rules)),
        defaults=tuple(fields.used_defaults),
        notes=tuple(dict.fromkeys(fields.notes)),
        weights=replace(read_weights(Fields(part, fields.class_defaults, where), config, len(built.layers)), file_bytes=file_bytes),
        head_split=built.head_split,
    )


_SIZE_KEY = re.compile(r"(?:num|n)_(?!.*logits).+|.+_(?:size|dim|rank|heads|layers|experts)")


def _refuse_negative_sizes(part: Mapping[str, Any], where: str) -> None:
    """No count or size is below zero, used here or not: such a file is broken. Windows are: -1 switches them off."""
    for key, value in part.items():
        if isinstance(value, int | float) and value < 0 and _SIZE_KEY.fullmatch(key) and "window" not in key and "chunk" not in key:
            raise ModelCorrupt(f"{where}{key[:60]} is {str(value)[:30]}; a size cannot be negative")


def context_limit(fields: Fields, model_type: str) -> tuple[int | None, bool]:
    """(tokens, whether the file says so). Rope scaling stretches it as vLLM derives it: factor x the original length.

    llama3 and longrope files state the stretched length already, and so does gemma3.
    Source: https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/config/model.py
    """
    limit = fields.optional(*CONTEXT_KEYS, limit="tokens")
    stated = any(fields.has(key) for key in CONTEXT_KEYS)
    rope = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters")
    if limit is None or not isinstance(rope, dict) or model_type.startswith("gemma3"):
        return limit, stated
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind not in ("yarn", "deepseek_yarn", "linear", "dynamic") or isinstance(factor, bool) or not isinstance(factor, int | float):
        return limit, stated
    if not 1 < factor <= 4096:
        return limit, stated
    original = rope.get("original_max_position_embeddings") if "yarn" in kind else None
    base = limit if original is None else fields.check("original_max_position_embeddings", original, "tokens")
    if int(base * factor) <= limit:
        return limit, stated
    fields.rules.append(f"context limit: {base:,} x {factor:g} ({kind} rope scaling)")
    return int(base * factor), stated


def _refusal(named: str, part: Mapping[str, Any]) -> str:
    known = ", ".join(sorted(set(part) & {"kv_lora_rank", "layer_types", "linear_attn_config", "compress_ratios", "sliding_window"}))
    return (
        f"{named or 'a config with no architecture'} is not an architecture that this planner knows; a wrong number is worse than none. "
        "It would need: layers, query heads, KV heads, head size, and which layers slide, share, compress or keep a state"
        f"{f' (this file has {known})' if known else ''}. If all layers are plain grouped-query attention, say --assume-gqa"
    )


def _model_dtype(fields: Fields, config: Mapping[str, Any]) -> str:
    for holder in (fields.raw, config):
        for key in ("dtype", "torch_dtype"):
            text = holder.get(key)
            if isinstance(text, str) and text.removeprefix("torch.") in _DTYPES:
                return _DTYPES[text.removeprefix("torch.")]
    fields.note_default("dtype", "bfloat16 (no dtype in the file)")
    return "bfloat16"


def _kv_hint(config: Mapping[str, Any], part: Mapping[str, Any]) -> str | None:
    """The cache format that the checkpoint asks for. Quantised weights alone say nothing about the cache."""
    for holder in (part, config):
        quant = holder.get("quantization_config") or holder.get("quantization") or {}
        if not isinstance(quant, dict):
            continue
        inner = quant.get("quantization")
        algo = (inner.get("kv_cache_quant_algo") if isinstance(inner, dict) else None) or quant.get("kv_cache_quant_algo")
        if isinstance(algo, str) and algo:
            return {"FP8": "fp8", "NVFP4": "nvfp4", "INT8": "int8"}.get(algo.upper())
        scheme = quant.get("kv_cache_scheme")
        if isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float":
            return "fp8"
        if isinstance(scheme, dict) and scheme.get("num_bits") == 4 and scheme.get("type") == "float":
            return "nvfp4"
    return None
