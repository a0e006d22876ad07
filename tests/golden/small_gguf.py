"""Writes GGUF files for tests: any metadata, any tensors, and the same weights as a case of `small_models`."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from golden.small_models import random_tensor, rounded

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
Tensor = tuple[int, tuple[int, ...], bytes]
"""Type id, shape (rows, columns), bytes."""


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: object) -> bytes:
    """Type id and content of one metadata value."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, Sequence):
        inner = [value(x) for x in item]
        kind = inner[0][:4] if inner else struct.pack("<I", 4)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(inner)) + b"".join(x[4:] for x in inner)
    raise TypeError(type(item))


def gguf_bytes(metadata: Mapping[str, object], tensors: Mapping[str, Tensor], *, version: int = 3, alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    offset, body = 0, b""
    for name, (kind, shape, raw) in tensors.items():
        head += (
            string(name)
            + struct.pack("<I", len(shape))
            + struct.pack(f"<{len(shape)}Q", *reversed(shape))
            + struct.pack("<IQ", kind, offset)
        )
        padded = raw + bytes(-len(raw) % alignment)
        body, offset = body + padded, offset + len(padded)
    return head + bytes(-len(head) % alignment) + body


def q8_0(values: np.ndarray) -> bytes:
    """Quantised as ggml does: the scale is the largest magnitude of 32 over 127."""
    groups = values.reshape(-1, 32)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype("<f2")
    integers = np.rint(groups / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), integers.view(np.uint8)], axis=1).tobytes()


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows (head, half, i) in the order (head, i, half): how GGUF stores q and k of the llama kind."""
    head_dim = values.shape[0] // heads
    return values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)


_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, part = name.split(".", 3)
    stem, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{_PARTS[stem]}.{kind}"


def case_tensors(case: Mapping[str, object], *, permuted: bool, matrix_type: str = "F32") -> dict[str, Tensor]:
    config: Mapping[str, int] = case["config"]  # type: ignore[assignment]
    tensors: dict[str, Tensor] = {}
    for name, shape in case["tensors"]:  # type: ignore[attr-defined]
        values = rounded(random_tensor(int(case["seed"]), name, tuple(shape)), str(case["dtype"]))  # type: ignore[call-overload]
        if permuted and ".q_proj." in name:
            values = interleaved(values, config["num_attention_heads"])
        if permuted and ".k_proj." in name:
            values = interleaved(values, config["num_key_value_heads"])
        quantised = matrix_type == "Q8_0" and len(shape) == 2
        raw = q8_0(values) if quantised else values.astype("<f4").tobytes()
        tensors[gguf_name(name)] = (TYPE_IDS["Q8_0" if quantised else "F32"], tuple(shape), raw)
    return tensors


def case_metadata(case: Mapping[str, object], architecture: str) -> dict[str, object]:
    """What the converters write for a plain configuration; scaling keys are the test's to add."""
    config: Mapping[str, object] = case["config"]  # type: ignore[assignment]
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": float(str(config["rms_norm_eps"])),
        f"{architecture}.rope.freq_base": float(str(config.get("rope_theta", 10_000.0))),
        f"{architecture}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if config.get("head_dim"):
        metadata[f"{architecture}.attention.key_length"] = metadata[f"{architecture}.attention.value_length"] = config["head_dim"]
    return metadata


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Tensor], **options: int) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path
