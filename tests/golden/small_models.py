"""Small random checkpoints, the same on every machine, written as real files: what the golden tests load and what the fixtures were
computed with. Needs NumPy alone.

Weights come from NumPy's legacy generator, whose streams are frozen, seeded by case and tensor name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
_NUMPY_TO_SAFETENSORS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def random_tensor(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 of unit-sized effect: norms around 1, biases of half a unit, matrices that keep the size of what they multiply."""
    source = np.random.RandomState(zlib.crc32(f"{seed}|{name}".encode()))
    values = source.standard_normal(shape)
    if "norm" in name:
        values = 1.0 + 0.3 * values
    elif name.endswith("bias"):
        values = 0.5 * values
    else:
        values = values * (1.0 if "embed" in name else 1.4 / np.sqrt(shape[-1]))
    return values.astype(np.float32)


def random_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    return [int(x) for x in np.random.RandomState(seed).randint(0, vocab_size, size=count)]


def to_bytes(values: np.ndarray, dtype: str) -> bytes:
    """Stored form; bf16 is rounded to the nearest, ties to even."""
    if dtype == "fp16":
        return values.astype("<f2").tobytes()
    if dtype == "bf16":
        bits = values.astype("<f4").view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype("<f4").tobytes()


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What a reader of the stored form sees, as float32."""
    raw = to_bytes(values, dtype)
    if dtype == "bf16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    return np.frombuffer(raw, "<f2" if dtype == "fp16" else "<f4").astype(np.float32).reshape(values.shape)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """name -> (safetensors dtype, shape, bytes)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(raw)]}
        position += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(raw for _, _, raw in tensors.values()))


def write_folder(folder: Path, case: Mapping[str, object], *, shards: int = 1) -> None:
    """config.json and weights of a case from cases.json, as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    if case.get("generation_config"):
        (folder / "generation_config.json").write_text(json.dumps(case["generation_config"]))
    dtype, seed = str(case["dtype"]), int(case["seed"])  # type: ignore[call-overload]
    stored = {}
    for name, shape in case["tensors"]:  # type: ignore[attr-defined]
        values = random_tensor(seed, name, tuple(shape))
        stored[name] = (_NUMPY_TO_SAFETENSORS[dtype], tuple(shape), to_bytes(values, dtype))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", stored)
        return
    weight_map = {}
    for index in range(shards):
        name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(stored.items())[index::shards])
        weight_map.update(dict.fromkeys(part, name))
        write_safetensors(folder / name, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def cases() -> list[dict[str, object]]:
    """The cases of fixtures/cases.json: name, config, dtype, seed, tensors, tokens, positions."""
    loaded: list[dict[str, object]] = json.loads((FIXTURES / "cases.json").read_text())["cases"]
    return loaded


def expected_logits(name: str) -> np.ndarray:
    """[positions, vocab_size] float32, computed by transformers."""
    with np.load(FIXTURES / "logits.npz") as stored:
        return stored[name]
