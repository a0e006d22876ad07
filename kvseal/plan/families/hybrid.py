"""Models that mix attention with state layers, and models of state layers only.

Owns which layer is which in Jamba, Bamba, Falcon-H1, Nemotron-H, Granite 4, Zamba2, LFM2, Qwen3-Next/3.5, Kimi Linear/K3, GLM-5-Next,
MiniMax-Text-01, OLMo hybrid, RecurrentGemma and Mamba. The bytes of a state are in `families.states`.
"""

from __future__ import annotations

from kvseal.core.errors import ModelCorrupt
from kvseal.plan.families import mla, states, windows
from kvseal.plan.families.common import HIDDEN_KEYS, ClassInfo, attention, head_dim, kv_heads, layer_count, query_heads
from kvseal.plan.families.parts import Built
from kvseal.plan.fields import Fields
from kvseal.plan.shape import Attention, Cache, Index, Kind, Layer, State


def _mix(fields: Fields, info: ClassInfo, state: State, kinds: list[str] | None = None) -> Built:
    """Attention where the kind is full or sliding, `state` where it is linear, both where it is hybrid, nothing where it is none."""
    layers, heads = layer_count(fields), query_heads(fields)
    kinds = kinds if kinds is not None else windows.layer_kinds(fields, layers, info.model_type, info.layer_rule)
    counts, size = kv_heads(fields, heads, len(kinds), info), head_dim(fields, heads)
    sizes = windows.windows_per_layer(fields, kinds)
    built: list[Layer] = []
    for i, kind in enumerate(kinds):
        own: list[Cache] = []
        if kind in ("full", "sliding", "hybrid", "hybrid_sliding"):
            own.append(attention("sliding" if "sliding" in kind else "full", counts[i], size, size, sizes[i]))
        if kind in ("linear", "conv", "hybrid", "hybrid_sliding"):
            own.append(state)
        if kind in ("chunked", "indexed"):
            raise ModelCorrupt(f"{info.model_type} lists a layer of kind {kind}, which this family does not have")
        built.append(tuple(own))
    drafts = fields.optional("num_nextn_predict_layers", "mtp_num_hidden_layers", limit="layers", minimum=0) or 0
    template = next((layer for layer in built if any(isinstance(cache, Attention) for cache in layer)), ())
    return Built(layers=built, drafts=[template] * min(drafts, 16), query_heads=heads, head_split=state.heads)


def build_gdn(fields: Fields, info: ClassInfo) -> Built:
    """Qwen3-Next and Qwen3.5: gated delta net, every fourth layer full."""
    return _mix(fields, info, states.gdn(fields))


def build_olmo_hybrid(fields: Fields, info: ClassInfo) -> Built:
    heads, hidden = query_heads(fields), fields.integer(*HIDDEN_KEYS)
    raw = dict(fields.raw)
    raw.setdefault("linear_num_key_heads", heads)
    raw.setdefault("linear_num_value_heads", heads)
    raw.setdefault("linear_key_head_dim", int(0.75 * hidden / heads))
    raw.setdefault("linear_value_head_dim", 2 * int(raw["linear_key_head_dim"]))
    fields.raw = raw
    return _mix(fields, info, states.gdn(fields))


def build_mamba1_hybrid(fields: Fields, info: ClassInfo) -> Built:
    """Jamba, and Zamba, whose hybrid layers run a shared attention block before the state layer."""
    kinds = None
    if info.model_type == "zamba" and "layers_block_type" not in fields.raw:
        layers = layer_count(fields)
        period, offset = fields.integer("attn_layer_period", limit="layers"), fields.integer("attn_layer_offset", limit="layers", minimum=0)
        tail = ["hybrid" if i % period == offset else "linear" for i in range(layers - 3)]
        kinds = ["linear", "linear", "hybrid", *tail][:layers]
        fields.rules.append(f"layer kinds: the third, then every {period} from {offset} (class rule)")
    if info.model_type == "zamba" and not fields.has("attention_head_dim"):
        fields.raw = {**fields.raw, "head_dim": 2 * fields.integer(*HIDDEN_KEYS) // query_heads(fields)}
    return _mix(fields, info, states.mamba1(fields), kinds)


def build_mamba2_hybrid(fields: Fields, info: ClassInfo) -> Built:
    """Bamba, Granite 4, Falcon-H1 (both in every layer), Zamba2 (attention of twice the width)."""
    layers = layer_count(fields)
    kinds = None
    listed = fields.sequence("attn_layer_indices")
    if info.model_type == "bamba" and listed is not None and not fields.has("layer_types"):
        indices = {fields.check("attn_layer_indices", item, "layers", minimum=0) for item in listed}
        kinds = ["full" if i in indices else "linear" for i in range(layers)]
        fields.rules.append("layer kinds: attn_layer_indices")
    if info.model_type == "falcon_h1":
        kinds = ["hybrid"] * layers
        fields.rules.append("every layer has attention and a Mamba-2 state")
    if info.model_type == "zamba2":
        hybrid = fields.sequence("hybrid_layer_ids")
        if hybrid is not None and "layers_block_type" not in fields.raw:
            indices = {fields.check("hybrid_layer_ids", item, "layers", minimum=0) for item in hybrid}
            kinds = ["hybrid" if i in indices else "linear" for i in range(layers)]
        elif "layers_block_type" not in fields.raw:
            raise ModelCorrupt("Zamba2 needs layers_block_type or hybrid_layer_ids: which layers hold the shared attention")
        if not fields.has("attention_head_dim"):
            fields.raw = {**fields.raw, "head_dim": 2 * fields.integer(*HIDDEN_KEYS) // query_heads(fields)}
        fields.rules.append("shared attention blocks: each use keeps its own K and V, head size 2 x hidden / heads")
    return _mix(fields, info, states.mamba2(fields), kinds)


_NEMOTRON = {"M": "linear", "*": "full", "-": "none", "E": "none"}


def build_nemotron_h(fields: Fields, info: ClassInfo) -> Built:
    """`hybrid_override_pattern`: M state, * attention, - MLP, E experts; each letter is one layer."""
    pattern = fields.raw.get("hybrid_override_pattern")
    state = states.mamba2(fields, class_bytes=4)
    if isinstance(pattern, str) and pattern:
        if len(pattern) > 4096 or any(letter not in _NEMOTRON for letter in pattern):
            raise ModelCorrupt("hybrid_override_pattern may hold M, *, - and E only, one per layer")
        layers = fields.optional(*("num_hidden_layers", "n_layer"), limit="layers")
        if layers is not None and layers != len(pattern):
            raise ModelCorrupt(f"hybrid_override_pattern has {len(pattern)} letters for {layers} layers")
        fields.rules.append("layer kinds: hybrid_override_pattern")
        kinds = [_NEMOTRON[letter] for letter in pattern]
    else:
        words = fields.sequence("layers_block_type") or fields.sequence("layer_types")
        if words is None:
            raise ModelCorrupt("Nemotron-H needs hybrid_override_pattern or layers_block_type: which layers attend")
        kinds = [windows.word_kind(word, "layers_block_type") for word in words]
    fields.raw = {**fields.raw, "num_hidden_layers": len(kinds)}
    return _mix(fields, info, state, kinds)


def build_lfm2(fields: Fields, info: ClassInfo) -> Built:
    layers = layer_count(fields)
    kinds = None
    if "layer_types" not in fields.raw and fields.has("full_attn_idxs"):
        indices = {fields.check("full_attn_idxs", item, "layers", minimum=0) for item in fields.sequence("full_attn_idxs") or []}
        kinds = ["full" if i in indices else "conv" for i in range(layers)]
        fields.rules.append("layer kinds: full_attn_idxs")
    return _mix(fields, info, states.short_conv(fields), kinds)


def build_lightning(fields: Fields, info: ClassInfo) -> Built:
    """MiniMax-Text-01: lightning attention, one softmax layer in eight (`attn_type_list`, or `layer_types`)."""
    layers, heads = layer_count(fields), query_heads(fields)
    kinds = windows.layer_kinds(fields, layers, info.model_type, info.layer_rule)
    return _mix(fields, info, states.lightning(heads, head_dim(fields, heads), fields), kinds)


def build_recurrent_gemma(fields: Fields, info: ClassInfo) -> Built:
    kinds = ["sliding" if kind == "full" else kind for kind in windows.layer_kinds(fields, layer_count(fields), info.model_type, None)]
    return _mix(fields, info, states.rg_lru(fields), kinds)


def build_kda(fields: Fields, info: ClassInfo) -> Built:
    """Kimi Linear and K3: KDA layers and MLA layers; the lists count from 1."""
    layers, heads = layer_count(fields), query_heads(fields)
    linear = fields.inner("linear_attn_config")
    full = linear.sequence("full_attn_layers")
    if full is not None:
        indices = {fields.check("full_attn_layers", item, "layers") for item in full}
        fields.rules.append("layer kinds: linear_attn_config.full_attn_layers, counted from 1")
        kinds = ["full" if i + 1 in indices else "linear" for i in range(layers)]
    elif fields.has("layer_types") or info.layer_rule:
        kinds = windows.layer_kinds(fields, layers, info.model_type, info.layer_rule)
    else:
        raise ModelCorrupt("the config has neither linear_attn_config.full_attn_layers nor layer_types: which layers attend?")
    state = states.kda(fields, linear if linear.raw else fields)
    vector = mla.latent(fields)
    index = Index(kind=Kind.DSA_INDEXER, index_dim=fields.integer("index_head_dim")) if "indexed" in kinds else None
    owners = mla.indexer_owners(fields, layers) if index else [False] * layers
    fields.rules.append("full layers are MLA, never divided by tensor parallel")
    built: list[Layer] = []
    for i, kind in enumerate(kinds):
        if kind == "linear":
            built.append((state,))
        elif index is not None and kind == "indexed" and owners[i]:
            built.append((vector, index))
        else:
            built.append((vector,))
    drafts = fields.optional("num_nextn_predict_layers", limit="layers", minimum=0) or 0
    return Built(layers=built, drafts=[(vector,)] * min(drafts, 16), query_heads=heads, dsa=index is not None, head_split=state.heads)


def build_pure_state(fields: Fields, info: ClassInfo) -> Built:
    """Mamba, Falcon-Mamba, Mamba-2: no attention, so no bytes per token at all."""
    layers = layer_count(fields)
    state = states.mamba2(fields) if info.model_type == "mamba2" else states.mamba1(fields)
    fields.rules.append("no attention layers: 0 bytes per token, state only")
    return Built(layers=[(state,)] * layers, drafts=[], query_heads=1, head_split=state.heads)
