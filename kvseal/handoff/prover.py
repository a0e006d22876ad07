"""Who compares, once more and after the fence, what stands in our own memory with what was announced.

Owns a thread for it, so that the engine goes on with other requests meanwhile: the proof reads every byte of a hand-off. Never decides
anything: what it finds is the session's to judge, on the engine's thread. Laws L8 (`let_go` is True only when nothing reads the pages for
a proof any more; until then they are not reused), L9, L12 (a proof that could not be made is a failure, not an exception elsewhere).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvseal.core.errors import KVSealError
from kvseal.handoff.proof import Landing, Move, PageFault


class Proof(NamedTuple):
    """What a proof has come to. `fault` None: every seal and every digest is as announced."""

    handoff: str
    fault: PageFault | str | None


class Prover(Protocol):
    """Methods are called from one thread (the engine's)."""

    def begin(self, handoff: str, landing: Landing, moves: Sequence[Move]) -> None:
        """Compares these pages. Returns at once; `done` tells."""
        ...

    def done(self) -> list[Proof]:
        """What has been found since the last call. Never waits."""
        ...

    def let_go(self, handoff: str) -> bool:
        """Its proof is not wanted any more, and is not told. True: nothing reads its pages any more. Idempotent."""
        ...

    def close(self) -> None:
        """Nothing reads any page after this."""
        ...


class ProverThread:
    """One thread, started when it is first needed; one proof after the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[tuple[str, Landing, Sequence[Move]]] = deque()
        self._reading: str | None = None
        self._found: list[Proof] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, handoff: str, landing: Landing, moves: Sequence[Move]) -> None:
        with self._changed:
            self._jobs.append((handoff, landing, moves))
            self._changed.notify_all()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvseal-prover", daemon=True)
                self._thread.start()

    def done(self) -> list[Proof]:
        with self._changed:
            found, self._found = self._found, []
            return found

    def let_go(self, handoff: str) -> bool:
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job[0] != handoff)
            self._found = [proof for proof in self._found if proof.handoff != handoff]
            return self._reading != handoff

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                handoff, landing, moves = self._jobs.popleft()
                self._reading = handoff
            proof = Proof(handoff, _compared(landing, moves))
            with self._changed:
                self._reading = None
                self._found.append(proof)


def _compared(landing: Landing, moves: Sequence[Move]) -> PageFault | str | None:
    try:
        return landing.check(moves)
    except (KVSealError, ValueError, MemoryError) as error:
        return type(error).__name__
