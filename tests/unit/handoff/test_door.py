"""Who floods a door pushes out its own callers, who dawdles is thrown out, and nothing that the system refuses closes it for good."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvseal.handoff.auth import read_exactly
from kvseal.handoff.door import Door

WORD = b"open"


class House:
    """Greets whoever knows the word, and keeps it inside until it leaves."""

    def __init__(self) -> None:
        self.inside = 0
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.door: Door[bytes] = Door(listener, self.prove, self.serve)

    def prove(self, sock: socket.socket) -> bytes:
        word = read_exactly(sock, len(WORD))
        if word != WORD:
            raise ConnectionError("a stranger")
        return word

    def serve(self, sock: socket.socket, who: bytes) -> None:
        sock.settimeout(None)
        sock.sendall(who)
        self.inside += 1
        sock.recv(1)

    def caller(self) -> socket.socket:
        return socket.create_connection(self.address, 10)

    def comes_in(self) -> socket.socket:
        sock = self.caller()
        sock.sendall(WORD)
        assert read_exactly(sock, len(WORD)) == WORD
        return sock


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.door.close()


def closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_flood_pushes_out_itself_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.handoff.door.MAX_STRANGERS", 8)
    monkeypatch.setattr("kvseal.handoff.door.HANDSHAKE_S", 60.0)
    friend = house.comes_in()
    flood = [house.caller() for _ in range(40)]
    try:
        other = house.comes_in()
        assert all(closed(sock) for sock in flood[:32]), "the first ones make room"
        for sock in (friend, other):
            sock.settimeout(0.05)
            assert not closed(sock)
        assert len(house.door._strangers) <= 8
        other.close()
    finally:
        for sock in (friend, *flood):
            sock.close()


def test_who_speaks_slowly_gets_no_more_time_than_who_is_silent(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.handoff.door.HANDSHAKE_S", 0.4)
    house.comes_in().close()  # the door has taken up the shorter time
    began_s = time.monotonic()
    with house.caller() as sock:
        sock.settimeout(0.15)
        for byte in WORD * 10:
            try:
                sock.sendall(bytes([byte ^ 1]) if byte == WORD[-1] else bytes([byte]))
                if closed(sock):
                    break
            except ConnectionError:
                break
        else:
            raise AssertionError("it is inside still")
    assert time.monotonic() - began_s < 5.0
    house.comes_in().close()


def test_only_so_many_are_inside(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.handoff.door.MAX_CALLERS", 2)
    inside = [house.comes_in(), house.comes_in()]
    with house.caller() as third:
        third.sendall(WORD)
        assert closed(third)
    inside.pop().close()
    give_up_s = time.monotonic() + 10
    while len(house.door._inside) > 1 and time.monotonic() < give_up_s:
        time.sleep(0.005)
    house.comes_in().close()
    inside.pop().close()


class _Poor:
    """A listener of a system that has run out of files for a moment."""

    def __init__(self, listener: socket.socket, refusals: int) -> None:
        self._listener, self.refusals = listener, refusals
        self.settimeout, self.listen, self.close, self.shutdown = listener.settimeout, listener.listen, listener.close, listener.shutdown

    def accept(self) -> tuple[socket.socket, object]:
        sock, address = self._listener.accept()
        if self.refusals:
            self.refusals -= 1
            sock.close()
            raise OSError(errno.EMFILE, "too many open files")
        return sock, address


def test_a_system_without_files_or_threads_to_spare_does_not_close_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    house = House()
    poor = Door(_Poor(listener, 2), house.prove, house.serve)  # type: ignore[arg-type]
    house.address = listener.getsockname()
    try:
        for _ in range(2):
            with house.caller() as sock:
                assert closed(sock)
        start = threading.Thread.start
        refusals = [True]

        def refuses_once(self: threading.Thread) -> None:
            if refusals and self.name == "kvseal-door":
                refusals.pop()
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", refuses_once)
        with house.caller() as sock:
            assert closed(sock)
        house.comes_in().close()
    finally:
        listener.close()
        poor._closed = True
        house.door.close()


def test_closing_the_door_sends_everybody_away(house: House) -> None:
    friend, stranger = house.comes_in(), house.caller()
    house.door.close()
    for sock in (friend, stranger):
        assert closed(sock)
        sock.close()
    with pytest.raises(OSError):
        house.caller()


def test_who_comes_as_it_closes_or_was_thrown_out_as_tls_began_is_sent_away(house: House) -> None:
    house.door.close()
    for leave in (lambda sock: house.door._came(sock), lambda sock: house.door._renamed(sock, sock)):
        ours, theirs = socket.socketpair()
        leave(theirs)
        assert closed(ours)
        ours.close()
        theirs.close()
