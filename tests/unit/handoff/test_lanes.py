"""Lanes: the fence says True only when the lane has let go, and lanes end by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.exec.backends.cpu import new_arena
from kvseal.handoff.lanes import FetchFailed, Lanes
from kvseal.handoff.proof import Landing, Move
from kvseal.handoff.transport import Landed, Lost, Source
from kvseal.kv.geometry import KVGeometry

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8, page_tokens=4)
SOURCE = Source("sender-0001", b"there")
MOVES = [Move(ordinal, ordinal, 7, ordinal, bytes(16), 16) for ordinal in range(4)]


class Stubborn:
    """A connection that hears nothing until it is released."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        self.interrupts = 0
        self.closed = 0

    def fetch(self, transfer: str, moves: Sequence[Move], landing: Landing) -> Iterator[int]:
        self.began.set()
        self.go.wait(20)
        for _ in moves:
            yield 1

    def interrupt(self) -> None:
        self.interrupts += 1

    def close(self) -> None:
        self.closed += 1


def landing() -> Landing:
    return Landing(new_arena(GEOMETRY, 8).memory, GEOMETRY, Scope(bytes(16)))


def until(what: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 20
    while not what():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def test_the_fence_is_not_true_before_the_lane_has_let_go() -> None:
    connection = Stubborn()
    lanes = Lanes("test", lambda source: connection)
    lanes.fetch("handoff-1", SOURCE, MOVES, landing())
    assert connection.began.wait(20)
    assert not lanes.fence("handoff-1", within_s=0.01)
    assert connection.interrupts, "it was told"
    connection.go.set()
    until(lambda: lanes.fence("handoff-1"))
    assert not lanes.poll() and connection.closed == 1, "what is in the middle of something is not used again"
    assert lanes.stop()


def test_a_fence_while_dialling_waits_for_nothing() -> None:
    go, dialled = threading.Event(), threading.Event()

    def dial(source: Source) -> Stubborn:
        dialled.set()
        go.wait(20)
        return Stubborn()

    lanes = Lanes("test", dial)
    lanes.fetch("handoff-1", SOURCE, MOVES, landing())
    assert dialled.wait(20)
    assert lanes.fence("handoff-1", within_s=0.0), "nothing of ours can be written yet"
    go.set()
    assert lanes.stop()


def test_stop_reports_what_is_open_and_works_while_dialling() -> None:
    go, dialled = threading.Event(), threading.Event()

    def dial(source: Source) -> Stubborn:
        dialled.set()
        go.wait(20)
        raise FetchFailed("nobody there")

    lanes = Lanes("test", dial)
    lanes.fetch("handoff-1", SOURCE, MOVES, landing())
    assert dialled.wait(20)
    threading.Timer(0.05, go.set).start()
    assert lanes.stop()
    (lost,) = lanes.poll()
    assert isinstance(lost, Lost) and "torn down" in lost.detail


def test_a_lane_that_cannot_be_stopped_is_not_called_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.handoff.lanes.JOIN_S", 0.01)
    connection = Stubborn()
    lanes = Lanes("test", lambda source: connection)
    lanes.fetch("handoff-1", SOURCE, MOVES, landing())
    assert connection.began.wait(20)
    assert not lanes.stop()
    connection.go.set()


def test_an_idle_lane_ends_and_a_new_one_dials_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.handoff.lanes.IDLE_S", 0.02)
    made: list[Stubborn] = []

    def dial(source: Source) -> Stubborn:
        made.append(Stubborn())
        made[-1].go.set()
        return made[-1]

    lanes = Lanes("test", dial)
    for number in (1, 2):
        lanes.fetch(f"handoff-{number}", SOURCE, MOVES, landing())
        until(lambda number=number: len(made) == number and made[-1].closed == 1)
    assert sum(report.pages for report in lanes.poll() if isinstance(report, Landed)) == 8
    assert lanes.stop()


def test_a_page_that_changed_after_it_was_proven_is_our_own_bug() -> None:
    with pytest.raises(LawBroken, match="after it was proven"):
        landing().restamp(MOVES, [1, 2, 3, 4])


# --- getting ready -------------------------------------------------------------------------------------------


class Pages:
    """A landing that notes which pages were provided."""

    page_bytes = 64

    def __init__(self) -> None:
        self.provided: list[int] = []
        self.go = threading.Event()
        self.began = threading.Event()

    def provide(self, pages: Sequence[int]) -> None:
        self.began.set()
        self.go.wait(20)
        self.provided += pages


def test_what_is_expected_is_dialled_and_provided_before_it_is_fetched() -> None:
    connection, pages = Stubborn(), Pages()
    connection.go.set()
    pages.go.set()
    dialled: list[Source] = []
    lanes = Lanes("test", lambda source: (dialled.append(source), connection)[1])
    lanes.expect("handoff-1", SOURCE, range(20), pages)  # type: ignore[arg-type]
    until(lambda: len(pages.provided) == 20)
    assert not lanes.poll() and not connection.began.is_set(), "nothing was fetched, and nothing is told"
    lanes.fetch("handoff-1", SOURCE, MOVES, landing())
    until(lambda: any(isinstance(report, Landed) for report in lanes.poll()))
    assert dialled == [SOURCE] and not connection.closed
    assert lanes.stop()


def test_getting_ready_gives_way_to_a_fetch_and_to_a_fence() -> None:
    connection, pages = Stubborn(), Pages()
    connection.go.set()
    lanes = Lanes("test", lambda source: connection)
    lanes.expect("handoff-1", SOURCE, range(100), pages)  # type: ignore[arg-type]
    assert pages.began.wait(20)
    assert not lanes.fence("handoff-1", within_s=0.01), "memory of ours is being touched"
    lanes.expect("handoff-2", SOURCE, range(100, 200), pages)  # type: ignore[arg-type]
    lanes.fetch("handoff-2", SOURCE, MOVES, landing())
    pages.go.set()
    until(lambda: any(isinstance(report, Landed) and report.transfer == "handoff-2" for report in lanes.poll()))
    assert lanes.fence("handoff-1") and len(pages.provided) < 100
    assert lanes.stop()


def test_who_cannot_be_reached_is_told_when_something_is_fetched() -> None:
    tries: list[Source] = []

    def dial(source: Source) -> Stubborn:
        tries.append(source)
        raise FetchFailed("nobody is there")

    lanes = Lanes("test", dial)
    lanes.expect("handoff-1", SOURCE, range(4), Pages())  # type: ignore[arg-type]
    until(lambda: len(tries) == 1)
    assert not lanes.poll()
    lanes.fetch("handoff-1", SOURCE, MOVES, landing())
    until(lambda: any(isinstance(report, Lost) for report in lanes.poll()))
    assert lanes.stop()
