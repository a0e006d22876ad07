"""A transport that misbehaves on purpose, around any real one.

Owns the faults and the place where each strikes; the seed decides which page. What is broken is always something that a real transport
could do: the law must hold whatever the transport does. Laws L3, L8, L9.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from enum import StrEnum

from kvseal.handoff.proof import Claims, Landing, Memory, Move, PageFault, claims_of
from kvseal.handoff.transport import Landed, Lost, Report, Source, Transport


class Fault(StrEnum):
    DROP = "drop"
    """One page of a batch is never written, and reported all the same."""
    TRUNCATE = "truncate"
    """One page is written half."""
    REPEAT = "repeat"
    """Pages are reported as landed a second time."""
    REORDER = "reorder"
    """Two pages of a batch change places."""
    CORRUPT = "corrupt"
    """One bit of what was written is another."""
    LATE = "late"
    """The fence says that it is not quiet, and the page is written once more after it; then it is quiet."""
    SILENCE = "silence"
    """From some page on nothing happens any more."""
    HALF_CLOSE = "half-close"
    """The transfer is lost in the middle."""


class FaultyTransport:
    """`fault` strikes once, at a page that `seed` chooses; everything else goes through."""

    def __init__(self, inner: Transport, fault: Fault, seed: int) -> None:
        self.inner = inner
        self.fault = fault
        self.name = inner.name
        self.local_fence = inner.local_fence and fault is not Fault.LATE
        self.incarnation = inner.incarnation
        self.struck = False
        self._chance = random.Random(seed)
        self._silent: set[str] = set()
        self._late: dict[str, tuple[Landing, Move, bytes]] = {}

    @property
    def endpoint(self) -> bytes:
        return self.inner.endpoint

    def send(self, transfer: str, receiver: str, stamps: Sequence[int]) -> None:
        self.inner.send(transfer, receiver, stamps)

    def withdraw(self, transfer: str) -> bool:
        return self.inner.withdraw(transfer)

    def expect(self, transfer: str, source: Source, pages: Sequence[int], landing: Landing) -> None:
        self.inner.expect(transfer, source, pages, landing)

    def receive(self, transfer: str, source: Source, moves: Sequence[Move], landing: Landing) -> None:
        if self.fault is Fault.LATE and transfer not in self._late:
            move = self._chance.choice(moves)
            self._late[transfer] = (landing, move, landing.memory[move.page].tobytes())
        self.inner.receive(transfer, source, moves, FaultyLanding(landing, self))

    def poll(self) -> list[Report]:
        found: list[Report] = []
        for report in self.inner.poll():
            if report.transfer in self._silent:
                continue
            if self.fault is Fault.SILENCE and self._strikes():
                self._silent.add(report.transfer)
                continue
            if self.fault is Fault.HALF_CLOSE and self._strikes():
                self._silent.add(report.transfer)
                found.append(Lost(report.transfer, "the connection is closed in the middle"))
                continue
            found.append(report)
            if self.fault is Fault.REPEAT and isinstance(report, Landed) and self._strikes():
                found.append(report)
        return found

    def fence(self, transfer: str) -> bool:
        quiet = self.inner.fence(transfer)
        late = self._late.get(transfer)
        if late is None or not quiet:
            return quiet
        if not self.struck:
            self.struck = True
            return False
        landing, move, old = self._late.pop(transfer)
        landing.memory[move.page] = memoryview(old)
        return True

    def reset(self) -> bool:
        return self.inner.reset()

    def close(self) -> None:
        self.inner.close()

    def _strikes(self) -> bool:
        if self.struck or self._chance.random() < 0.5:
            return False
        self.struck = True
        return True

    def spoil(self, memory: Memory, moves: Sequence[Move], before: Sequence[bytes]) -> None:
        """What happens to a batch between the wire and the check."""
        if self.fault not in (Fault.DROP, Fault.TRUNCATE, Fault.REORDER, Fault.CORRUPT) or not self._strikes():
            return
        index = self._chance.randrange(len(moves))
        page, size = moves[index].page, memory.shape[1]
        if self.fault is Fault.DROP:
            memory[page] = memoryview(before[index])
        elif self.fault is Fault.TRUNCATE:
            memory[page, size // 2 :] = memoryview(before[index])[size // 2 :]
        elif self.fault is Fault.CORRUPT:
            at = self._chance.randrange(size)
            memory[page, at] ^= 1 << self._chance.randrange(8)
        elif len(moves) > 1:
            other = moves[index - 1].page
            memory[[page, other]] = memory[[other, page]]
        else:
            self.struck = False


class FaultyLanding(Landing):
    """A landing whose bytes are spoiled before they are checked."""

    def __init__(self, inner: Landing, transport: FaultyTransport) -> None:
        self.memory = inner.memory
        self.page_bytes = inner.page_bytes
        self._inner = inner
        self._transport = transport
        self._before: dict[int, bytes] = {}

    def copy(self, source: Memory, moves: Sequence[Move] | Claims) -> PageFault | None:
        claims = claims_of(moves)
        return self._put_and_spoil(source, [move.source_page for move in claims.moves], claims)

    def place(self, staged: Memory, moves: Sequence[Move] | Claims) -> PageFault | None:
        claims = claims_of(moves)
        return self._put_and_spoil(staged, range(len(claims)), claims)

    def _put_and_spoil(self, source: Memory, source_pages: Iterable[int], claims: Claims) -> PageFault | None:
        for move, source_page in zip(claims.moves, source_pages, strict=True):
            self._before[move.page] = self.memory[move.page].tobytes()
            self.memory[move.page] = source[source_page]
        return self.check(claims)

    def check(self, moves: Sequence[Move] | Claims) -> PageFault | None:
        claims = claims_of(moves)
        before = [self._before.get(move.page, bytes(self.page_bytes)) for move in claims.moves]
        self._transport.spoil(self.memory, claims.moves, before)
        return self._inner.check(claims)
