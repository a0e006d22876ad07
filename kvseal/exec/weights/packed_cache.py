"""Packed weights on disk: packed once, then mapped read-only by every process that serves them, so that they share the memory.

Owns the file format, its creation and its cleaning. A file appears under its name only when it is complete; it is never changed after that,
only unlinked or replaced, so that whoever has mapped it keeps what was verified. Every mapping is verified whole, by a digest over all of
it: what is truncated, flipped or foreign is packed again. Laws: L4k, L10 (weights are never taken for others: the name is a digest over the
content of the source tensors, the formats and the layout). Anything that goes wrong here costs the sharing and never the start.

File: ``HEADER_BYTES`` of header (magic, layout, name, bytes, digest of the slab; then a digest of the header itself), then the slab.

How the source's content is known without reading all of it at every start: its digest is kept under the source files' identity (device,
inode, size, times of change of content and of status, and the sampled digest of `weights.digest`). Whatever writes to a file moves its
time of change of status, which no user can set back; files changed within the clock's grain of being read are not remembered.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvseal import _native
from kvseal.core.files import open_file, read_file
from kvseal.exec.weights.types import Float32, ModelWeights, TensorSource

MAGIC = b"KVSPACK\1"
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sI4x32sQ16s")
_CHECK_BYTES = 32
SUFFIX = ".packed"
KEEP_BYTES = 32 * 2**30
"""Files that were used least recently go when all together are larger; the newest stays whatever its size."""
SPARE_BYTES = 2**30
"""Left free on the disk."""
KEEP_KNOWN = 256
SETTLED_S = 2.0
"""A file whose times are older than this when it is read has times that a later change would move."""
STALE_S = 3600.0
"""Temporary files older than this were left by a process that was killed."""
WRITE_BYTES = 64 * 2**20

_ELSEWHERE = "set KVSEAL_CACHE to a folder that can hold them"

_log = logging.getLogger("kvseal.exec")


@dataclass(frozen=True, slots=True)
class PackedCache:
    """A directory of packed weights. Safe to use from several processes at once; never raises for what the disk does."""

    directory: Path
    keep_bytes: int = KEEP_BYTES
    spare_bytes: int = SPARE_BYTES

    def name_of(self, weights: ModelWeights, sources: list[tuple[TensorSource, str]], importance: list[Float32 | None]) -> str:
        """The file name of these matrices, each in its packing, in this order. Reads the sources unless their content is known."""
        digest = hashlib.blake2b(digest_size=32, person=b"kvseal-packed")
        digest.update(self._content(weights, [source for source, _ in sources]))
        for source, packing in sources:
            digest.update(f"|{packing}|{source.rows}|{source.columns}|".encode())
        for weight in importance:
            digest.update(b"-" if weight is None else weight.tobytes())
        return f"{_prefix()}{digest.hexdigest()}{SUFFIX}"

    def find(self, name: str, slab_bytes: int) -> _native.WeightSlab | None:
        """The slab of that name, mapped and with its places not yet taken; None when there is none, or none that can be trusted."""
        try:
            return self._mapped(name, slab_bytes)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None  # Nothing that was packed. What is in the way is told once, by `keep`.
        except (OSError, MemoryError, ValueError) as error:
            if not self._is_out_of_reach(error):
                _log.warning("packed weights in %s cannot be used and are packed again: %s", self.directory / name, _reason(error))
            return None

    def _is_out_of_reach(self, error: Exception) -> bool:
        """Whether it is the directory that cannot be used, and nothing is known of a file in it."""
        if isinstance(error, PermissionError):
            return not os.access(self.directory, os.X_OK)
        return isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP)

    def _mapped(self, name: str, slab_bytes: int) -> _native.WeightSlab:
        """Raises OSError, MemoryError, or ValueError naming what is wrong with the file."""
        path = self.directory / name
        with open_file(path) as file:
            slab = _opened(file.fileno(), file.read(HEADER_BYTES), name, slab_bytes)
        with contextlib.suppress(OSError):
            os.utime(path)  # For the order of use; files of another owner keep theirs.
        return slab

    def keep(self, name: str, slab: _native.WeightSlab) -> _native.WeightSlab | None:
        """Writes a filled slab under its name and maps it. None, with one line in the log, when the disk does not take it."""
        path = self.directory / name
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._make_room(path, HEADER_BYTES + slab.size_bytes)
            temporary = self.directory / f"{_prefix()}{secrets.token_hex(8)}.part"
            try:
                _write(temporary, _header(name, slab), slab)
                return self._published(temporary, path, slab.size_bytes)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("packed weights stay in this process's memory: %s cannot keep them: %s", self.directory, _remedy(error, path))
            return None

    def _published(self, temporary: Path, path: Path, slab_bytes: int) -> _native.WeightSlab | None:
        """Of two processes that wrote the same, both map the file of the first, so that they share it; a damaged one is replaced."""
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            with contextlib.suppress(OSError, MemoryError, ValueError):  # Reported when it was looked for.
                return self._mapped(path.name, slab_bytes)
            temporary.replace(path)
        except OSError:  # A file system without links.
            temporary.replace(path)
        _sync_directory(self.directory)
        return self.find(path.name, slab_bytes)

    def _content(self, weights: ModelWeights, sources: list[TensorSource]) -> bytes:
        """32 bytes over everything that the sources hold."""
        known = self.directory / f"{_identity(weights)}.known"
        with contextlib.suppress(OSError):
            record = read_file(known)
            if len(record) == 64 and record[32:] == _check(record[:32]):
                return record[:32]
        content = content_digest(sources)
        if weights.files and all(file.settled(SETTLED_S) for file in weights.files):
            with contextlib.suppress(OSError):
                self.directory.mkdir(parents=True, exist_ok=True)
                temporary = known.with_suffix(f".{secrets.token_hex(8)}.part")
                try:
                    temporary.write_bytes(content + _check(content))
                    temporary.replace(known)
                finally:
                    temporary.unlink(missing_ok=True)
        return content

    def _make_room(self, path: Path, size: int) -> None:
        """Removes what other layouts, killed processes and long unused models left. Raises OSError when there is still no room."""
        packed = []
        for entry in sorted(self.directory.iterdir()):
            with contextlib.suppress(OSError):
                status = entry.stat()
                if entry.suffix == ".part" and status.st_mtime < time.time() - STALE_S:
                    entry.unlink()
                elif entry.suffix == SUFFIX and entry != path:
                    if _layout_of(entry.name) < _native.PACK_LAYOUT:
                        entry.unlink()
                    else:
                        packed.append((status.st_mtime, status.st_size, entry))
        packed.sort()
        total = sum(entry_bytes for _, entry_bytes, _ in packed) + size
        for _, entry_bytes, entry in packed:
            if total <= self.keep_bytes and shutil.disk_usage(self.directory).free >= size + self.spare_bytes:
                break
            with contextlib.suppress(OSError):
                entry.unlink()
                total -= entry_bytes
        free, needed = shutil.disk_usage(self.directory).free, size + self.spare_bytes
        if free < needed:
            raise OSError(
                f"{free >> 20} MiB are free and {needed >> 20} MiB are needed, to write them and leave some free; free "
                f"{(needed - free >> 20) + 1} MiB there, or {_ELSEWHERE}"
            )
        known = sorted(self.directory.glob("*.known"), key=lambda entry: entry.stat().st_mtime)
        for entry in known[:-KEEP_KNOWN]:
            entry.unlink(missing_ok=True)


def content_digest(sources: list[TensorSource]) -> bytes:
    """32 bytes over every byte of every source, its type, shape and row order."""
    digest = hashlib.blake2b(digest_size=32, person=b"kvseal-content")
    for source in sources:
        whole = source.raw.size // 64 * 64
        digest.update(f"|{source.type}|{source.shape}|{source.raw.size}|".encode())
        digest.update(_native.digest(source.raw[:whole], 0) + source.raw[whole:].tobytes())
        if source.row_order is not None:
            digest.update(source.row_order.tobytes())
    return digest.digest()


def _prefix() -> str:
    return f"v{_native.PACK_LAYOUT}-"


def _layout_of(name: str) -> int:
    number = name[1 : name.find("-")]
    return int(number) if name.startswith("v") and number.isdigit() else 0


def _identity(weights: ModelWeights) -> str:
    digest = hashlib.blake2b(digest_size=20, person=b"kvseal-files")
    digest.update(weights.digest)
    for file in weights.files:
        digest.update(repr(file.identity).encode())
    return digest.hexdigest()


def _check(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=32, person=b"kvseal-check").digest()


def _header(name: str, slab: _native.WeightSlab) -> bytes:
    label = hashlib.blake2b(name.encode(), digest_size=32).digest()
    header = _HEADER.pack(MAGIC, _native.PACK_LAYOUT, label, slab.size_bytes, slab.digest())
    return (header + _check(header)).ljust(HEADER_BYTES, b"\0")


def _opened(file: int, header: bytes, name: str, slab_bytes: int) -> _native.WeightSlab:
    """Maps and verifies an open file. Raises ValueError naming what is wrong, OSError or MemoryError."""
    status = os.fstat(file)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise ValueError("somebody else may have written the file")
    if status.st_size != HEADER_BYTES + slab_bytes or len(header) != HEADER_BYTES:
        raise ValueError(f"the file has {status.st_size} bytes instead of {HEADER_BYTES + slab_bytes}")
    fields = header[: _HEADER.size]
    if header[_HEADER.size : _HEADER.size + _CHECK_BYTES] != _check(fields):
        raise ValueError("the header is damaged")
    magic, layout, label, found_bytes, digest = _HEADER.unpack(fields)
    expected = (MAGIC, _native.PACK_LAYOUT, hashlib.blake2b(name.encode(), digest_size=32).digest(), slab_bytes)
    if (magic, layout, label, found_bytes) != expected:
        raise ValueError("the header is of another file")
    slab = _native.WeightSlab.map(file, HEADER_BYTES, slab_bytes)
    if slab.digest() != digest:
        raise ValueError("the weights in it are damaged")
    return slab


def _write(path: Path, header: bytes, slab: _native.WeightSlab) -> None:
    with path.open("xb", buffering=0) as file:
        for part in _parts(header, slab):
            while part:
                part = part[file.write(part) :]
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())


def _parts(header: bytes, slab: _native.WeightSlab) -> Iterator[memoryview]:
    yield memoryview(header)
    memory = slab.memory.data
    for start in range(0, len(memory), WRITE_BYTES):
        yield memory[start : start + WRITE_BYTES]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remedy(error: OSError, path: Path) -> str:
    """Why a packed file cannot be kept, and what to do."""
    reason = _reason(error)
    obstacle = next((above for above in path.parents if os.path.lexists(above) and not above.is_dir()), None)
    if obstacle is not None:
        return f"{obstacle} is no folder; remove it, or {_ELSEWHERE}"
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder, and the file of that name belongs there; remove it"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{reason}; free as much there as the model takes, or {_ELSEWHERE}"
    return reason if error.errno is None else f"{reason}; {_ELSEWHERE}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
