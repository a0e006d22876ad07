"""A benchmark that is told to end takes its servers and workers with it: on SIGTERM as on Ctrl-C.

Owns the signals of ``kvseal bench``. The first one raises in the main thread, so that every ``finally`` on the way out ends what it
started; later ones change nothing, or a second Ctrl-C (or a parent that passes on the first) would cut that short. Whatever was started
and still runs afterwards is ended by its pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvseal.bench.peers.machine import tree

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 10.0
"""From asking what was left behind to end, to ending it."""


@contextmanager
def clean_end() -> Iterator[None]:
    """Within, SIGINT raises `KeyboardInterrupt`, SIGTERM and SIGHUP `SystemExit` with 128 and their number. For the main thread."""
    older = _below()
    ours: dict[int, str] = {}
    """What ran below us when we were told to end, by pid and start time: its parents may be gone before it."""

    def end(number: int, frame: object) -> None:
        if not ours:
            ours[os.getpid()] = ""
            ours.update(_below())
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    # One that is ignored stays so: nohup, or a shell's background job.
    before = {number: signal.signal(number, end) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        if ours:
            _end_all(ours, older)
        for number, handler in before.items():
            signal.signal(number, handler)


def status_of(why: BaseException) -> int:
    """The exit status of a command that ended for `why`."""
    if isinstance(why, SystemExit):
        return why.code if isinstance(why.code, int) else 1
    return 128 + signal.SIGINT


def _below() -> dict[int, str]:
    return {pid: began for pid in tree([os.getpid()]) - {os.getpid()} if (began := _began(pid))}


def _end_all(processes: Mapping[int, str], older: Mapping[int, str]) -> None:
    """And whatever has come below us since, but for what was there before."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        found = {**processes, **_below()}.items() - older.items()
        left = {pid for pid, began in found if began and _began(pid) == began}
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, how)
        until_s = time.monotonic() + PATIENCE_S
        while any(map(_began, left)) and time.monotonic() < until_s:
            time.sleep(0.02)  # One of our own that nobody waits for counts as ended: it is a zombie.


def _began(pid: int) -> str:
    """When it began, in ticks; empty when it has ended or is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
