"""A file of weights as it was when it was opened: mapped, and with what tells whether it has changed since.

Owns `SourceFile`. Never reads the file.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvseal.core.files import open_file


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A mapped file, and what it was when it was opened."""

    buffer: mmap.mmap
    identity: tuple[int, int, int, int, int]
    """Device, inode, size, time of last change of content and of status (ns)."""
    opened_s: float

    @classmethod
    def open(cls, path: Path) -> SourceFile:
        """Maps a file. Raises OSError, and ValueError when it is empty."""
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return cls(buffer, identity, time.time())

    def settled(self, seconds: float) -> bool:
        """Whether it had been left alone for so long when it was opened that any later change shows in its times."""
        return max(self.identity[3:]) / 1e9 < self.opened_s - seconds

    def release_pages(self) -> None:
        """Lets go of the pages that were read; whoever reads again reads the file again."""
        self.buffer.madvise(mmap.MADV_DONTNEED)
