"""``kvseal bench transfer``: how fast sealed pages move between two processes, against a plain copy and a plain socket.

Owns the measurement. One sender process per transport, one receiver (this process); in every round each way moves the same pages to the
same scattered places, one way after the other, so that whatever else the machine does strikes all of them. Transports check every page
(all seals, digests of the bytes as they are put in place); the plain ways check nothing. Prints the median over rounds, the spread between
the quartiles, the ratio to the plain way of the same kind in the same round, and this process's CPU seconds per GB.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvseal.core.config import TRANSPORTS
from kvseal.core.errors import KVSealError
from kvseal.exec.backends.cpu import NativeArena, new_arena
from kvseal.handoff.auth import fill
from kvseal.handoff.make import make_transport
from kvseal.handoff.nixl import installed as nixl_installed
from kvseal.handoff.proof import Landing, Memory, Move
from kvseal.handoff.shm import SharedMemory
from kvseal.handoff.transport import Landed, Transport
from kvseal.lab.page_server import SCOPE, PageServer, geometry_of

SECRET = b"secret of one benchmark"
NAME = "receiver-bench"
MEGABYTES, QUICK_MEGABYTES = 128, 16
ROUNDS, QUICK_ROUNDS = 9, 3
TRANSFER = "handoff-bench"
PLAIN_OF = {"shm": "copy", "tcp": "socket", "nixl": "socket"}
_SOCKET_SENDER = """
import socket, sys
port, size = int(sys.argv[1]), int(sys.argv[2])
data = memoryview(bytearray(b"x" * (1 << 20)))
with socket.create_connection(("127.0.0.1", port)) as sock:
    while sock.recv(1):
        left = size
        while left:
            left -= sock.send(data[: min(left, len(data))])
"""


@dataclass
class Way:
    """One way to move all pages once; `run` returns when they stand in our memory."""

    name: str
    run: Callable[[], None]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def once(self) -> None:
        cpu, began = time.process_time(), time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(time.process_time() - cpu)


class Moved:
    """All pages of one `PageServer`, over one transport."""

    def __init__(self, transport: Transport, woken: threading.Event, server: PageServer, moves: list[Move], landing: Landing) -> None:
        self._transport = transport
        self._woken = woken
        self._server = server
        self._moves = moves
        self._landing = landing
        server.tell(f"offer {TRANSFER} {NAME}")

    def __call__(self) -> None:
        self._transport.receive(TRANSFER, self._server.source, self._moves, self._landing)
        left = len(self._moves)
        while left:
            self._woken.wait(1.0)
            self._woken.clear()
            for report in self._transport.poll():
                if not isinstance(report, Landed):
                    raise KVSealError(f"{self._transport.name}: {report.detail}")
                left -= report.pages


def plain_copy(source: Memory, destination: Memory, moves: list[Move]) -> None:
    """What a receiver that checks nothing would do with the sender's mapped memory."""
    for move in moves:
        destination[move.page] = source[move.source_page]


class PlainSocket:
    """What a receiver that checks nothing would do with one stream: read it into the pages."""

    def __init__(self, destination: Memory, moves: list[Move]) -> None:
        self._views = [destination[move.page].data for move in moves]
        listener = socket.create_server(("127.0.0.1", 0))
        arguments = [str(listener.getsockname()[1]), str(sum(map(len, self._views)))]
        self._sender = subprocess.Popen([sys.executable, "-c", _SOCKET_SENDER, *arguments])
        self._sock, _ = listener.accept()
        listener.close()

    def __call__(self) -> None:
        self._sock.send(b"x")
        for view in self._views:
            fill(self._sock, view)

    def close(self) -> None:
        self._sock.close()
        self._sender.wait(5)


def measure(names: list[str], *, pages: int, layers: int, rounds: int) -> list[Way]:
    geometry = geometry_of(layers)
    arena = new_arena(geometry, pages, shared=True)
    arena.memory[:] = 0  # resident, as a pool is that has been in use
    landing = Landing(arena.memory, geometry, SCOPE)
    places = np.random.default_rng(0).permutation(pages).tolist()
    servers = {name: PageServer.start(name, SECRET, pages=pages, layers=layers) for name in dict.fromkeys(["shm", *names])}
    transports: dict[str, Transport] = {}
    ways: list[Way] = []
    plain_socket: PlainSocket | None = None
    try:
        moves = servers["shm"].moves(places)
        ways.append(Way("copy", _copier(arena, servers["shm"], moves)))
        plain_socket = PlainSocket(arena.memory, moves)
        ways.append(Way("socket", plain_socket))
        for name in names:
            woken = threading.Event()
            transports[name] = make_transport(name, arena.memory, file=arena.file, incarnation=NAME, secret=SECRET, wake=woken.set)
            ways.append(Way(name, Moved(transports[name], woken, servers[name], servers[name].moves(places), landing)))
        for turn in range(rounds + 1):
            for way in ways:
                way.once()
                if not turn:  # the first round connects, and faults pages in
                    way.seconds.clear()
                    way.cpu_seconds.clear()
    finally:
        for transport in transports.values():
            transport.close()
        for server in servers.values():
            server.stop()
        if plain_socket is not None:
            plain_socket.close()
    return ways


def _copier(arena: NativeArena, server: PageServer, moves: list[Move]) -> Callable[[], None]:
    mapper = SharedMemory(arena.memory, arena.file, incarnation=NAME, secret=SECRET)
    mapped = mapper.map(server.source)
    mapper.close()
    return lambda: plain_copy(mapped.memory, arena.memory, moves)


def table(ways: list[Way], moved_bytes: int) -> str:
    by_name = {way.name: way for way in ways}
    lines = [f"{'way':<8}{'GB/s':>7}{'quartiles':>14}{'of plain':>10}{'CPU s/GB':>10}"]
    for way in ways:
        rates = sorted(moved_bytes / seconds / 1e9 for seconds in way.seconds)
        low, _, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else (rates[0],) * 3
        plain = by_name[PLAIN_OF[way.name]] if way.name in PLAIN_OF else None
        ratio = ""
        if plain is not None:
            ratio = f"{statistics.median(b / a for a, b in zip(way.seconds, plain.seconds, strict=True)):.2f}"
        cpu = statistics.median(way.cpu_seconds) / (moved_bytes / 1e9)
        lines.append(f"{way.name:<8}{statistics.median(rates):>7.2f}{f'{low:.2f}-{high:.2f}':>14}{ratio:>10}{cpu:>10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Moves sealed pages between two processes, every transport against a plain copy and socket."
    )
    parser.add_argument("--layers", type=int, default=5, help="layers of a page; 5 make 60 KiB, 30 make 362 KiB (default: 5)")
    parser.add_argument("--megabytes", type=int, help=f"moved in each round (default: {MEGABYTES})")
    parser.add_argument("--rounds", type=int, help=f"of all ways, one after the other (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MEGABYTES} MB and {QUICK_ROUNDS} rounds: a look, no figure to quote")
    parser.add_argument("--transports", default="shm,tcp" + (",nixl" if nixl_installed() else ""), help="comma separated")
    options = parser.parse_args()
    megabytes = (QUICK_MEGABYTES if options.quick else MEGABYTES) if options.megabytes is None else options.megabytes
    rounds = (QUICK_ROUNDS if options.quick else ROUNDS) if options.rounds is None else options.rounds
    names = options.transports.split(",")
    if min(options.layers, megabytes, rounds) < 1:
        parser.error("--layers, --megabytes and --rounds must be 1 or more")
    if strange := [name for name in names if name not in TRANSPORTS]:
        parser.error(f"--transports: there is no {', '.join(map(repr, strange))}; choose from {', '.join(TRANSPORTS)}")
    page_bytes = geometry_of(options.layers).page_bytes
    pages = max(1, megabytes * 10**6 // page_bytes)
    ways = measure(names, pages=pages, layers=options.layers, rounds=rounds)
    print(f"{pages} pages of {page_bytes} bytes, {rounds} rounds; 'of plain': copy for shm, socket for the others")
    print(table(ways, pages * page_bytes))


if __name__ == "__main__":
    main()
