"""One GGUF file becomes a folder as Hugging Face lays it out, in float32: what the peers' own exporters read.

Owns the export: dequantised weights in one safetensors file, config.json, and the tokenizer. Uses KVSeal's own readers and NumPy, nothing
of torch. Never changes a weight: what a quantised tensor stands for is what is written. Only architectures that are a plain llama.
Format: the safetensors README (8-byte little-endian header length, JSON header, tensors without gaps).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvseal.core.errors import ModelUnsupported
from kvseal.exec.loader import load_model
from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.gguf import read_gguf
from kvseal.exec.weights.types import LayerWeights, ModelWeights, TensorSource
from kvseal.serve.tokenizer_files import load_tokenizer

Float32 = npt.NDArray[np.float32]
Tensor = tuple[str, tuple[int, ...], Callable[[], Float32]]
"""Name, shape, and how to get the values: one tensor is in memory at a time."""


def export_folder(model: Path, folder: Path) -> None:
    """Writes `folder` (complete or not at all) from the GGUF file `model`. Raises ModelUnsupported for what is no plain llama."""
    weights = load_model(model)
    config = hugging_face_config(weights.spec, _rope_base(model))
    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    write_safetensors(part / "model.safetensors", list(_tensors(weights)))
    _write_json(part / "config.json", config)
    special = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    _write_json(part / "generation_config.json", {f"{name}_token_id": value for name, value in special.items()})
    _write_tokenizer(model, part)
    part.rename(folder)


def hugging_face_config(spec: ModelSpec, rope_base: float) -> dict[str, object]:
    """config.json of a llama. Raises ModelUnsupported when `spec` computes anything that a plain llama does not."""
    oddities = {
        "family": spec.family != "llama",
        "rope scaling": spec.rope.scaling != "none",
        "sliding windows": any(spec.windows),
        "layers without rotation": any(spec.nope_layers),
        "multipliers": (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_divisor) != (1.0, 1.0, 1.0),
        "normalised queries and keys": spec.qk_norm,
        "biases": spec.q_k_v_bias or spec.o_bias or spec.mlp_bias,
    }
    odd = [name for name, present in oddities.items() if present]
    if odd:
        raise ModelUnsupported(f"the peers get a plain llama only; this model has its own {', '.join(odd)}")
    end = spec.eos_tokens[0] if spec.eos_tokens else spec.vocab_size - 1
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.context_tokens,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_base},
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": end if spec.bos_token is None else spec.bos_token,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": "float32",
    }


def write_safetensors(path: Path, tensors: list[Tensor]) -> None:
    """float32 tensors, one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, _ in tensors:
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape, values in tensors:
            array = np.ascontiguousarray(values(), dtype="<f4")
            if array.shape != shape:
                raise ModelUnsupported(f"{name} has shape {array.shape} and should have {shape}")
            array.tofile(file)


def _tensors(weights: ModelWeights) -> Iterator[Tensor]:
    yield _of("model.embed_tokens.weight", weights.embedding)
    for index, layer in enumerate(weights.layers):
        yield from _layer(f"model.layers.{index}", layer)
    yield _norm("model.norm.weight", weights.final_norm)
    if weights.lm_head is not None:
        yield _of("lm_head.weight", weights.lm_head)


def _layer(prefix: str, layer: LayerWeights) -> Iterator[Tensor]:
    attention = {"q": layer.q, "k": layer.k, "v": layer.v, "o": layer.o}
    for name, source in attention.items():
        yield _of(f"{prefix}.self_attn.{name}_proj.weight", source)
    for name, source in {"gate": layer.gate, "up": layer.up, "down": layer.down}.items():
        yield _of(f"{prefix}.mlp.{name}_proj.weight", source)
    yield _norm(f"{prefix}.input_layernorm.weight", layer.attn_norm)
    yield _norm(f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm)


def _of(name: str, source: TensorSource) -> Tensor:
    return name, source.shape, source.to_float32


def _norm(name: str, values: Float32) -> Tensor:
    return name, values.shape, lambda: values


def _rope_base(model: Path) -> float:
    base = read_gguf(model).metadata.get("llama.rope.freq_base", 10_000.0)
    if not isinstance(base, int | float):
        raise ModelUnsupported(f"{model}: llama.rope.freq_base is no number")
    return float(base)


def _write_tokenizer(model: Path, folder: Path) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.core.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= dict(tokenizer.special_texts)
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
