"""How long ``kvseal serve`` takes to its first token, and what memory it holds beyond weights and arena: ``kvseal bench start``.

Owns the measurement of figure 16: a fresh server per repeat, from its exec to the first token that a client receives, model on warm disk;
then the proportional share of every page that its processes hold, by what the page is. With ``--against DIR`` another source tree takes
turns with this one. Never judges.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvseal.bench.suite.board import Entry, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, add_options, context_of, finish, measured
from kvseal.core.errors import EngineDied

MOST_SECONDS, MOST_MB = Target(high=1.5), Target(high=150.0)

TIMEOUT_S = 60.0
POLL_S = 0.002
MIB = 2**20
LARGE_KIB = 48 * 1024
"""An anonymous mapping this large is the arena or weights packed in memory; which one, its size tells."""
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Start:
    """One server's start. Memory is proportional: a page shared by two processes counts half for each."""

    first_token_s: float
    weights_mib: float
    """Mapped weight files, and weights packed in anonymous memory."""
    arena_mib: float
    beyond_mib: float
    """Everything else, all processes together."""


def measure(tree: Path, arguments: Sequence[str]) -> Start:
    """Starts a server from the source tree or site directory `tree`. Raises EngineDied when no token comes."""
    with _free_port() as port:
        pass
    command = [
        "env",
        f"PYTHONPATH={tree}",
        sys.executable,
        "-P",
        "-m",
        "kvseal",
        "serve",
        *arguments,
        "--port",
        str(port),
        "--log-level",
        "error",
    ]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _first_token(process, port, began + TIMEOUT_S)
        seconds = time.perf_counter() - began
        pool_kib = _pool_kib(port)
        kinds = {"weights": 0.0, "arena": 0.0, "beyond": 0.0}
        for pid in _family(process.pid):
            for kind, kib in _memory_kib(pid, pool_kib):
                kinds[kind] += kib / 1024
        return Start(seconds, kinds["weights"], kinds["arena"], kinds["beyond"])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def _free_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]


def _first_token(process: subprocess.Popen[bytes], port: int, deadline_s: float) -> None:
    """The request waits in the server's line from the moment on that it listens, so nothing is polled away."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    while time.perf_counter() < deadline_s and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
                client.sendall(head.encode() + body)
                received = b""
                while b"data: {" not in received:
                    data = client.recv(65536)
                    if not data:
                        raise EngineDied("the server closed the connection before a token came")
                    received += data
                return
        except ConnectionRefusedError:
            time.sleep(POLL_S)
    process.kill()
    said = process.communicate()[1].decode(errors="replace").strip().splitlines()
    raise EngineDied(f"no token from the server; it said last: {said[-1] if said else 'nothing'}")


def _pool_kib(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while data := client.recv(65536):
            received += data
    found = re.search(rb'"pool_bytes":\s*(\d+)', received)
    return int(found[1]) // 1024 if found else 0


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _family(int(child))
    return found


def _memory_kib(pid: int, pool_kib: int) -> Iterator[tuple[str, int]]:
    """What each mapping is and its proportional share."""
    name, size = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            name = mapping[1]
        elif line.startswith("Size:"):
            size = int(line.split()[1])
        elif line.startswith("Pss:"):
            yield _kind(name, size, pool_kib), int(line.split()[1])


def _kind(name: str, size_kib: int, pool_kib: int) -> str:
    if name.removesuffix(" (deleted)").endswith((".gguf", ".safetensors", ".packed")):
        return "weights"
    if name or size_kib < LARGE_KIB:
        return "beyond"
    return "arena" if pool_kib <= size_kib <= 1.02 * pool_kib + 4096 else "weights"


def side(name: str, unit: str, starts: Sequence[Start], value: Callable[[Start], float]) -> Side:
    return Side(name, unit, tuple(map(value, starts)))


def entries_of(own: Sequence[Start], others: Sequence[Start]) -> list[Entry]:
    """`others`: of the other tree, which took turns; empty without one."""
    weights, arena = (statistics.median(map(value, own)) for value in (_weights_mib, _arena_mib))
    held = f"weights {weights:.0f} MiB and arena {arena:.0f} MiB besides; proportional share of all processes, after one token"
    entries = [
        Entry(figure="16", name="exec to first token over HTTP", a=side("start", "s", own, _first_token_s), target=MOST_SECONDS),
        Entry(figure="16", name="memory beyond weights and arena", a=side("beyond", "MB", own, _beyond_mb), target=MOST_MB, note=held),
    ]
    if others:
        a, b = side("this tree", "s", own, _first_token_s), side("the other tree", "s", others, _first_token_s)
        entries.append(Entry(figure="16", name="exec to first token, this tree / the other", a=a, b=b))
    return entries


def run(context: Context, *, against: Path | None = None, serve: Sequence[str] = ()) -> Result:
    """One start of each tree warms the disk; then they take turns."""
    arguments = [*([context.model] if context.model else []), *(["--threads", str(context.threads)] if context.threads else []), *serve]
    trees = [Path(__file__).parents[2], *([against] if against is not None else [])]
    starts: list[list[Start]] = [[] for _ in trees]
    try:
        for turn in range(context.pairs + 1):
            context.say("warming the disk" if not turn else f"start {turn} of {context.pairs}")
            for tree, found in zip(trees, starts, strict=True):
                start = measure(tree, arguments)
                found += [start] if turn else []
        entries = entries_of(starts[0], starts[1] if against is not None else [])
    except (EngineDied, OSError) as died:
        entries = [missing("16", "exec to first token over HTTP", str(died), MOST_SECONDS)]
    return Result(name="start", title="Start", entries=entries)


def _first_token_s(start: Start) -> float:
    return start.first_token_s


def _weights_mib(start: Start) -> float:
    return start.weights_mib


def _arena_mib(start: Start) -> float:
    return start.arena_mib


def _beyond_mb(start: Start) -> float:
    return start.beyond_mib * MIB / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvseal bench start", description="Time to the first token, and memory, of a fresh server.")
    add_options(parser)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another source tree, which takes turns with this one")
    parser.add_argument("serve", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="after --: options of kvseal serve")
    options = parser.parse_args(arguments)
    benchmark = partial(run, against=options.against, serve=[word for word in options.serve if word != "--"])
    return finish([measured(benchmark, context_of("start", options))], options)


if __name__ == "__main__":
    raise SystemExit(main())
