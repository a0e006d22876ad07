"""Who used the processor meanwhile, and what machine this is.

Owns the reads of Linux's /proc: busy time of the whole machine, CPU time and memory of a tree of processes. A repetition during which
others computed is marked, never dropped. On a system without /proc everything here is unknown, and said to be.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LOUD_CORES = 0.15
"""More than this many cores used by others make a repetition loud: threads that wait for each other lose far more than that."""

_PROC = Path("/proc")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def describe() -> dict[str, str]:
    """Processor, cores, memory and system, for the report."""
    model = next((line.split(":", 1)[1].strip() for line in _lines(_PROC / "cpuinfo") if line.startswith("model name")), platform.machine())
    memory = next((int(line.split()[1]) * 1024 for line in _lines(_PROC / "meminfo") if line.startswith("MemTotal")), 0)
    return {
        "processor": model,
        "cores": str(cores()),
        "memory": f"{memory / 2**30:.0f} GiB" if memory else "unknown",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time so far of these processes and all below them, in seconds; of ended ones too, once their parent has waited for them."""
    ticks = 0
    for pid in tree(pids):
        fields = "".join(_lines(_PROC / str(pid) / "stat")).rsplit(")", 1)[-1].split()
        if len(fields) > 14:
            ticks += sum(map(int, fields[11:15]))  # proc(5): utime and stime, and the same of children that were waited for
    return ticks / _ticks_per_second()


def resident_bytes(pids: Iterable[int]) -> int:
    """Memory in use by these processes and all below them; shared pages count once per process."""
    total = 0
    for pid in tree(pids):
        total += sum(int(line.split()[1]) * 1024 for line in _lines(_PROC / str(pid) / "status") if line.startswith("VmRSS"))
    return total


def tree(pids: Iterable[int]) -> set[int]:
    """These processes and all below them."""
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += [child for task in _tasks(pid) for child in _children(task)]
    return found


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one stretch of time; `others` is None where nobody can tell."""

    wall_s: float
    own_cores: float
    others_cores: float | None

    @property
    def is_loud(self) -> bool:
        return self.others_cores is not None and self.others_cores > LOUD_CORES


class Meter:
    """Measures from its making until `stop`: wall time, cores used by `pids`, this process and all below, and by everybody else.

    `idle` are processes below that should do nothing just now: what they use counts as somebody else's.
    """

    def __init__(self, pids: Iterable[int], *, idle: Iterable[int] = ()) -> None:
        self._pids = [*pids, os.getpid()]
        self._idle = list(idle)
        self._own_s, self._busy_s = self._own_seconds(), _busy_seconds()
        self._began_s = time.perf_counter()

    def stop(self) -> Usage:
        wall_s = time.perf_counter() - self._began_s
        own_s = self._own_seconds() - self._own_s
        busy_s = _busy_seconds()
        others = None if busy_s is None or self._busy_s is None else max(0.0, busy_s - self._busy_s - own_s) / wall_s
        return Usage(wall_s, own_s / wall_s, others)

    def _own_seconds(self) -> float:
        return cpu_seconds(self._pids) - cpu_seconds(self._idle)


def wait_for_quiet(limit_s: float) -> bool:
    """Waits until others use next to nothing for a second, `limit_s` at most. True: it became quiet, or nobody can tell."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        meter = Meter([])
        time.sleep(min(1.0, limit_s))
        if not meter.stop().is_loud:
            return True
    return False


def _busy_seconds() -> float | None:
    """Time that all cores together have worked since start: user, nice, system, interrupts, stolen."""
    first = next(iter(_lines(_PROC / "stat")), "").split()
    if len(first) < 8:
        return None
    values = [int(field) for field in first[1:]]
    return (sum(values[:3]) + sum(values[5:8])) / _ticks_per_second()


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _tasks(pid: int) -> list[Path]:
    try:
        return list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return []


def _children(task: Path) -> list[int]:
    return [int(child) for line in _lines(task / "children") for child in line.split()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
