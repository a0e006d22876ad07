"""Layers that keep a constant number of bytes per sequence: Mamba, Mamba-2, GDN, KDA, short convolutions, lightning attention, RG-LRU.

Owns the element counts of sizing note 1.8. Source: MambaStateShapeCalculator in
https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/mamba/mamba_utils.py
"""

from __future__ import annotations

from typing import Any

from kvseal.core.errors import ModelCorrupt
from kvseal.plan.families.common import HIDDEN_KEYS
from kvseal.plan.fields import Fields
from kvseal.plan.shape import Kind, State

_DTYPE_BYTES = {"float32": 4, "fp32": 4, "float": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2}


def recurrent_dtype(fields: Fields, class_bytes: int | None = None) -> tuple[int, bool]:
    """Bytes per element of the recurrent state and whether somebody said so. Order: file, class, model dtype (16 bit)."""
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        text = fields.value(key)
        if isinstance(text, str) and text.removeprefix("torch.") in _DTYPE_BYTES:
            return _DTYPE_BYTES[text.removeprefix("torch.")], True
        if text not in (None, "auto"):
            raise ModelCorrupt(f"{fields.where}{key} is {str(text)[:30]!r}; it must be float32, bfloat16 or float16")
    if class_bytes is not None:
        fields.note_default("mamba_ssm_cache_dtype", f"{class_bytes * 8}-bit float (engine's rule for this class)")
        return class_bytes, True
    return 2, False


def mamba1(fields: Fields) -> State:
    hidden = fields.integer(*HIDDEN_KEYS)
    if fields.has("intermediate_size") and not fields.has("mamba_expand"):
        inner = fields.integer("intermediate_size")
    else:
        inner = fields.integer("mamba_expand", "expand", limit="count") * hidden
    size, known = recurrent_dtype(fields)
    return State(
        kind=Kind.MAMBA1,
        conv_columns=fields.integer("mamba_d_conv", "conv_kernel", "d_conv", limit="count") - 1,
        conv_channels=inner,
        heads=inner,
        recurrent_per_head=fields.integer("mamba_d_state", "state_size", "d_state"),
        recurrent_bytes=size,
        recurrent_dtype_known=known,
    )


def mamba2(fields: Fields, class_bytes: int | None = None) -> State:
    heads = fields.integer("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads", limit="heads")
    inner = fields.optional("mamba_d_ssm") or _mamba2_inner(fields, heads)
    dim = _mamba2_head_dim(fields, inner, heads)
    if fields.has("mamba_num_heads"):
        inner = heads * dim
    groups = fields.integer("n_groups", "mamba_n_groups", "mamba_ngroups", "n_group", limit="heads")
    state = fields.integer("ssm_state_size", "mamba_d_state", "state_size")
    size, known = recurrent_dtype(fields, class_bytes)
    return State(
        kind=Kind.MAMBA2,
        conv_columns=fields.integer("conv_kernel", "mamba_d_conv", limit="count") - 1,
        conv_channels=inner,
        groups=groups,
        group_channels=2 * state,
        heads=heads,
        recurrent_per_head=dim * state,
        recurrent_bytes=size,
        recurrent_dtype_known=known,
    )


def _mamba2_inner(fields: Fields, heads: int) -> int:
    if fields.has("mamba_num_heads") or "mamba_num_heads" in fields.class_defaults:
        return heads * fields.integer("mamba_head_dim")
    return fields.integer("mamba_expand", "expand", limit="count") * fields.integer(*HIDDEN_KEYS)


def _mamba2_head_dim(fields: Fields, inner: int, heads: int) -> int:
    for key in ("mamba_head_dim", "mamba_d_head", "mamba_headdim"):
        if fields.has(key) and fields.raw[key] != "auto":
            return fields.integer(key)
    if inner % heads:
        raise ModelCorrupt(f"the Mamba-2 inner size {inner} does not divide by its {heads} heads")
    return inner // heads


def gdn(fields: Fields) -> State:
    k_heads = fields.integer("linear_num_key_heads", limit="heads")
    v_heads = fields.integer("linear_num_value_heads", limit="heads")
    k_dim, v_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    size, known = recurrent_dtype(fields)
    return State(
        kind=Kind.GDN,
        conv_columns=fields.integer("linear_conv_kernel_dim", limit="count") - 1,
        conv_channels=2 * k_heads * k_dim + v_heads * v_dim,
        heads=v_heads,
        recurrent_per_head=v_dim * k_dim,
        recurrent_bytes=size,
        recurrent_dtype_known=known,
    )


def kda(fields: Fields, linear: Fields) -> State:
    """Kimi delta attention; `linear` is the nested `linear_attn_config` or the flat fields."""
    heads = linear.integer("linear_num_heads", "num_heads", limit="heads")
    dim = linear.integer("linear_head_dim", "head_dim")
    k_heads = linear.optional("num_k_heads", limit="heads") or heads
    k_dim = linear.optional("head_k_dim") or dim
    size, known = recurrent_dtype(fields, class_bytes=4)
    return State(
        kind=Kind.KDA,
        conv_columns=linear.integer("short_conv_kernel_size", "linear_conv_kernel_dim", limit="count", fallback=4) - 1,
        conv_channels=heads * dim + 2 * k_heads * k_dim,
        heads=heads,
        recurrent_per_head=dim * dim,
        recurrent_bytes=size,
        recurrent_dtype_known=known,
    )


def short_conv(fields: Fields) -> State:
    dim = fields.optional("conv_dim") or fields.integer(*HIDDEN_KEYS)
    return State(kind=Kind.SHORT_CONV, conv_columns=fields.integer("conv_L_cache", limit="count") - 1, conv_channels=dim)


def lightning(heads: int, dim: int, fields: Fields) -> State:
    size, known = recurrent_dtype(fields)
    return State(
        kind=Kind.LIGHTNING,
        conv_columns=0,
        conv_channels=0,
        heads=heads,
        recurrent_per_head=dim * dim,
        recurrent_bytes=size,
        recurrent_dtype_known=known,
    )


def rg_lru(fields: Fields) -> State:
    width = fields.optional("lru_width") or fields.integer(*HIDDEN_KEYS)
    columns = fields.integer("conv1d_width", limit="count") - 1
    return State(
        kind=Kind.RG_LRU,
        conv_columns=columns,
        conv_channels=width,
        heads=width,
        recurrent_per_head=1,
        recurrent_bytes=4,
        recurrent_dtype_known=True,
    )


def elements_at(state: State, tensor_parallel: int, speculative_tokens: int = 0) -> tuple[int, int]:
    """Convolution and recurrent elements of one layer on one rank.

    Groups that do not divide by tensor parallel are replicated, as vLLM does. Raises ModelCorrupt when heads or channels do not divide.
    """
    groups = state.groups
    if groups and groups % tensor_parallel:
        groups = groups + tensor_parallel - groups if tensor_parallel > groups else groups
    channels = state.conv_channels + groups * state.group_channels
    for what, count in (("channels", channels), ("heads", state.heads)):
        if count % tensor_parallel:
            raise ModelCorrupt(f"{count} {state.kind} {what} do not divide by tensor parallel {tensor_parallel}")
    columns = state.conv_columns
    if state.conv_columns and state.kind not in (Kind.MAMBA1, Kind.RG_LRU):
        columns += speculative_tokens
    return columns * channels // tensor_parallel, state.heads * state.recurrent_per_head // tensor_parallel


def describe(state: State) -> dict[str, Any]:
    return {"conv_elements": state.conv_elements, "recurrent_elements": state.recurrent_elements}
