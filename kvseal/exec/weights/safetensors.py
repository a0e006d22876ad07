"""safetensors files and folders, read in place.

Owns the container format: the JSON header, the offsets, the index of a model in several files. Everything is checked before it is used.
Format: the safetensors README (8-byte little-endian header length, JSON header, tensors without gaps or overlaps).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvseal.core.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from kvseal.core.files import read_file
from kvseal.exec.weights.checkpoint import Checkpoint
from kvseal.exec.weights.source_file import SourceFile
from kvseal.exec.weights.types import TensorSource

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_ELEMENT_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F4": 4,
}  # fmt: skip
_READABLE = ("F32", "F16", "BF16")


def read_json(path: Path) -> dict[str, object]:
    """An object with unique keys. Raises ModelCorrupt, or ModelNotFound when the file cannot be read."""
    try:
        text = read_file(path)
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror}") from error
    return _parse(text, path)


def _parse(text: bytes, path: Path) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key appears twice in one object")
        return values

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path}: holds no JSON object")
    return value


def read_folder(folder: Path) -> Checkpoint:
    """All tensors of a folder: one `model.safetensors`, or the shards that the index names."""
    index = folder / INDEX_NAME
    if os.path.lexists(index):
        return _read_shards(folder, index)
    single = folder / SINGLE_NAME
    if os.path.lexists(single):  # Whatever else has this name is an error that says what it is.
        return read_safetensors(single)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pth", ".pt"))
    if any(name.endswith(".safetensors") for name in others):
        raise ModelCorrupt(f"{folder}: holds {others[0]} but neither {SINGLE_NAME} nor {INDEX_NAME}; the download is not complete")
    if others:
        raise ModelUnsupported(f"{folder}: the weights are pickled ({others[0]}); KVSeal reads safetensors and GGUF, which run no code")
    raise ModelCorrupt(f"{folder}: a configuration without weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there")


def _read_shards(folder: Path, index: Path) -> Checkpoint:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelCorrupt(f"{index}: weight_map is missing or empty")
    tensors: dict[str, TensorSource] = {}
    unsupported: dict[str, str] = {}
    names: set[str] = set()
    files: list[SourceFile] = []
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelCorrupt(f"{index}: {str(name)[:60]!r} is not the name of a safetensors file beside it")
        names.add(name)
    for name in sorted(names):
        if not os.path.lexists(folder / name):
            raise ModelCorrupt(f"{folder}: shard {name} is missing; the download is not complete")
        shard = read_safetensors(folder / name)
        for tensor in (*shard.tensors, *shard.unsupported):
            if weight_map.get(tensor) != name:
                raise ModelCorrupt(f"{folder / name}: holds tensor {tensor}, which {INDEX_NAME} does not place there")
        tensors.update(shard.tensors)
        unsupported.update(shard.unsupported)
        files += shard.files
    for tensor, name in weight_map.items():
        if tensor not in tensors and tensor not in unsupported:
            raise ModelCorrupt(f"{folder / str(name)}: tensor {tensor} is missing, although {INDEX_NAME} places it there")
    return Checkpoint(folder, tensors, unsupported, tuple(files))


def read_safetensors(path: Path) -> Checkpoint:
    """Maps one file. Raises ModelNotFound or ModelCorrupt."""
    try:
        source = SourceFile.open(path)
    except ValueError as error:
        raise ModelCorrupt(f"{path}: the file is empty") from error
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror}") from error
    buffer = source.buffer
    size = len(buffer)
    header_bytes = int.from_bytes(buffer[:8], "little") if size >= 8 else size
    if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > size:
        raise ModelCorrupt(f"{path}: the header claims {header_bytes} bytes of a file of {size}; cut short or not safetensors")
    header = _parse(buffer[8 : 8 + header_bytes], path)
    header.pop("__metadata__", None)
    return replace(_place(path, header, np.frombuffer(buffer, dtype=np.uint8)[8 + header_bytes :]), files=(source,))


def _place(path: Path, header: Mapping[str, object], data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Checkpoint:
    tensors: dict[str, TensorSource] = {}
    unsupported: dict[str, str] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        kind, shape, (start, end) = _entry(path, name, entry)
        count = 1
        for length in shape:
            count *= length
        if count * _ELEMENT_BITS.get(kind, 0) != 8 * (end - start) and kind in _ELEMENT_BITS:
            raise ModelCorrupt(f"{path}: tensor {name} of type {kind} and shape {list(shape)} cannot fill {end - start} bytes")
        if end > data.size:
            raise ModelCorrupt(f"{path}: tensor {name} ends at byte {end} of {data.size}; the file is cut short")
        spans.append((start, end, name))
        if kind in _READABLE and shape and count:
            tensors[name] = TensorSource(data[start:end], kind, shape)
        else:
            unsupported[name] = kind if kind not in _READABLE else f"{kind} without elements"
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            raise ModelCorrupt(f"{path}: tensor {name} starts at byte {start}, not at {position}: tensors overlap or leave a gap")
        position = end
    if position != data.size:
        raise ModelCorrupt(f"{path}: {data.size - position} bytes at the end belong to no tensor")
    return Checkpoint(path, tensors, unsupported)


def _entry(path: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    def whole(values: object) -> list[int] | None:
        if isinstance(values, list) and all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**48 for x in values):
            return values
        return None

    if isinstance(entry, dict):
        kind, shape, offsets = entry.get("dtype"), whole(entry.get("shape")), whole(entry.get("data_offsets"))
        if isinstance(kind, str) and shape is not None and offsets is not None and len(offsets) == 2 and offsets[0] <= offsets[1]:
            return kind, tuple(shape), (offsets[0], offsets[1])
    raise ModelCorrupt(f"{path}: the entry of tensor {name} lacks a valid dtype, shape or data_offsets")
