"""What the conformance tests of transports share: which there are, a receiver's end, and waiting without a clock in the assertions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvseal.exec.backends.cpu import NativeArena, new_arena
from kvseal.handoff.make import make_transport
from kvseal.handoff.nixl import installed as nixl_installed
from kvseal.handoff.proof import Landing, Move
from kvseal.handoff.transport import Landed, Lost, Report, Transport
from kvseal.kv.geometry import KVGeometry
from kvseal.lab.page_server import KINDS, SCOPE, PageServer, geometry_of
from kvseal.lab.pages import payload, read_payload

SECRET = b"secret of the conformance suite"
KINDS_OF_TRANSPORT = [
    "shm",
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_installed(), reason="the extra [nixl] is not installed")),
]
PATIENCE_S = 30.0
UNTOUCHED = 0xA5


def wait_for(what: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Whether it becomes true in time. The time is only there so that a test ends."""
    give_up_s = time.monotonic() + patience_s
    while time.monotonic() < give_up_s:
        if what():
            return True
        time.sleep(0.002)
    return what()


@dataclass
class Receiver:
    """One transport over an arena that is filled with `UNTOUCHED`."""

    transport: Transport
    arena: NativeArena
    geometry: KVGeometry
    reports: list[Report] = field(default_factory=list)

    @property
    def landing(self) -> Landing:
        return Landing(self.arena.memory, self.geometry, SCOPE)

    def poll(self) -> list[Report]:
        self.reports += self.transport.poll()
        return self.reports

    def landed(self, transfer: str) -> int:
        return sum(report.pages for report in self.poll() if isinstance(report, Landed) and report.transfer == transfer)

    def lost(self, transfer: str) -> Lost | None:
        return next((report for report in self.poll() if isinstance(report, Lost) and report.transfer == transfer), None)

    def receive(self, transfer: str, server: PageServer, moves: list[Move]) -> None:
        self.transport.receive(transfer, server.source, moves, self.landing)

    def wait_landed(self, transfer: str, pages: int) -> None:
        assert wait_for(lambda: self.landed(transfer) >= pages or self.lost(transfer) is not None)
        assert self.lost(transfer) is None and self.landed(transfer) == pages

    def wait_lost(self, transfer: str) -> Lost:
        assert wait_for(lambda: self.lost(transfer) is not None)
        found = self.lost(transfer)
        assert found is not None
        return found

    def fence(self, transfer: str) -> None:
        assert wait_for(lambda: self.transport.fence(transfer))

    def right(self, moves: list[Move]) -> bool:
        """Every destination holds exactly what the server's page holds."""
        contents = [payload(self.geometry, bytes([kind])) for kind in range(KINDS)]
        return all(
            np.array_equal(read_payload(self.arena.memory, self.geometry, move.page), contents[move.source_page % KINDS]) for move in moves
        )

    def untouched(self, pages: list[int]) -> bool:
        return bool((self.arena.memory[pages] == UNTOUCHED).all())

    def mark(self, pages: list[int]) -> None:
        """As a new owner of these pages would write them."""
        self.arena.memory[pages] = UNTOUCHED


@contextmanager
def receiver(kind: str, pages: int, layers: int, incarnation: str = "receiver-0001", secret: bytes = SECRET) -> Iterator[Receiver]:
    geometry = geometry_of(layers)
    arena = new_arena(geometry, pages, shared=True)
    arena.memory[:] = UNTOUCHED
    transport = make_transport(kind, arena.memory, file=arena.file, incarnation=incarnation, secret=secret)
    try:
        yield Receiver(transport, arena, geometry)
    finally:
        transport.close()


@contextmanager
def server(
    kind: str, pages: int, layers: int = 1, incarnation: str = "sender-00000001", offer: str = "T", secret: bytes = SECRET
) -> Iterator[PageServer]:
    made = PageServer.start(kind, secret, pages=pages, layers=layers, incarnation=incarnation)
    try:
        if offer:
            made.tell(f"offer {offer} receiver-0001")
        yield made
    finally:
        made.stop()
