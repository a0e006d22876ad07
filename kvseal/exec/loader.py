"""A path becomes `ModelWeights`.

Owns the choice between the two layouts: a folder as Hugging Face lays it out, or one GGUF file. Never fetches anything, never copies
weights, and never serves a model that it does not fully understand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvseal.core.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from kvseal.exec.families.fields import Fields
from kvseal.exec.families.gguf import architecture_of, spec_from_gguf
from kvseal.exec.families.huggingface import spec_from_config
from kvseal.exec.families.tensors import Parts, from_gguf, from_huggingface
from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.checkpoint import Checkpoint, TensorTaker
from kvseal.exec.weights.digest import weights_digest
from kvseal.exec.weights.gguf import read_gguf
from kvseal.exec.weights.safetensors import read_folder, read_json
from kvseal.exec.weights.types import ModelWeights


def load_model(path: Path, *, context_tokens: int | None = None) -> ModelWeights:
    """Maps the weights and reads the architecture; tensors stay on disk until used.

    `context_tokens`: the context that the operator asked for, which only LongRoPE models look at (`families.rope.from_config`).
    Raises ModelNotFound, ModelCorrupt or ModelUnsupported, naming the file and the key or tensor.
    """
    if path.is_dir():
        return _load_folder(path, context_tokens)
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or folder; give a folder in Hugging Face layout or a .gguf file")
    if path.suffix == ".safetensors":
        raise ModelUnsupported(f"{path}: weights without their configuration; give the folder that holds config.json and this file")
    return _load_gguf(path, context_tokens)


def _load_gguf(path: Path, context_tokens: int | None) -> ModelWeights:
    file = read_gguf(path)
    fields = Fields(file.metadata, str(path))
    taker = TensorTaker(file.checkpoint)
    spec = spec_from_gguf(fields, taker, context_tokens=context_tokens)
    _, architecture = architecture_of(fields)
    return _assemble(spec, file.checkpoint, from_gguf(spec, taker, architecture))


def _load_folder(folder: Path, context_tokens: int | None) -> ModelWeights:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ModelNotFound(f"{folder}: cannot be read: {error.strerror}") from error
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" not in names:
        if ggufs:
            raise ModelNotFound(f"{folder}: no config.json; to serve a GGUF file name the file itself, e.g. {folder / ggufs[0]}")
        if not names:
            raise ModelNotFound(f"{folder}: the folder is empty")
        raise ModelNotFound(f"{folder}: no config.json; a folder in Hugging Face layout holds config.json and model.safetensors")
    if ggufs and any(name.endswith(".safetensors") for name in names):
        raise ModelUnsupported(f"{folder}: holds both safetensors and {ggufs[0]}; name the GGUF file itself, or move it elsewhere")
    spec = read_spec(folder, context_tokens=context_tokens)
    checkpoint = read_folder(folder)
    return _assemble(spec, checkpoint, from_huggingface(spec, checkpoint, fused=spec.family == "phi3"))


def read_spec(folder: Path, *, context_tokens: int | None = None) -> ModelSpec:
    """The architecture of a folder in Hugging Face layout, without looking for weights."""
    config = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = Fields(read_json(generation_path), str(generation_path)) if os.path.lexists(generation_path) else None
    return spec_from_config(Fields(config, str(folder / "config.json")), generation, context_tokens=context_tokens)


def spec_of_config(config: Mapping[str, object], where: str = "config.json") -> ModelSpec:
    """The architecture that an already parsed config.json describes."""
    return spec_from_config(Fields(config, where))


def _assemble(spec: ModelSpec, checkpoint: Checkpoint, parts: Parts) -> ModelWeights:
    embedding, lm_head, final_norm, layers = parts
    for token in (*spec.eos_tokens, *([] if spec.bos_token is None else [spec.bos_token])):
        if token >= spec.vocab_size:
            raise ModelCorrupt(f"{checkpoint.path}: special token {token} is outside the vocabulary of {spec.vocab_size}")
    return ModelWeights(
        spec=spec,
        embedding=embedding,
        lm_head=lm_head,
        final_norm=final_norm,
        layers=layers,
        digest=weights_digest(spec, checkpoint),
        bytes=checkpoint.total_bytes,
        files=checkpoint.files,
    )
