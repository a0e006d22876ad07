"""Writes `kvseal/plan/data/class_defaults.json` from the configuration classes of an installed `transformers`.

A published config.json leaves out every key that equals its class default, so a planner has to know the defaults. They are facts
(numbers and names), read here by making each class with no arguments. Run by hand when transformers moves on:
``python tests/unit/plan/make_class_defaults.py > kvseal/plan/data/class_defaults.json``. Not a test and never imported.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

_NAMES = """
n_heads n_layers attention_heads linear_num_heads linear_head_dim short_conv_kernel_size qkv_bias
hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size max_position_embeddings
n_embd n_layer n_head n_positions n_ctx n_inner num_layers d_model d_kv d_ff num_heads ffn_dim attention_head_dim kv_channels
multi_query multi_query_attention new_decoder_architecture num_kv_heads sliding_window use_sliding_window max_window_layers
sliding_window_pattern layer_types attention_chunk_size no_rope_layers no_rope_layer_interval kv_lora_rank q_lora_rank
qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim index_n_heads index_topk index_topk_freq index_skip_topk_offset
indexer_types compress_ratios num_kv_shared_layers global_head_dim num_global_key_value_heads global_attn_every_n_layers
cross_attention_layers attn_layer_period attn_layer_offset attn_layer_indices hybrid_layer_ids block_types attention_window_size
lru_width conv1d_width mamba_d_state mamba_d_conv mamba_expand mamba_n_heads mamba_d_head mamba_n_groups mamba_d_ssm mamba_ngroups
mamba_headdim n_mamba_heads state_size conv_kernel expand n_groups time_step_rank mamba_num_heads mamba_head_dim ssm_state_size
hybrid_override_pattern conv_L_cache conv_dim block_auto_adjust_ff_dim full_attention_interval full_attn_idxs linear_conv_kernel_dim
linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads linear_attn_config swa_num_key_value_heads
swa_head_dim swa_v_head_dim hybrid_layer_pattern num_experts num_local_experts n_routed_experts n_shared_experts
moe_intermediate_size shared_expert_intermediate_size first_k_dense_replace decoder_sparse_step interleave_moe_layer_step
tie_word_embeddings num_nextn_predict_layers mtp_num_hidden_layers moe_layer_freq num_codebooks use_cache is_encoder_decoder
decoder_layers decoder_attention_heads encoder_layers sparse_attention_config mamba_ssm_dtype layer_group_size full_attention_layers
num_memory_blocks attention_layers local_attention global_attn_layers layers_block_type
"""
KEYS = _NAMES.split()


STRUCTURE = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def facts(config: Any) -> dict[str, Any]:
    """Declared defaults only: what `__post_init__` derives (head_dim, layer_types) is a rule, not a default."""
    declared = {field.name: field.default for field in dataclasses.fields(type(config)) if field.default is not dataclasses.MISSING}
    return {key: declared[key] for key in KEYS if declared.get(key) is not None and plain(declared[key])}


def layer_pattern(config_class: Any) -> dict[str, Any]:
    """The class rule for `layer_types` when the file has none: a repeating pattern, with or without a last layer of its own."""
    seen: dict[int, list[str]] = {}
    for depth in (61, 72, 97):
        try:
            kinds = getattr(config_class(num_hidden_layers=depth), "layer_types", None)
        except Exception:  # noqa: BLE001
            return {}
        if not isinstance(kinds, list) or len(kinds) != depth:
            return {}
        seen[depth] = kinds
    for period in range(1, 25):
        pattern = seen[97][:period]
        for tail in (0, 1):
            if all(kinds[i] == pattern[i % period] for kinds in seen.values() for i in range(len(kinds) - tail)):
                last = {kinds[-1] for kinds in seen.values()}
                if tail and len(last) != 1:
                    continue
                return {"pattern": pattern} | ({"last": last.pop()} if tail else {})
    return {}


def main() -> None:
    from transformers.models.auto import configuration_auto, modeling_auto

    wanted = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    wanted |= modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    wanted |= modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    classes: dict[str, Any] = {}
    for model_type in sorted(configuration_auto.CONFIG_MAPPING_NAMES):
        try:
            config = configuration_auto.CONFIG_MAPPING[model_type]()
        except Exception as error:  # noqa: BLE001
            print(f"{model_type}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        text = config.get_text_config(decoder=True)
        if model_type not in wanted and not model_type.endswith("_text"):
            continue
        entry: dict[str, Any] = {"architecture": wanted.get(model_type), "defaults": facts(text)}
        if rule := layer_pattern(type(text)):
            entry["layer_types"] = rule
        if text is not config:
            # What the composite class makes of a missing text_config differs from the text class's own defaults.
            raw = text.to_dict()
            entry["text_defaults"] = {key: raw[key] for key in STRUCTURE if isinstance(raw.get(key), int)}
            entry["text_model_type"] = text.model_type
        try:
            null = type(text)(num_key_value_heads=None)
            entry["null_kv_is_heads"] = getattr(null, "num_key_value_heads", None) is not None
        except Exception:  # noqa: BLE001
            entry["null_kv_is_heads"] = False
        classes[model_type] = entry
        if text is not config and text.model_type not in classes:
            inner = {key: value for key, value in entry.items() if key not in ("text_model_type", "text_defaults")}
            classes[text.model_type] = inner | {"architecture": wanted.get(text.model_type)}
    import transformers

    json.dump(
        {"source": f"transformers {transformers.__version__} configuration classes", "classes": classes},
        sys.stdout,
        separators=(",", ":"),
        sort_keys=True,
    )


if __name__ == "__main__":
    main()
