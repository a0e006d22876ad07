"""Files that somebody named, opened: a plain file, or an error that says what else it is.

Owns the one way in which models, keys, secrets, templates and packed weights are opened. Never waits: a named pipe in a file's place has no
writer and would hold a start for ever, silently. What a shell has opened for us, ``--secret-file <(pass show x)``, has one, and is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "it is a folder, not a file", errno.EISDIR),
    (stat.S_ISFIFO, "it is a named pipe, not a file", errno.EINVAL),
    (stat.S_ISSOCK, "it is a socket, not a file", errno.EINVAL),
    (stat.S_ISCHR, "it is a device, not a file", errno.EINVAL),
    (stat.S_ISBLK, "it is a device, not a file", errno.EINVAL),
)


_OPEN_ALREADY = (Path("/dev/fd"), Path("/proc/self/fd"))


def open_file(path: Path) -> BinaryIO:
    """For reading. Raises `OSError`; for what is no plain file, its `strerror` says what it is."""
    _check(path, path.stat().st_mode)  # Before opening: a device may act when it is opened, and a socket says only "no such device".
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_file(path: Path) -> bytes:
    """All of it. Raises as `open_file`."""
    if path.parent in _OPEN_ALREADY and path.is_fifo():
        return path.read_bytes()
    with open_file(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """All of it, as UTF-8. Raises as `open_file`, and `UnicodeDecodeError`."""
    return read_file(path).decode("utf-8")


def _check(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    what, number = next(((what, number) for is_it, what, number in _KINDS if is_it(mode)), ("it is no file", errno.EINVAL))
    raise OSError(number, what, str(path))
