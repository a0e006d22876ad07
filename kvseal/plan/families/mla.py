"""Multi-head latent attention, with and without a sparse indexer, and DeepSeek-V4's compressed attention.

One vector per token and layer, the same on every tensor-parallel rank (sizing note 1.5 to 1.7). `head_dim` in these files is a decoy.
Sources: https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/models/deepseek_v2.py , vllm/models/deepseek_v4.
"""

from __future__ import annotations

from kvseal.core.errors import ModelCorrupt
from kvseal.plan.families.common import ClassInfo, layer_count, query_heads
from kvseal.plan.families.parts import Built
from kvseal.plan.fields import Fields
from kvseal.plan.shape import Compressed, Index, Kind, Latent, Layer


def latent(fields: Fields) -> Latent:
    return Latent(latent_dim=fields.integer("kv_lora_rank"), rope_dim=fields.integer("qk_rope_head_dim", minimum=0))


def build(fields: Fields, info: ClassInfo) -> Built:
    """DeepSeek V2/V3, Kimi-K2, GLM-4.7-Flash, MiniCPM3, Mistral Large 3; indexer layers when the file has an `index_topk`."""
    layers, heads = layer_count(fields), query_heads(fields)
    vector = latent(fields)
    fields.rules.append("MLA: kv_lora_rank + qk_rope_head_dim per token and layer, no heads, never divided by tensor parallel")
    dsa = fields.value("index_topk") is not None and fields.value("index_head_dim") is not None
    owners = indexer_owners(fields, layers) if dsa else [False] * layers
    index = Index(kind=Kind.DSA_INDEXER, index_dim=fields.integer("index_head_dim")) if dsa else None
    built: list[Layer] = [(vector, index) if index is not None and owners[i] else (vector,) for i in range(layers)]
    draft: Layer = (vector, index) if index is not None else (vector,)
    drafts = fields.optional("num_nextn_predict_layers", limit="layers", minimum=0) or 0
    return Built(layers=built, drafts=[draft] * min(drafts, 16), query_heads=heads, dsa=dsa)


def build_longcat(fields: Fields, info: ClassInfo) -> Built:
    """LongCat-Flash: each layer runs two attentions, so it owns two latent caches."""
    layers, heads = layer_count(fields), query_heads(fields)
    vector = latent(fields)
    fields.rules.append("LongCat-Flash: two MLA attentions per layer")
    drafts = fields.optional("num_nextn_predict_layers", limit="layers", minimum=0) or 0
    return Built(layers=[(vector, vector)] * layers, drafts=[(vector,)] * drafts, query_heads=heads)


def indexer_owners(fields: Fields, layers: int) -> list[bool]:
    """Which layers own an indexer: `indexer_types`, else the pattern, else frequency and offset, else all (the class rule)."""
    words = fields.sequence("indexer_types")
    pattern = fields.raw.get("index_topk_pattern")
    if words is not None:
        fields.rules.append("indexer layers: indexer_types")
        owners = [_owner(word, "indexer_types") for word in words]
    elif isinstance(pattern, str | list) and pattern:
        fields.rules.append("indexer layers: index_topk_pattern")
        owners = [_owner(word, "index_topk_pattern") for word in pattern]
    else:
        freq = fields.optional("index_topk_freq", limit="layers") or 1
        offset = fields.optional("index_skip_topk_offset", limit="layers", minimum=0)
        offset = 2 if offset is None else offset
        fields.rules.append("indexer layers: all" if freq == 1 else f"indexer layers: every {freq}th from {offset} (index_topk_freq)")
        return [max(i - offset + 1, 0) % freq == 0 for i in range(layers)]
    if len(owners) < layers:
        raise ModelCorrupt(f"the indexer list has {len(owners)} entries for {layers} layers")
    return owners[:layers]


def _owner(word: object, key: str) -> bool:
    if word in ("full", "F", "f"):
        return True
    if word in ("shared", "S", "s"):
        return False
    raise ModelCorrupt(f"{key} holds {str(word)[:20]!r}; it must hold full and shared (F and S)")


_V4_WORDS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128, "sliding_attention": 0, "full_attention": 0}


def build_v4(fields: Fields, info: ClassInfo) -> Built:
    """DeepSeek-V4: a sliding cache everywhere, ratio 4 with an indexer, ratio 128 without. The list may be longer by the MTP layer."""
    layers, heads = layer_count(fields), query_heads(fields)
    ratios = _v4_ratios(fields, layers)
    window = fields.integer("sliding_window", limit="tokens")
    dim, rope = fields.integer("head_dim"), fields.integer("qk_rope_head_dim", fallback=64)
    index = fields.integer("index_head_dim")
    made = [
        Compressed(ratio=ratio, window_tokens=window, head_dim=dim, rope_dim=rope, index_dim=index if ratio == 4 else 0) for ratio in ratios
    ]
    drafts = fields.optional("num_nextn_predict_layers", limit="layers", minimum=0) or 0
    fields.rules.append("DeepSeek-V4: compress_ratios per layer; ratio 4 has an indexer, every layer has a sliding cache")
    built: list[Layer] = [(cache,) for cache in made[:layers]]
    draft = Compressed(ratio=0, window_tokens=window, head_dim=dim, rope_dim=rope, index_dim=0)
    return Built(layers=built, drafts=[(draft,)] * min(drafts, 16), query_heads=heads, dsa=True)


def _v4_ratios(fields: Fields, layers: int) -> list[int]:
    listed = fields.sequence("compress_ratios")
    words = fields.sequence("layer_types")
    if listed is not None:
        ratios = [fields.check("compress_ratios", item, "tokens", minimum=0) for item in listed]
    elif words is not None:
        if any(word not in _V4_WORDS for word in words):
            raise ModelCorrupt(f"layer_types of DeepSeek-V4 must be among {', '.join(_V4_WORDS)}")
        ratios = [_V4_WORDS[word] for word in words]
    else:
        fields.note_default("layer_types", "two heavily compressed layers, then alternating (class rule)")
        ratios = [128 if i < 2 or i % 2 == 0 else 4 for i in range(layers)]
    if len(ratios) < layers:
        raise ModelCorrupt(f"compress_ratios has {len(ratios)} entries for {layers} layers")
    if any(ratio not in (0, 1, 4, 128) for ratio in ratios[:layers]):
        raise ModelCorrupt("compress_ratios may hold 0, 1, 4 and 128; other ratios have no published layout")
    return ratios[:layers]
