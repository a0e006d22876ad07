"""The safetensors container: what it says, and every way in which it can lie."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from golden.small_models import write_safetensors

from kvseal.core.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from kvseal.exec.weights.checkpoint import TensorTaker
from kvseal.exec.weights.safetensors import INDEX_NAME, SINGLE_NAME, read_folder, read_safetensors

VALUES = np.arange(6, dtype=np.float32)


def file_of(header: object, data: bytes = b"", *, claim: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if claim is None else claim).to_bytes(8, "little") + text + data


def tensor(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / SINGLE_NAME
    path.write_bytes(raw)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    half = VALUES.astype("<f2").tobytes()
    brain = (VALUES.view("<u4") >> 16).astype("<u2").tobytes()
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("F32", (2, 3), VALUES.tobytes()), "b": ("F16", (6,), half), "c": ("BF16", (3, 2), brain)})
    tensors = read_safetensors(path).tensors
    for name, shape in (("a", (2, 3)), ("b", (6,)), ("c", (3, 2))):
        assert tensors[name].to_float32().tolist() == VALUES.reshape(shape).tolist()
    assert not tensors["a"].raw.flags.owndata


def test_every_truncation_is_found(tmp_path: Path) -> None:
    raw = file_of({"a": tensor(0, 24, [2, 3]), "__metadata__": {"x": "y"}}, VALUES.tobytes())
    read_safetensors(write(tmp_path, raw))
    for length in range(len(raw)):
        with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
            read_safetensors(write(tmp_path, raw[:length]))


CORRUPT = {
    "an endless header": (file_of({}, claim=2**63), "the header claims"),
    "a header beyond the limit": (file_of({}, claim=100_000_001), "the header claims"),
    "broken JSON": (file_of(b'{"a":'), "not valid JSON"),
    "nested without end": (file_of(b"[" * 200_000), "not valid JSON"),
    "invalid UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (file_of([]), "no JSON object"),
    "a name twice": (file_of(b'{"a": {}, "a": {}}'), "appears twice"),
    "no dtype": (file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "tensor a lacks"),
    "a negative shape": (file_of({"a": tensor(0, 4, [-1])}, bytes(4)), "tensor a lacks"),
    "a shape of floats": (file_of({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(4)), "tensor a lacks"),
    "a shape of booleans": (file_of({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4)), "tensor a lacks"),
    "one offset": (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4)), "tensor a lacks"),
    "offsets backwards": (file_of({"a": tensor(4, 0, [1])}, bytes(4)), "tensor a lacks"),
    "a shape that does not fill": (file_of({"a": tensor(0, 8, [3])}, bytes(8)), "cannot fill"),
    "an absurd shape": (file_of({"a": tensor(0, 4, [2**40, 2**40])}, bytes(4)), "cannot fill"),
    "past the end": (file_of({"a": tensor(0, 8, [2])}, bytes(4)), "ends at byte 8 of 4"),
    "an overlap": (file_of({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12)), "tensor b starts at byte 4"),
    "a gap": (file_of({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, bytes(12)), "tensor b starts at byte 8"),
    "bytes left over": (file_of({"a": tensor(0, 4, [1])}, bytes(12)), "8 bytes at the end"),
}


@pytest.mark.parametrize("what", CORRUPT)
def test_a_lying_file_is_corrupt(what: str, tmp_path: Path) -> None:
    raw, message = CORRUPT[what]
    with pytest.raises(ModelCorrupt, match=message):
        read_safetensors(write(tmp_path, raw))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I64", "F64"])
def test_a_foreign_dtype_is_named(dtype: str, tmp_path: Path) -> None:
    size = {"F8_E4M3": 1, "I64": 8, "F64": 8}[dtype]
    checkpoint = read_safetensors(write(tmp_path, file_of({"layer.w": tensor(0, 4 * size, [4], dtype)}, bytes(4 * size))))
    with pytest.raises(ModelUnsupported, match=rf"layer\.w is stored as {dtype}"):
        TensorTaker(checkpoint).take("layer.w", (4,))


def shard(tmp_path: Path, name: str, tensors: dict[str, np.ndarray]) -> None:
    write_safetensors(tmp_path / name, {key: ("F32", values.shape, values.tobytes()) for key, values in tensors.items()})


def index(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", {"x": VALUES})
    shard(tmp_path, "b.safetensors", {"y": VALUES})
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    assert set(read_folder(tmp_path).tensors) == {"x", "y"}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", {"x": VALUES})
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(ModelCorrupt, match=r"shard b\.safetensors is missing"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "a.bin", 7, ""])
def test_shards_lie_beside_the_index(name: object, tmp_path: Path) -> None:
    index(tmp_path, {"x": name})
    with pytest.raises(ModelCorrupt, match="not the name of a safetensors file"):
        read_folder(tmp_path)


def test_shard_and_index_must_agree(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", {"x": VALUES, "extra": VALUES})
    index(tmp_path, {"x": "a.safetensors"})
    with pytest.raises(ModelCorrupt, match="holds tensor extra"):
        read_folder(tmp_path)
    shard(tmp_path, "a.safetensors", {"x": VALUES})
    index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(ModelCorrupt, match="tensor y is missing"):
        read_folder(tmp_path)
    for empty in ({}, [], None):
        index(tmp_path, empty)
        with pytest.raises(ModelCorrupt, match="weight_map"):
            read_folder(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match="without weights"):
        read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelUnsupported, match="pickled"):
        read_folder(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ModelCorrupt, match="not complete"):
        read_folder(tmp_path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="cannot be read"):
        read_safetensors(tmp_path / "missing.safetensors")
