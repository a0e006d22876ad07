"""CPU time of a tree of processes, and of everybody else."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvseal.bench.peers import machine

BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint('done', flush=True)\ninput()"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_childs_work_is_counted_while_it_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        meter = machine.Meter([])
        if child.stdout is None or child.stdin is None:
            raise RuntimeError("no pipes")
        child.stdout.readline()
        usage = meter.stop()
        assert machine.cpu_seconds([child.pid]) >= 0.25
        assert usage.own_cores * usage.wall_s >= 0.25 and machine.resident_bytes([child.pid]) > 2**20
        child.stdin.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("idle", [False, True])
def test_an_ended_childs_work_is_ours_and_an_idle_engines_is_not(idle: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        meter = machine.Meter([], idle=[child.pid] if idle else [])
        child.communicate(b"\n")
        ended = meter.stop()
    if not idle:
        assert ended.own_cores * ended.wall_s >= 0.25
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        meter = machine.Meter([], idle=[child.pid] if idle else [])
        if child.stdout is None or child.stdin is None:
            raise RuntimeError("no pipes")
        child.stdout.readline()
        usage = meter.stop()
        child.stdin.close()
    worked_s = usage.own_cores * usage.wall_s
    assert worked_s < 0.2 if idle else worked_s >= 0.25
    assert usage.others_cores is not None and (not idle or usage.others_cores * usage.wall_s >= 0.2)


def test_unknown_processes_have_used_nothing() -> None:
    assert machine.cpu_seconds([2**22 + 1]) == 0.0
    assert machine.resident_bytes([2**22 + 1]) == 0


def test_where_nobody_can_tell_nothing_is_loud() -> None:
    assert not machine.Usage(wall_s=1.0, own_cores=1.0, others_cores=None).is_loud
    assert machine.Usage(wall_s=1.0, own_cores=1.0, others_cores=0.5).is_loud


def test_waiting_for_quiet_ends() -> None:
    began = time.monotonic()
    machine.wait_for_quiet(0.1)
    assert time.monotonic() - began < 5.0


def test_the_machine_is_described() -> None:
    assert set(machine.describe()) == {"processor", "cores", "memory", "system", "python"}
