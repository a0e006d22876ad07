"""Parts that many families share: layer count, heads, KV heads, head size, ordinary attention layers.

Owns the key names of sizing note 1.2 and their order. MLA families do not use `head_dim` from here: in their files it is a decoy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvseal.core.errors import ModelCorrupt
from kvseal.plan.fields import Fields
from kvseal.plan.shape import Attention, Kind

LAYER_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "decoder_layers",
    "num_decoder_layers",
    "layers",
    "num_transformer_layers",
)
HEAD_KEYS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "attention_heads", "num_query_heads")
HIDDEN_KEYS = ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "model_dim")
KV_HEAD_KEYS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "n_kv_heads",
    "multi_query_group_num",
    "num_query_groups",
    "num_attention_groups",
)
NULL_IS_QUERY_HEADS = frozenset({"phi"})
"""Published files of this type (phi-1, phi-1.5) write null and mean full heads; anywhere else null is a broken file."""
HEAD_DIM_KEYS = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassInfo:
    """What is known of a model type besides its file."""

    model_type: str
    family: str
    layer_rule: dict[str, Any] | None


def layer_count(fields: Fields) -> int:
    return fields.integer(*LAYER_KEYS, limit="layers")


def query_heads(fields: Fields) -> int:
    value = fields.value(*HEAD_KEYS)
    if isinstance(value, list):
        counts = [fields.check("num_attention_heads", item, "heads") for item in value]
        if not counts:
            raise ModelCorrupt("the list of query heads is empty")
        return max(counts)
    return fields.integer(*HEAD_KEYS, limit="heads")


def kv_heads(fields: Fields, heads: int, layers: int, info: ClassInfo) -> list[int]:
    """KV heads of every layer. Null or absent follows the class; a list goes layer by layer."""
    if fields.boolean("multi_query") and not fields.boolean("new_decoder_architecture"):
        fields.rules.append("KV heads: 1 (multi_query)")
        return [1] * layers
    if "multi_query_attention" in fields.raw and not fields.boolean("multi_query_attention"):
        return [heads] * layers
    nested = fields.inner("attn_config").optional("kv_n_heads", limit="heads")
    value = nested if nested is not None else fields.value(*KV_HEAD_KEYS)
    if isinstance(value, list):
        counts = [fields.check("num_key_value_heads", item, "heads") for item in value]
        if len(counts) != layers:
            raise ModelCorrupt(f"the list of KV heads has {len(counts)} entries for {layers} layers")
        return counts
    if value is not None:
        count = nested or fields.integer(*KV_HEAD_KEYS, limit="heads")
        if heads % count:
            raise ModelCorrupt(f"{heads} query heads do not divide into {count} KV heads")
        return [count] * layers
    if any(fields.is_null(key) for key in KV_HEAD_KEYS) and info.model_type not in NULL_IS_QUERY_HEADS:
        raise ModelCorrupt(
            f"num_key_value_heads is null; it must be a whole number (as many as the {heads} query heads only if you write so)"
        )
    fields.note_default("num_key_value_heads", f"{heads} (as query heads)")
    return [heads] * layers


def head_dim(fields: Fields, heads: int) -> int:
    """The explicit key first; hidden / heads only when the file and the class have none."""
    for key in HEAD_DIM_KEYS:
        if fields.has(key) and fields.raw[key] != 0:
            return fields.check(key, fields.raw[key], "dim")
    default = fields.value(*(key for key in HEAD_DIM_KEYS if key not in fields.raw))
    if default:
        return fields.check("head_dim", default, "dim")
    hidden = fields.integer(*HIDDEN_KEYS)
    if hidden % heads:
        raise ModelCorrupt(f"there is no head_dim, and hidden size {hidden} does not divide by {heads} heads")
    fields.rules.append(f"head size: hidden / heads = {hidden // heads}")
    return hidden // heads


def attention(kind: str, kv_head_count: int, k_dim: int, v_dim: int, window_tokens: int | None) -> Attention:
    """A full layer when the window is off, whatever the list calls it."""
    real = {"full": Kind.FULL, "sliding": Kind.SLIDING, "chunked": Kind.CHUNKED}[kind]
    if real is Kind.SLIDING and window_tokens is None:
        real = Kind.FULL
    return Attention(
        kind=real, kv_heads=kv_head_count, k_dim=k_dim, v_dim=v_dim, window_tokens=window_tokens if real is not Kind.FULL else None
    )
