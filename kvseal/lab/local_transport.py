"""A transport inside one process that moves only when it is polled: for tests that decide every step.

Owns nothing but its queue, and a prover that has no thread of its own. `sticky` makes the transport one-sided, like an engine whose cancel
does not stop writes: `fence` then says False while a transfer is in flight, and what is in flight lands later, whenever `late` is called.
Laws L8, L9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvseal.exec.backends.cpu import NativeArena
from kvseal.handoff.proof import Landing, Memory, Move
from kvseal.handoff.prover import Proof
from kvseal.handoff.transport import Landed, Lost, Report, Source


class LocalWorld:
    """The arenas that can be reached, by incarnation."""

    def __init__(self) -> None:
        self.arenas: dict[str, Memory] = {}


@dataclass
class LocalTransport:
    world: LocalWorld
    memory: Memory
    incarnation: str
    sticky: bool = False
    pages_per_poll: int = 2
    name: str = "local"
    queue: list[tuple[str, Source, list[Move], Landing]] = field(default_factory=list)
    stuck: dict[str, list[tuple[Source, list[Move], Landing]]] = field(default_factory=dict)
    """Aborted, and still to be written."""
    resets: int = 0

    @property
    def local_fence(self) -> bool:
        return not self.sticky

    @classmethod
    def maker(cls, world: LocalWorld, *, sticky: bool = False) -> _Maker:
        return _Maker(world, sticky)

    @property
    def endpoint(self) -> bytes:
        return b"local"

    def send(self, transfer: str, receiver: str, stamps: Sequence[int]) -> None:
        self.world.arenas[self.incarnation] = self.memory

    def withdraw(self, transfer: str) -> bool:
        return True

    def expect(self, transfer: str, source: Source, pages: Sequence[int], landing: Landing) -> None:
        """There is nothing to make ready."""

    def receive(self, transfer: str, source: Source, moves: Sequence[Move], landing: Landing) -> None:
        self.queue.append((transfer, source, list(moves), landing))

    def poll(self) -> list[Report]:
        if not self.queue:
            return []
        transfer, source, moves, landing = self.queue[0]
        batch = moves[: self.pages_per_poll]
        del moves[: self.pages_per_poll]
        if not moves:
            self.queue.pop(0)
        arena = self.world.arenas.get(source.incarnation)
        if arena is None:
            return [self._lost(transfer, "no such arena")]
        fault = landing.copy(arena, batch)
        if fault is not None:
            self.queue = [job for job in self.queue if job[0] != transfer]
            return [Lost(transfer, "a page is not what was announced", fault)]
        return [Landed(transfer, batch[0].ordinal, len(batch), len(batch) * landing.page_bytes)]

    def _lost(self, transfer: str, why: str) -> Lost:
        self.queue = [job for job in self.queue if job[0] != transfer]
        return Lost(transfer, why)

    def fence(self, transfer: str) -> bool:
        mine = [job for job in self.queue if job[0] == transfer]
        self.queue = [job for job in self.queue if job[0] != transfer]
        if self.sticky and mine:
            self.stuck.setdefault(transfer, []).extend(job[1:] for job in mine)
        return transfer not in self.stuck

    def late(self, transfer: str) -> None:
        """What was in flight when it was aborted is written now; after that the transfer is quiet."""
        for source, moves, landing in self.stuck.pop(transfer):
            landing.copy(self.world.arenas[source.incarnation], moves)

    def reset(self) -> bool:
        self.resets += 1
        self.stuck.clear()
        self.queue.clear()
        return True

    def close(self) -> None:
        self.queue.clear()


@dataclass(frozen=True)
class _Maker:
    world: LocalWorld
    sticky: bool

    def __call__(self, arena: NativeArena, incarnation: str) -> LocalTransport:
        return LocalTransport(self.world, arena.memory, incarnation, self.sticky)


class ProverAtOnce:
    """Compares when it is asked, and tells when it is asked again: nothing happens by itself. `held`: it goes on reading."""

    def __init__(self) -> None:
        self.held = False
        self._found: list[Proof] = []

    def begin(self, handoff: str, landing: Landing, moves: Sequence[Move]) -> None:
        self._found.append(Proof(handoff, landing.check(moves)))

    def done(self) -> list[Proof]:
        if self.held:
            return []
        found, self._found = self._found, []
        return found

    def let_go(self, handoff: str) -> bool:
        reading = self.held and any(proof.handoff == handoff for proof in self._found)
        self._found = [proof for proof in self._found if proof.handoff != handoff or reading]
        return not reading

    def close(self) -> None:
        self._found.clear()
