"""A fresh engine process and our end of the socket to it.

Owns the command line of the process and the first message. Imports little, so that ``kvseal serve`` can start the engine before it imports
everything that speaks HTTP: the two take their time side by side.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from kvseal.core.config import EngineConfig

ENGINE_MODULE = "kvseal.node.engine_process"


class SpawnedEngine:
    """A process that has been told what to build. Belongs to whoever calls `take`; until then `discard` ends it."""

    def __init__(self, config: EngineConfig, *, module: str = ENGINE_MODULE) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: the package that runs here runs there, not a source tree that happens to be the working directory.
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._parts: tuple[subprocess.Popen[bytes], socket.socket] | None = (process, ours)
        from kvseal.node import messages as m  # After the start: it imports while the process does.

        with contextlib.suppress(OSError):  # A process that died at once is noticed by whoever reads.
            ours.sendall(m.frame(m.Hello(m.PROTOCOL_VERSION, config)))

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and the socket, once. Raises ValueError the second time."""
        if self._parts is None:
            raise ValueError("this engine process has been taken")
        parts, self._parts = self._parts, None
        return parts

    def discard(self) -> None:
        """Ends a process that nobody has taken."""
        if self._parts is not None:
            process, ours = self.take()
            ours.close()
            process.kill()
            process.wait()


def cpu_ticks(pid: int) -> int | None:
    """What a process has computed, all threads together, in the system's ticks; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None
