"""MHA, GQA and MQA, with every sort of window, per-layer head list, shared layer, cross layer and skipped layer.

Rules: sizing note 1.1 to 1.4 and 1.11. Sources: https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/kv_cache_interface.py and the
configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvseal.core.errors import ModelCorrupt, ModelUnsupported
from kvseal.plan.families import windows
from kvseal.plan.families.common import ClassInfo, attention, head_dim, kv_heads, layer_count, query_heads
from kvseal.plan.families.parts import Built
from kvseal.plan.fields import Fields
from kvseal.plan.shape import Attention, Index, Kind, Layer

CONTRADICTIONS = {
    "kv_lora_rank": "multi-head latent attention",
    "compress_ratios": "compressed attention",
    "linear_attn_config": "linear attention",
    "block_configs": "per-block attention (NAS)",
    "hybrid_override_pattern": "state-space layers",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "cross_attention_layers": "cross-attention layers",
    "num_kv_shared_layers": "layers that share KV",
    "index_topk": "a sparse-attention indexer",
}


def build(fields: Fields, info: ClassInfo) -> Built:
    """Plain attention; the kind of each layer from the file or the class."""
    for key, meaning in CONTRADICTIONS.items():
        if fields.raw.get(key) not in (None, 0, [], {}, ""):
            raise ModelUnsupported(f"{fields.where}{key} says {meaning}, which {info.model_type} does not have: refusing to guess")
    layers, heads = layer_count(fields), query_heads(fields)
    counts, size = kv_heads(fields, heads, layers, info), head_dim(fields, heads)
    v_size = fields.optional("v_head_dim") or size
    kinds = windows.layer_kinds(fields, layers, info.model_type, info.layer_rule)
    _only(kinds, {"full", "sliding", "chunked"}, info)
    sizes = windows.windows_per_layer(fields, kinds)
    chunk = fields.integer("attention_chunk_size", limit="tokens") if "chunked" in kinds else None
    overrides = _overrides(fields, layers) or _other_setting(fields, kinds)
    _note_oddities(fields, sizes)
    built: list[Layer] = []
    for i, kind in enumerate(kinds):
        own = overrides.get(i, {})
        count = _override(fields, own, "num_key_value_heads", counts[i])
        k_dim = _override(fields, own, "head_dim", size)
        v_dim = k_dim if "head_dim" in own else v_size
        built.append((attention(kind, count, k_dim, v_dim, chunk if kind == "chunked" else sizes[i]),))
    return Built(layers=built, drafts=mtp_layers(fields, built), query_heads=heads)


def build_llama4(fields: Fields, info: ClassInfo) -> Built:
    """Chunked local attention; layers without rope are full. `no_rope_layers` holds 1 where rope (and the chunk) applies."""
    if "layer_types" not in fields.raw and fields.has("no_rope_layers"):
        flags = fields.sequence("no_rope_layers") or []
        layers = layer_count(fields)
        if len(flags) >= layers:
            words = ["chunked_attention" if flag else "full_attention" for flag in flags[:layers]]
            fields = _with(fields, {"layer_types": words})
    elif "layer_types" not in fields.raw and fields.has("no_rope_layer_interval"):
        every = fields.integer("no_rope_layer_interval", limit="layers")
        words = ["full_attention" if (i + 1) % every == 0 else "chunked_attention" for i in range(layer_count(fields))]
        fields = _with(fields, {"layer_types": words})
    if fields.is_null("attention_chunk_size"):
        words = ["full_attention"] * layer_count(fields)
        fields = _with(fields, {"layer_types": words})
        fields.rules.append("attention_chunk_size is null: every layer is full")
    return build(fields, info)


def build_shared(fields: Fields, info: ClassInfo) -> Built:
    """Gemma-3n and Gemma-4: the last layers own no cache; Gemma-4's global layers have their own heads and head size."""
    layers, heads = layer_count(fields), query_heads(fields)
    counts, size = kv_heads(fields, heads, layers, info), head_dim(fields, heads)
    kinds = windows.layer_kinds(fields, layers, info.model_type, info.layer_rule)
    _only(kinds, {"full", "sliding"}, info)
    sizes = windows.windows_per_layer(fields, kinds)
    global_dim, global_heads = size, None
    if info.model_type.startswith(("gemma4", "diffusion_gemma")):
        if kinds:
            kinds[-1] = "full"
        global_dim = fields.integer("global_head_dim", fallback=512)
        if fields.boolean("attention_k_eq_v"):
            global_heads = fields.optional("num_global_key_value_heads", limit="heads")
            fields.notes.append("attention_k_eq_v does not halve the cache: engines store K and V")
    shared = fields.optional("num_kv_shared_layers", limit="layers", minimum=0) or 0
    if shared >= layers:
        raise ModelCorrupt(f"num_kv_shared_layers is {shared} of {layers} layers; at least one must own its KV")
    overrides = _overrides(fields, layers)
    built: list[Layer] = []
    for i, kind in enumerate(kinds):
        if i >= layers - shared:
            built.append(())
            continue
        own = overrides.get(i, {})
        is_global = kind == "full"
        count = _override(fields, own, "num_key_value_heads", (global_heads or counts[i]) if is_global else counts[i])
        dim = _override(fields, own, "head_dim", global_dim if is_global else size)
        built.append((attention(kind, count, dim, dim, sizes[i]),))
    if shared:
        fields.rules.append(f"the last {shared} layers share KV with earlier ones and own none (num_kv_shared_layers)")
    return Built(layers=built, drafts=[], query_heads=heads)


def build_cross(fields: Fields, info: ClassInfo) -> Built:
    """Llama-3.2-Vision: the listed layers attend to image tokens only; text stores nothing there."""
    layers, heads = layer_count(fields), query_heads(fields)
    counts, size = kv_heads(fields, heads, layers, info), head_dim(fields, heads)
    cross = fields.sequence("cross_attention_layers")
    if cross is None:
        cross = list(range(3, min(layers, 40), 5))
        fields.note_default("cross_attention_layers", "every fifth from 3 (class rule)")
    indices = {fields.check("cross_attention_layers", item, "layers", minimum=0) for item in cross}
    if indices and max(indices) >= layers:
        raise ModelCorrupt(f"cross_attention_layers names layer {max(indices)} of {layers}")
    fields.rules.append("cross-attention layers hold image tokens only: no bytes per text token")
    kinds = [Kind.CROSS if i in indices else Kind.FULL for i in range(layers)]
    built: list[Layer] = [(Attention(kind=kind, kv_heads=counts[i], k_dim=size, v_dim=size),) for i, kind in enumerate(kinds)]
    return Built(layers=built, drafts=[], query_heads=heads)


def build_nas(fields: Fields, info: ClassInfo) -> Built:
    """Nemotron NAS (DeciLM): `block_configs` says per block whether there is attention and how many heads share one KV head."""
    layers, heads, size = layer_count(fields), query_heads(fields), 0
    blocks = fields.sequence("block_configs")
    per_layer = fields.sequence("num_key_value_heads_per_layer")
    size = head_dim(fields, heads)
    if blocks is None:
        if per_layer is None:
            return build(fields, info)
        counts = [fields.check("num_key_value_heads_per_layer", item, "heads", minimum=0) for item in per_layer]
    else:
        counts = [_nas_heads(fields, block, heads, i) for i, block in enumerate(blocks)]
    if len(counts) != layers:
        raise ModelCorrupt(f"the per-block list has {len(counts)} entries for {layers} layers")
    fields.rules.append("KV heads per block: query heads / n_heads_in_group; no_op and linear blocks own none")
    built: list[Layer] = [(Attention(kind=Kind.FULL, kv_heads=count, k_dim=size, v_dim=size),) if count else () for count in counts]
    return Built(layers=built, drafts=[], query_heads=heads)


def _nas_heads(fields: Fields, block: Any, heads: int, index: int) -> int:
    part = block.get("attention") if isinstance(block, dict) else None
    if not isinstance(part, dict):
        raise ModelCorrupt(f"block_configs[{index}] has no attention part")
    if part.get("no_op") or part.get("replace_with_linear"):
        return 0
    if part.get("n_heads_in_group") is None:
        if part.get("num_key_value_heads") is None:
            raise ModelCorrupt(f"block_configs[{index}].attention has neither n_heads_in_group nor num_key_value_heads")
        return fields.check(f"block_configs[{index}].attention.num_key_value_heads", part["num_key_value_heads"], "heads")
    group = fields.check(f"block_configs[{index}].attention.n_heads_in_group", part["n_heads_in_group"], "heads")
    if heads % group:
        raise ModelCorrupt(f"block_configs[{index}]: {heads} heads do not divide by n_heads_in_group {group}")
    return heads // group


def build_mimo(fields: Fields, info: ClassInfo) -> Built:
    """MiMo-V2: full and sliding layers with their own KV heads, and V narrower than K."""
    layers, heads = layer_count(fields), query_heads(fields)
    counts, k_dim = kv_heads(fields, heads, layers, info), head_dim(fields, heads)
    v_dim = fields.integer("v_head_dim", fallback=k_dim)
    swa_heads = fields.integer("swa_num_key_value_heads", limit="heads", fallback=counts[0])
    swa_k = fields.integer("swa_head_dim", fallback=k_dim)
    swa_v = fields.integer("swa_v_head_dim", fallback=v_dim)
    kinds = windows.layer_kinds(fields, layers, info.model_type, None)
    if not {"hybrid_layer_pattern", "layer_types"} & set(fields.raw):
        kinds = ["full" if i == 0 or (i + 1) % 6 == 0 else "sliding" for i in range(layers)]
        fields.note_default("layer_types", "first and every 6th full (class rule)")
    sizes = windows.windows_per_layer(fields, kinds)
    built: list[Layer] = []
    for i, kind in enumerate(kinds):
        full = kind == "full"
        built.append((attention(kind, counts[i] if full else swa_heads, k_dim if full else swa_k, v_dim if full else swa_v, sizes[i]),))
    return Built(layers=built, drafts=mtp_layers(fields, built), query_heads=heads)


def build_sparse_index(fields: Fields, info: ClassInfo) -> Built:
    """MiniMax-M3: GQA plus one index key per token in the layers that attend sparsely; all index heads share it."""
    layers, heads = layer_count(fields), query_heads(fields)
    counts, size = kv_heads(fields, heads, layers, info), head_dim(fields, heads)
    sparse = fields.inner("sparse_attention_config")
    has_index = [False] * layers
    if sparse.raw and sparse.boolean("use_sparse_attention", fallback=True):
        dim = sparse.integer("sparse_index_dim", fallback=size)
        freq = sparse.sequence("sparse_attention_freq")
        if freq is not None and len(freq) < layers:
            raise ModelCorrupt(f"sparse_attention_freq has {len(freq)} entries for {layers} layers")
        has_index = [bool(freq[i]) if freq is not None else True for i in range(layers)]
        fields.rules.append("one index key per token where sparse_attention_freq is 1, at the KV dtype")
    built: list[Layer] = []
    for i in range(layers):
        kv = Attention(kind=Kind.FULL, kv_heads=counts[i], k_dim=size, v_dim=size)
        built.append((kv, Index(kind=Kind.SPARSE_INDEX, index_dim=dim)) if has_index[i] else (kv,))
    return Built(layers=built, drafts=mtp_layers(fields, built), query_heads=heads)


def build_encoder_decoder(fields: Fields, info: ClassInfo) -> Built:
    """T5, BART, Whisper: the decoder's self-attention grows; its cross-attention holds encoder tokens."""
    layers = fields.integer("num_decoder_layers", "decoder_layers", "num_hidden_layers", "num_layers", limit="layers")
    heads = fields.integer("decoder_attention_heads", "num_attention_heads", "num_heads", limit="heads")
    size = head_dim(fields, heads)
    fields.rules.append("decoder self-attention grows; cross-attention is per encoder token")
    pair: Layer = (
        Attention(kind=Kind.FULL, kv_heads=heads, k_dim=size, v_dim=size),
        Attention(kind=Kind.CROSS, kv_heads=heads, k_dim=size, v_dim=size),
    )
    return Built(layers=[pair] * layers, drafts=[], query_heads=heads)


def build_gpt_neo(fields: Fields, info: ClassInfo) -> Built:
    """`attention_layers` (or the nested `attention_types`) alternate global and local; the local window is `window_size`."""
    words = fields.sequence("attention_layers")
    if words is None and fields.has("attention_types"):
        words = [word for kinds, repeat in fields.sequence("attention_types") or [] for word in list(kinds) * int(repeat)]
    if words is not None:
        fields = _with(fields, {"layer_types": words, "sliding_window": fields.raw.get("window_size", 256)})
    return build(fields, info)


def mtp_layers(fields: Fields, built: list[Layer], keys: tuple[str, ...] = ()) -> list[Layer]:
    """Draft layers look like the last layer with full attention; only used when speculation is asked for."""
    count = 0
    for key in (*keys, "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"):
        if fields.has(key):
            count = fields.check(key, fields.raw[key], "layers", minimum=0)
            break
    template = next((layer for layer in reversed(built) if layer), ())
    return [template] * min(count, 16)


def _only(kinds: list[str], allowed: set[str], info: ClassInfo) -> None:
    strange = sorted(set(kinds) - allowed)
    if strange:
        raise ModelUnsupported(f"{info.model_type} lists layers of kind {', '.join(strange)}, which this family does not have")


def _with(fields: Fields, extra: dict[str, Any]) -> Fields:
    child = Fields({**fields.raw, **extra}, fields.class_defaults, fields.where)
    child.used_defaults, child.notes, child.rules = fields.used_defaults, fields.notes, fields.rules
    return child


def _overrides(fields: Fields, layers: int) -> dict[int, dict[str, Any]]:
    """`per_layer_config` of recent transformers: keys are layer numbers as text."""
    found: dict[int, dict[str, Any]] = {}
    for key, value in fields.mapping("per_layer_config").items():
        if not key.isdecimal() or int(key) >= layers or not isinstance(value, dict):
            raise ModelCorrupt(f"per_layer_config names layer {key[:20]!r} of {layers}")
        found[int(key)] = value
    return found


def _other_setting(fields: Fields, kinds: list[str]) -> dict[int, dict[str, Any]]:
    """`attention_other_setting` (Step 3.5): heads and head size of the sliding layers."""
    other = fields.mapping("attention_other_setting")
    own = {"num_key_value_heads": other.get("num_attention_groups"), "head_dim": other.get("head_dim")}
    own = {key: value for key, value in own.items() if value is not None}
    return {i: own for i, kind in enumerate(kinds) if kind == "sliding"} if own else {}


def _note_oddities(fields: Fields, windows_tokens: list[int | None]) -> None:
    """Things that surprise people, said once."""
    limit = fields.raw.get("max_position_embeddings")
    real = [window for window in windows_tokens if window is not None]
    if isinstance(limit, int) and real and min(real) >= limit:
        fields.notes.append(f"the window of {min(real):,} tokens is not shorter than the model's own limit: it never closes")
    if fields.raw.get("use_cla") is True:
        fields.notes.append("use_cla: layers share K and V when computing, yet engines keep a cache in every layer")


def _override(fields: Fields, own: dict[str, Any], key: str, otherwise: int) -> int:
    return fields.check(f"per_layer_config.{key}", own[key], "dim") if own.get(key) is not None else otherwise


Builder = Callable[[Fields, ClassInfo], Built]
