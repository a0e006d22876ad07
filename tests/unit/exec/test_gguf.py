"""The GGUF container: what it says, and every way in which it can lie."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from golden.small_gguf import TYPE_IDS, gguf_bytes, string

from kvseal.core.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from kvseal.exec.weights.gguf import read_gguf
from kvseal.exec.weights.gguf_header import StringArray

VALUES = np.arange(6, dtype=np.float32)
METADATA = {
    "general.architecture": "llama",
    "a.count": 7,
    "a.flag": True,
    "a.ratio": 0.5,
    "a.words": ["x", "äö", ""],
    "a.numbers": [1, 2, 3],
}
TENSORS = {"one": (TYPE_IDS["F32"], (2, 3), VALUES.tobytes()), "two": (TYPE_IDS["Q8_0"], (1, 32), bytes(34))}


def write(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_good_file(version: int, tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path, gguf_bytes(METADATA, TENSORS, version=version)))
    assert file.version == version
    assert {key: file.metadata[key] for key in ("general.architecture", "a.count", "a.flag", "a.ratio")} == {
        "general.architecture": "llama",
        "a.count": 7,
        "a.flag": True,
        "a.ratio": 0.5,
    }
    words, numbers = file.metadata["a.words"], file.metadata["a.numbers"]
    assert isinstance(words, StringArray)
    assert len(words) == 3
    assert words.decode() == ["x", "äö", ""]
    assert isinstance(numbers, np.ndarray)
    assert numbers.tolist() == [1, 2, 3]
    assert file.checkpoint.tensors["one"].to_float32().tolist() == VALUES.reshape(2, 3).tolist()
    assert file.checkpoint.tensors["two"].shape == (1, 32)
    assert file.checkpoint.total_bytes == 24 + 34


def test_another_alignment(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes(METADATA | {"general.alignment": 64}, TENSORS, alignment=64))
    assert read_gguf(path).checkpoint.tensors["one"].to_float32().tolist() == VALUES.reshape(2, 3).tolist()


def test_every_truncation_is_found(tmp_path: Path) -> None:
    """Cut anywhere, the file is refused: never an exception of another kind, never a short read."""
    raw = gguf_bytes(METADATA, TENSORS)
    end = len(raw) - 30  # the padding behind the last tensor may be missing
    for length in range(end):
        with pytest.raises(ModelCorrupt, match=r"model\.gguf"):
            read_gguf(write(tmp_path, raw[:length]))


def test_every_flipped_byte_of_the_header_is_survived(tmp_path: Path) -> None:
    raw = gguf_bytes(METADATA, TENSORS)
    survived = 0
    for at in range(len(raw) - 64 - 34):
        for value in (0x00, 0xFF, raw[at] ^ 0x80):
            try:
                read_gguf(write(tmp_path, raw[:at] + bytes([value]) + raw[at + 1 :]))
                survived += 1
            except (ModelCorrupt, ModelUnsupported):
                pass
    assert survived > 0


def header(version: int = 3, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset)
    )


CORRUPT = {
    "another format": (b"GGML" + bytes(60), "not a GGUF file"),
    "empty": (b"", "empty"),
    "more tensors than bytes": (header(tensors=2**60), "more than the file can hold"),
    "more values than bytes": (header(values=2**60), "more than the file can hold"),
    "an endless name": (header(values=1) + struct.pack("<Q", 2**62) + bytes(64), "a string of"),
    "an endless string": (header(values=1) + string("k") + struct.pack("<IQ", 8, 2**62) + bytes(64), "key k"),
    "an endless array": (header(values=1) + string("k") + struct.pack("<IIQ", 9, 4, 2**62) + bytes(64), "key k"),
    "an endless array of strings": (header(values=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**62) + bytes(64), "key k"),
    "strings past the end": (header(values=1) + string("k") + struct.pack("<IIQQ", 9, 8, 2, 2**63) + bytes(64), "key k"),
    "an array of arrays": (header(values=1) + string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "value type 9"),
    "an unknown value": (header(values=1) + string("k") + struct.pack("<I", 99) + bytes(64), "value type 99"),
    "a key twice": (header(values=2) + 2 * (string("k") + struct.pack("<II", 4, 1)), "key k appears twice"),
    "no dimensions": (header(tensors=1) + string("t") + struct.pack("<I", 0) + bytes(64), "0 dimensions"),
    "nine dimensions": (header(tensors=1) + string("t") + struct.pack("<I", 9) + bytes(96), "9 dimensions"),
    "a tensor twice": (header(tensors=2) + 2 * entry("t", (4,), 0, 0) + bytes(64), "tensor t appears twice"),
    "an empty tensor": (header(tensors=1) + entry("t", (0, 4), 0, 0) + bytes(64), "impossible shape"),
    "an absurd tensor": (header(tensors=1) + entry("t", (2**40, 2**40), 0, 0) + bytes(64), "impossible shape"),
    "half a block": (header(tensors=1) + entry("t", (2, 33), 8, 0) + bytes(96), "impossible shape"),
    "a tensor past the end": (header(tensors=1) + entry("t", (400,), 0, 0) + bytes(64), "cut short"),
    "an offset past the end": (header(tensors=1) + entry("t", (4,), 0, 2**62) + bytes(64), "cut short"),
    "a crooked offset": (header(tensors=1) + entry("t", (4,), 0, 3) + bytes(128), "tensor t"),
    "overlapping tensors": (header(tensors=2) + entry("a", (16,), 0, 0) + entry("b", (16,), 0, 32) + bytes(256), "a and b overlap"),
    "an alignment of 7": (
        header(tensors=1, values=1) + string("general.alignment") + struct.pack("<II", 4, 7) + entry("t", (4,), 0, 0) + bytes(64),
        "general.alignment",
    ),
}


@pytest.mark.parametrize("what", CORRUPT)
def test_a_lying_file_is_corrupt(what: str, tmp_path: Path) -> None:
    raw, message = CORRUPT[what]
    with pytest.raises(ModelCorrupt, match=message):
        read_gguf(write(tmp_path, raw))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (header(version=1) + bytes(64), "version 1"),
        (header(version=4) + bytes(64), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
        (gguf_bytes({"split.count": 3}, {}), "split.count"),
    ],
)
def test_a_foreign_file_is_unsupported(raw: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        read_gguf(write(tmp_path, raw))


def test_a_foreign_tensor_type_is_named_when_asked_for(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path, gguf_bytes({}, {"t": (19, (1, 256), bytes(64))})))
    assert file.checkpoint.unsupported == {"t": "IQ1_S"}


def test_a_vocabulary_that_is_not_utf8(tmp_path: Path) -> None:
    raw = gguf_bytes({"tokenizer.ggml.tokens": ["good", "bad!"]}, {}).replace(b"bad!", b"b\xff\xfe!")
    words = read_gguf(write(tmp_path, raw)).metadata["tokenizer.ggml.tokens"]
    assert isinstance(words, StringArray)
    with pytest.raises(ModelCorrupt, match=r"entry 1 of tokenizer\.ggml\.tokens"):
        words.decode()


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="cannot be read"):
        read_gguf(tmp_path / "missing.gguf")


def test_a_large_vocabulary_is_read(tmp_path: Path) -> None:
    words = [f"token{i}" for i in range(150_000)]
    path = write(tmp_path, gguf_bytes({"tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": words}, {}))
    metadata = read_gguf(path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert tokens.decode() == words
