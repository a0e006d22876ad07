"""Pulling with a fence: what the receiver-placed transports share.

Owns the threads that fetch, one lane per source, and the fence. Never speaks to a peer itself: a transport gives it connections. Laws L8
(`fence` is True only when the lane has let go of the transfer's memory), L9, L12 (nothing that a peer does is an unexpected exception).

A lane works through its jobs in order. While it is *placing*, it may write the memory of one transfer; the fence marks the transfer,
interrupts the connection and waits until the lane has let go, which needs nothing from the peer. A frozen source stops its own lane alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvseal.core.errors import KVSealError
from kvseal.handoff.proof import Landing, Move, PageFault
from kvseal.handoff.transport import FENCE_S, Landed, Lost, Report, Source

IDLE_S = 60.0
"""A lane without work for so long closes its connection and ends."""
JOIN_S = 2.0
READY_PAGES = 8
"""Made ready at a time."""


class FetchFailed(KVSealError):
    """The pages did not come, or are not what was announced (`fault`). The connection cannot be used any more."""

    def __init__(self, what: str, fault: PageFault | None = None) -> None:
        super().__init__(what)
        self.fault = fault


class Connection(Protocol):
    """To one source. `fetch` and `close` are called by the lane, `interrupt` by anybody."""

    def fetch(self, transfer: str, moves: Sequence[Move], landing: Landing) -> Iterator[int]:
        """Places and checks pages in order; yields how many more are done, after each batch. Raises `FetchFailed` or `OSError`."""
        ...

    def interrupt(self) -> None:
        """Makes a `fetch` that waits for the peer fail soon."""
        ...

    def close(self) -> None: ...


Dial = Callable[[Source], Connection]
"""Raises `FetchFailed`, `NotTrusted` or `OSError`; takes a bounded time."""


@dataclass(slots=True)
class _Job:
    transfer: str
    moves: Sequence[Move]
    landing: Landing
    pages: Sequence[int] = ()
    """Of ours, to be made ready, when nothing is fetched."""


class _Lane:
    """One source. Everything below is guarded by the lock of its `Lanes`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.jobs: deque[_Job] = deque()
        self.connection: Connection | None = None
        self.placing: str | None = None
        """The transfer whose memory the lane's thread may write now."""
        self.stopped = False

    def interrupt(self) -> None:
        if self.connection is not None:
            self.connection.interrupt()


class Lanes:
    """`wake` is called from a lane's thread whenever `poll` has something new."""

    def __init__(self, name: str, dial: Dial, wake: Callable[[], None] | None = None) -> None:
        self._name = name
        self._dial = dial
        self._wake = wake or (lambda: None)
        self._changed = threading.Condition()
        self._lanes: dict[Source, _Lane] = {}
        self._threads: set[threading.Thread] = set()
        self._lane_of: dict[str, _Lane] = {}
        """Of every transfer that may still be fetched: neither lost nor fenced."""
        self._reports: list[Report] = []

    def expect(self, transfer: str, source: Source, pages: Sequence[int], landing: Landing) -> None:
        """Dials, and has memory provided for these pages of ours, unless there is something to fetch before that is done."""
        self._queue(source, _Job(transfer, (), landing, pages))

    def fetch(self, transfer: str, source: Source, moves: Sequence[Move], landing: Landing) -> None:
        self._queue(source, _Job(transfer, moves, landing))

    def _queue(self, source: Source, job: _Job) -> None:
        with self._changed:
            lane = self._lane_of.get(job.transfer)
            if lane is None:
                lane = self._lane_of[job.transfer] = self._lane(source)
            lane.jobs.append(job)
            self._changed.notify_all()

    def poll(self) -> list[Report]:
        with self._changed:
            found, self._reports = self._reports, []
            return found

    def fence(self, transfer: str, within_s: float = FENCE_S) -> bool:
        """True: the lane has let go of the transfer's memory."""
        give_up_s = time.monotonic() + within_s
        with self._changed:
            self._forget(transfer)
            self._reports = [report for report in self._reports if report.transfer != transfer]
            while True:
                busy = [lane for lane in self._lanes.values() if lane.placing == transfer]
                if not busy:
                    return True
                for lane in busy:
                    lane.interrupt()
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)

    def stop(self) -> bool:
        """Ends every lane; open transfers are reported `Lost`. True: no thread of ours can write any more."""
        with self._changed:
            for transfer in list(self._lane_of):
                self._lost(transfer, "the transport was torn down")
            for lane in self._lanes.values():
                lane.stopped = True
                lane.interrupt()
            self._lanes.clear()
            threads = list(self._threads)
            self._changed.notify_all()
        for thread in threads:
            thread.join(JOIN_S)
        return not any(thread.is_alive() for thread in threads)

    # --- guarded by the lock ---------------------------------------------------------------------------------

    def _lane(self, source: Source) -> _Lane:
        lane = self._lanes.get(source)
        if lane is None:
            lane = self._lanes[source] = _Lane(source)
            thread = threading.Thread(target=self._run, args=(lane,), name=f"kvseal-{self._name}", daemon=True)
            self._threads.add(thread)
            thread.start()
        return lane

    def _forget(self, transfer: str) -> None:
        lane = self._lane_of.pop(transfer, None)
        if lane is not None:
            lane.jobs = deque(job for job in lane.jobs if job.transfer != transfer)

    def _lost(self, transfer: str, detail: str, fault: PageFault | None = None) -> None:
        if transfer in self._lane_of:
            self._forget(transfer)
            self._reports.append(Lost(transfer, detail, fault))

    def _next(self, lane: _Lane) -> _Job | None:
        """Waits for work; None when the lane is to end."""
        idle_s = time.monotonic() + IDLE_S
        while not lane.stopped and not lane.jobs:
            left_s = idle_s - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        if lane.stopped or not lane.jobs:
            if self._lanes.get(lane.source) is lane:
                del self._lanes[lane.source]
            return None
        return lane.jobs.popleft()

    # --- a lane's thread -------------------------------------------------------------------------------------

    def _run(self, lane: _Lane) -> None:
        while True:
            with self._changed:
                job = self._next(lane)
            if job is None:
                break
            self._work(lane, job)
        if lane.connection is not None:
            lane.connection.close()
        with self._changed:
            self._threads.discard(threading.current_thread())

    def _work(self, lane: _Lane, job: _Job) -> None:
        try:
            if lane.connection is None:
                connection = self._dial(lane.source)  # nothing of ours can be written yet: a fence need not wait for this
                with self._changed:
                    lane.connection = connection
            if job.moves:
                self._place(lane, job, lane.connection)
            else:
                self._make_ready(lane, job)
        except (KVSealError, OSError) as error:
            if job.moves:  # else whoever fetches finds out
                self._failed(lane, job, error)
        self._wake()

    def _make_ready(self, lane: _Lane, job: _Job) -> None:
        """A few pages at a time, so that neither a fence nor a fetch waits long."""
        for first in range(0, len(job.pages), READY_PAGES):
            if lane.jobs or not self._begin(lane, job):
                return
            try:
                job.landing.provide(job.pages[first : first + READY_PAGES])
            finally:
                self._let_go(lane, clean=True)

    def _place(self, lane: _Lane, job: _Job, connection: Connection) -> None:
        if not self._begin(lane, job):
            return
        done = 0
        try:
            for pages in connection.fetch(job.transfer, job.moves, job.landing):
                landed = Landed(job.transfer, job.moves[done].ordinal, pages, pages * job.landing.page_bytes)
                done += pages
                with self._changed:
                    if self._lane_of.get(job.transfer) is not lane:
                        break
                    self._reports.append(landed)
                self._wake()
        finally:
            self._let_go(lane, clean=done == len(job.moves))

    def _begin(self, lane: _Lane, job: _Job) -> bool:
        """From here until `_let_go` the lane may write the transfer's memory, unless the transfer was fenced meanwhile."""
        with self._changed:
            wanted = self._lane_of.get(job.transfer) is lane and not lane.stopped
            if wanted:
                lane.placing = job.transfer
            return wanted

    def _let_go(self, lane: _Lane, *, clean: bool) -> None:
        """Not `clean`: the connection is in the middle of something and is not used again."""
        connection = lane.connection
        if not clean and connection is not None:
            connection.close()
        with self._changed:
            if not clean:
                lane.connection = None
            lane.placing = None
            self._changed.notify_all()

    def _failed(self, lane: _Lane, job: _Job, error: KVSealError | OSError) -> None:
        with self._changed:
            fault = error.fault if isinstance(error, FetchFailed) else None
            self._lost(job.transfer, f"{type(error).__name__}: {error}", fault)


class Pulling:
    """The receiver's half of a transport whose pages are fetched by lanes: what `Transport` says of it."""

    def __init__(self, name: str, dial: Dial, wake: Callable[[], None] | None) -> None:
        self._lanes = Lanes(name, dial, wake)

    def expect(self, transfer: str, source: Source, pages: Sequence[int], landing: Landing) -> None:
        self._lanes.expect(transfer, source, pages, landing)

    def receive(self, transfer: str, source: Source, moves: Sequence[Move], landing: Landing) -> None:
        self._lanes.fetch(transfer, source, moves, landing)

    def poll(self) -> list[Report]:
        return self._lanes.poll()

    def fence(self, transfer: str) -> bool:
        return self._lanes.fence(transfer)

    def reset(self) -> bool:
        return self._lanes.stop()
