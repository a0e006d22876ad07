"""The header of a GGUF file, versions 2 and 3: metadata and the table of tensors.

Owns the container format up to where the payload begins. Every length is checked against the file before it is used; a file that lies is
`ModelCorrupt` and the message says where. Never reads a tensor's payload, decodes string arrays (the vocabulary) only when asked, and does
without NumPy, so that whoever wants a vocabulary alone starts sooner. Format: the GGUF specification of the ggml project (docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvseal.core.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from kvseal.exec.weights.source_file import SourceFile

MAGIC = b"GGUF"
MAX_NAME_BYTES = 65535
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<B", "<u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings that stays in the file until `decode` is called: the vocabulary, the merges."""

    key: str
    count: int
    _file: Path
    _buffer: mmap.mmap
    _start: int

    def __len__(self) -> int:
        return self.count

    def decode(self) -> list[str]:
        """All strings. Raises ModelCorrupt when one is not UTF-8."""
        buffer, position, unpack = self._buffer, self._start, struct.Struct("<Q").unpack_from
        out: list[str] = []
        try:
            for _ in range(self.count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                out.append(buffer[start:position].decode())
        except UnicodeDecodeError as error:
            raise ModelCorrupt(f"{self._file}: entry {len(out)} of {self.key} is not UTF-8") from error
        return out


@dataclass(frozen=True, slots=True)
class NumberArray:
    """An array of numbers of one type."""

    type_code: str
    """As `struct` and NumPy spell it: "<i4"."""
    values: tuple[Scalar, ...]

    def tolist(self) -> list[Scalar]:
        return list(self.values)


Value = Scalar | StringArray | NumberArray


@dataclass(frozen=True, slots=True)
class TensorEntry:
    type_number: int
    shape: tuple[int, ...]
    """Rows first."""
    offset: int
    """From `GGUFHeader.data_start`."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]
    alignment: int
    data_start: int
    source: SourceFile


def read_header(path: Path) -> GGUFHeader:
    """Maps the file and checks its header. Raises ModelNotFound, ModelCorrupt or ModelUnsupported."""
    try:
        source = SourceFile.open(path)
    except ValueError as error:
        raise ModelCorrupt(f"{path}: the file is empty") from error
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror}") from error
    return _Reader(path, source).read()


class _Reader:
    """One pass over the header."""

    def __init__(self, path: Path, source: SourceFile) -> None:
        self._path = path
        self._source = source
        self._buffer = source.buffer
        self._size = len(source.buffer)
        self._at = 0
        self._doing = "the header"

    def read(self) -> GGUFHeader:
        if self._buffer[:4] != MAGIC:
            raise ModelCorrupt(f"{self._path}: not a GGUF file (its first bytes are not 'GGUF')")
        self._at = 4
        version = self._number("<I")
        if version & 0xFFFF == 0 and version:
            raise ModelUnsupported(f"{self._path}: a big-endian GGUF file; convert it to little endian")
        if version not in (2, 3):
            raise ModelUnsupported(f"{self._path}: GGUF version {version}; KVSeal reads versions 2 and 3")
        tensor_count, value_count = self._number("<Q"), self._number("<Q")
        if tensor_count * 24 + value_count * 13 > self._size:
            raise self._corrupt(f"the header promises {tensor_count} tensors and {value_count} values, more than the file can hold")
        metadata = self._metadata(value_count)
        split = metadata.get("split.count", 0)
        if isinstance(split, int) and split > 1:
            raise ModelUnsupported(f"{self._path}: one of {split} parts (key split.count); merge them into one file first")
        tensors = self._tensors(tensor_count)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 2**20:
            raise self._corrupt(f"general.alignment is {alignment}; it must be a power of two from 8")
        return GGUFHeader(self._path, version, metadata, tensors, alignment, -(-self._at // alignment) * alignment, self._source)

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for index in range(count):
            self._doing = f"the name of value {index}"
            key = self._string()
            if key in metadata:
                raise self._corrupt(f"key {key} appears twice")
            self._doing = f"key {key}"
            metadata[key] = self._value(key, self._number("<I"))
        return metadata

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._string(limit=self._size)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._corrupt(f"unknown value type {kind}")
        number = self._unpack(_SCALARS[kind][0])
        return bool(number) if kind == _BOOL else number

    def _array(self, key: str) -> Value:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            start = self._at
            self._skip_strings(count)
            return StringArray(key, count, self._path, self._buffer, start)
        if kind not in _SCALARS:
            raise self._corrupt(f"an array of value type {kind}, which is not supported")
        code, type_code = _SCALARS[kind]
        size = count * struct.calcsize(code)
        self._need(size)
        numbers = struct.unpack_from(f"<{count}{code[1:]}", self._buffer, self._at)
        self._at += size
        return NumberArray(type_code, numbers)

    def _skip_strings(self, count: int) -> None:
        self._need(count * 8)
        buffer, position, unpack, last = self._buffer, self._at, struct.Struct("<Q").unpack_from, self._size - 8
        for _ in range(count):
            if position > last:
                raise self._corrupt("the file ends inside an array of strings")
            position += 8 + unpack(buffer, position)[0]
        if position > self._size:
            raise self._corrupt("the file ends inside an array of strings")
        self._at = position

    def _tensors(self, count: int) -> dict[str, TensorEntry]:
        table: dict[str, TensorEntry] = {}
        for index in range(count):
            self._doing = f"the entry of tensor {index}"
            name = self._string()
            if name in table:
                raise self._corrupt(f"tensor {name} appears twice")
            dimensions = self._number("<I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self._corrupt(f"tensor {name} has {dimensions} dimensions")
            shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
            table[name] = TensorEntry(self._number("<I"), shape, self._number("<Q"))
        return table

    def _need(self, size: int) -> None:
        if size > self._size - self._at:
            raise self._corrupt(f"the file ends: {size} bytes are needed at byte {self._at} of {self._size}")

    def _unpack(self, form: str) -> int | float:
        size = struct.calcsize(form)
        self._need(size)
        (number,) = struct.unpack_from(form, self._buffer, self._at)
        self._at += size
        value: int | float = number
        return value

    def _number(self, form: str) -> int:
        return int(self._unpack(form))

    def _string(self, limit: int = MAX_NAME_BYTES) -> str:
        length = self._number("<Q")
        if length > limit:
            raise self._corrupt(f"a string of {length} bytes")
        self._need(length)
        raw = self._buffer[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt("a string that is not UTF-8") from error

    def _corrupt(self, what: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self._path}: in {self._doing}: {what}")
