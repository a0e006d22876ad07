"""The header of a GGUF file, as a config. Metadata only: weights are counted by their declared shapes, never read.

Owns the bounds: sizes, counts and string lengths are checked before anything is allocated. Layout: ggml's GGUF specification, versions
2 and 3, little endian. llama.cpp keys become the names that the families read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvseal.core.errors import ModelCorrupt, ModelUnsupported

MAGIC = b"GGUF"
MAX_KEYS = 65536
MAX_TENSORS = 1 << 20
MAX_STRING_BYTES = 1 << 20
MAX_HEADER_BYTES = 256 * 2**20
MAX_KEPT_ITEMS = 8192

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPE_BITS = {
    0: 32.0, 1: 16.0, 2: 4.5, 3: 5.0, 6: 5.5, 7: 6.0, 8: 8.5, 9: 9.0, 10: 2.625, 11: 3.4375, 12: 4.5, 13: 5.5, 14: 6.5625, 15: 9.125,
    16: 2.0625, 17: 2.3125, 18: 3.0625, 19: 1.5625, 20: 4.5, 21: 3.4375, 22: 2.5625, 23: 4.25, 24: 8.0, 25: 16.0, 26: 32.0, 27: 64.0,
    28: 64.0, 29: 1.75, 30: 16.0, 34: 1.6875, 35: 2.0625, 39: 4.25,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    config: dict[str, Any]
    weight_bytes: int


class _Reader:
    """Bounded little-endian reads; a short file is an error that says so."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file = file
        self.name = name
        self.used = 0

    def take(self, size: int) -> bytes:
        self.used += size
        if self.used > MAX_HEADER_BYTES:
            raise ModelCorrupt(f"{self.name}: the GGUF header is larger than {MAX_HEADER_BYTES // 2**20} MiB")
        data = self.file.read(size)
        if len(data) != size:
            raise ModelCorrupt(f"{self.name}: the GGUF header is truncated")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, limit: int, what: str) -> int:
        value = int(self.number("Q"))
        if value > limit:
            raise ModelCorrupt(f"{self.name}: the GGUF header claims {value:,} {what}; at most {limit:,} make sense")
        return value

    def text(self) -> str:
        return self.take(self.count(MAX_STRING_BYTES, "bytes in a string")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        raise ModelCorrupt(f"{self.name}: value type {kind} is not part of GGUF")

    def array(self) -> Any:
        """Short arrays of numbers are kept; long ones (vocabularies) are walked over and counted."""
        kind, count = int(self.number("I")), self.count(1 << 26, "array items")
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind])
            data = self.take(size * count)
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", data)) if count <= MAX_KEPT_ITEMS else count
        if kind != _STRING:
            raise ModelCorrupt(f"{self.name}: arrays of type {kind} are not supported")
        for _ in range(count):
            self.take(self.count(MAX_STRING_BYTES, "bytes in a string"))
        return count


def read_gguf(path: Path) -> Header:
    """Metadata and weight bytes. Raises ModelCorrupt for a header that lies, ModelUnsupported for an unknown architecture."""
    with path.open("rb") as file:
        reader = _Reader(file, path.name)
        if reader.take(4) != MAGIC:
            raise ModelCorrupt(f"{path.name} is not a GGUF file")
        version = reader.number("I")
        if version not in (2, 3):
            raise ModelUnsupported(f"{path.name} is GGUF version {version}; versions 2 and 3 can be read")
        tensors, keys = reader.count(MAX_TENSORS, "tensors"), reader.count(MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = reader.text()
            metadata[key] = reader.value(int(reader.number("I")))
        size, names = 0, set()
        for _ in range(tensors):
            name, bits = _tensor(reader)
            size += bits // 8
            names.add(name)
    return Header(to_config(metadata, names, path.name), size)


def _tensor(reader: _Reader) -> tuple[str, int]:
    name = reader.text()
    dims = int(reader.number("I"))
    if dims > 8:
        raise ModelCorrupt(f"{reader.name}: tensor {name[:40]!r} claims {dims} dimensions")
    elements = 1
    for _ in range(dims):
        elements *= int(reader.number("Q"))
    kind = int(reader.number("I"))
    reader.number("Q")
    if elements > 1 << 50:
        raise ModelCorrupt(f"{reader.name}: tensor {name[:40]!r} is impossibly large")
    return name, int(elements * _TYPE_BITS.get(kind, 16.0))


_ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gpt2": "gpt2", "gptneox": "gpt_neox",
    "gpt-oss": "gpt_oss", "phi2": "phi", "phi3": "phi3", "falcon": "falcon", "falcon-h1": "falcon_h1", "deepseek2": "deepseek_v3",
    "mamba": "mamba", "mamba2": "mamba2", "jamba": "jamba", "lfm2": "lfm2", "command-r": "cohere", "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm", "granite": "granite", "granitemoe": "granitemoe", "olmo2": "olmo2", "smollm3": "smollm3", "bloom": "bloom",
    "internlm2": "internlm2", "glm4": "glm4", "glm4moe": "glm4_moe", "exaone": "exaone", "exaone4": "exaone4", "nemotron_h": "nemotron_h",
    "mistral": "mistral", "minimax-m2": "minimax_m2", "seed_oss": "seed_oss", "ernie4_5": "ernie4_5", "mistral3": "ministral3",
}  # fmt: skip


def to_config(metadata: dict[str, Any], tensors: set[str], name: str) -> dict[str, Any]:
    """llama.cpp's keys under the names that the families read."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelCorrupt(f"{name}: the header has no general.architecture")
    model_type = _ARCHITECTURES.get(arch)
    if model_type is None:
        raise ModelUnsupported(f"{name}: GGUF architecture {arch[:40]!r} is not one that this planner knows")

    def key(suffix: str) -> Any:
        return metadata.get(f"{arch}.{suffix}")

    names = {
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "hidden_size": key("embedding_length"),
        "head_dim": key("attention.key_length"),
        "v_head_dim": key("attention.value_length"),
        "intermediate_size": key("feed_forward_length"),
        "max_position_embeddings": key("context_length"),
        "sliding_window": key("attention.sliding_window"),
        "vocab_size": key("vocab_size") or metadata.get("tokenizer.ggml.tokens"),
        "n_routed_experts": key("expert_count"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
    }
    config: dict[str, Any] = {k: v for k, v in names.items() if isinstance(v, int | float | list) and not isinstance(v, bool)}
    config |= {"model_type": model_type, "torch_dtype": "float16", "tie_word_embeddings": "output.weight" not in tensors}
    _window_keys(config, key)
    if model_type.startswith("qwen3_"):
        _delta_keys(config, key)
    else:
        _state_keys(config, key, model_type)
    _latent_keys(config, key, model_type, tensors)
    return config


def _state_keys(config: dict[str, Any], key: Any, model_type: str) -> None:
    if key("ssm.conv_kernel") is None and model_type != "lfm2":
        return
    inner, heads = key("ssm.inner_size"), key("ssm.time_step_rank")
    pairs = {
        "mamba_d_conv": key("ssm.conv_kernel"),
        "mamba_d_state": key("ssm.state_size"),
        "mamba_d_ssm": inner,
        "conv_L_cache": key("shortconv.l_cache"),
    }
    if model_type in ("falcon_h1", "mamba2", "nemotron_h"):
        pairs |= {"mamba_n_heads": heads, "mamba_n_groups": key("ssm.group_count")}
    elif inner is not None:
        pairs |= {"intermediate_size": inner}
    config.update({k: v for k, v in pairs.items() if v is not None})
    per_layer = config.get("num_key_value_heads")
    if isinstance(per_layer, list):
        # Hybrids say 0 KV heads where a layer does not attend.
        config["layer_types"] = ["full_attention" if count else "conv" if model_type == "lfm2" else "mamba" for count in per_layer]
        config["num_key_value_heads"] = max(per_layer)


def _window_keys(config: dict[str, Any], key: Any) -> None:
    """A list of booleans says which layers slide; Gemma-4 has another head size there, and layers that share."""
    slides = key("attention.sliding_window_pattern")
    if isinstance(slides, list):
        config["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
    if key("attention.key_length_swa") is not None:
        config |= {"head_dim": key("attention.key_length_swa"), "global_head_dim": key("attention.key_length")}
    if key("attention.shared_kv_layers") is not None:
        config["num_kv_shared_layers"] = key("attention.shared_kv_layers")


def _delta_keys(config: dict[str, Any], key: Any) -> None:
    """Gated delta net under llama.cpp's state-space names."""
    heads, inner = key("ssm.time_step_rank"), key("ssm.inner_size")
    pairs = {
        "linear_num_key_heads": key("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key("ssm.state_size"),
        "linear_value_head_dim": inner // heads if isinstance(inner, int) and isinstance(heads, int) and heads > 0 else None,
        "linear_conv_kernel_dim": key("ssm.conv_kernel"),
        "full_attention_interval": key("full_attention_interval"),
        "num_nextn_predict_layers": key("nextn_predict_layers"),
    }
    config.update({name: value for name, value in pairs.items() if value is not None})
    drafts = config.get("num_nextn_predict_layers")
    if isinstance(drafts, int) and isinstance(config.get("num_hidden_layers"), int):
        config["num_hidden_layers"] -= drafts


def _latent_keys(config: dict[str, Any], key: Any, model_type: str, tensors: set[str]) -> None:
    """Files converted with MLA tensors (`attn_k_b`) keep one latent vector; older ones fall back to full heads."""
    if model_type != "deepseek_v3":
        return
    if key("attention.kv_lora_rank") is None:
        raise ModelCorrupt("a deepseek2 GGUF without attention.kv_lora_rank cannot be sized")
    if any("attn_k_b" in name for name in tensors):
        config |= {"kv_lora_rank": key("attention.kv_lora_rank"), "qk_rope_head_dim": key("rope.dimension_count")}
    else:
        heads = config.get("num_attention_heads")
        config |= {"model_type": "llama", "num_key_value_heads": heads}
