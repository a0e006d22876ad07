"""The TCP transport against peers that lie, stall and stop in the middle, and inside TLS."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvseal.core.config import TLSFiles
from kvseal.core.ids import Scope
from kvseal.exec.backends.cpu import NativeArena, new_arena
from kvseal.handoff.auth import Dialer, Listener, dial, listen, read_exactly
from kvseal.handoff.messages import packed_stamps
from kvseal.handoff.proof import Landing, Move
from kvseal.handoff.tcp import STAGE_BYTES, TCP, TLS
from kvseal.handoff.transport import Landed, Lost, Report, Source
from kvseal.kv.geometry import KVGeometry
from kvseal.lab.pages import digests_of, payload, write_digested

from ..node.certificates import IMPOSTOR, OTHERS, OURS, contexts

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=16, page_tokens=4)
SCOPE = Scope(b"0123456789abcdef")
SECRET = b"secret of the tests"
PAGES = 8
ASK = struct.Struct("<4sIQ64s")
GIVE = struct.Struct("<4sHHQQ")


def filled(pages: int = PAGES, geometry: KVGeometry = GEOMETRY) -> tuple[NativeArena, list[Move]]:
    arena = new_arena(geometry, pages)
    content = payload(geometry, b"content")
    digests = digests_of(geometry, content)
    folds = [write_digested(arena.memory, geometry, page, digests, 100 + page, SCOPE, page, content) for page in range(pages)]
    return arena, [Move(page, page, 100 + page, page, folds[page], geometry.page_tokens) for page in range(pages)]


def stamps_of(moves: list[Move]) -> list[int]:
    return [word for move in moves for word in (move.source_page, move.source_nonce)]


class Near:
    def __init__(self, tls: TLS | None = None, pages: int = PAGES, geometry: KVGeometry = GEOMETRY) -> None:
        self.arena = new_arena(geometry, pages)
        self.transport = TCP(self.arena.memory, incarnation="receiver-01", secret=SECRET, tls=tls)
        self.landing = Landing(self.arena.memory, geometry, SCOPE)
        self.reports: list[Report] = []

    def fetch(self, source: Source, moves: list[Move], transfer: str = "handoff-1") -> Report:
        """Runs to the first loss, or until everything has landed."""
        self.transport.receive(transfer, source, moves, self.landing)
        give_up_s, landed = time.monotonic() + 20, 0
        while time.monotonic() < give_up_s:
            for report in self.transport.poll():
                if isinstance(report, Lost):
                    return report
                landed += report.pages
                if landed == len(moves):
                    return report
            time.sleep(0.001)
        raise AssertionError("neither landed nor lost")

    @property
    def untouched(self) -> bool:
        return not self.arena.memory.any()


@pytest.fixture
def near() -> Iterator[Near]:
    made = Near()
    yield made
    made.transport.close()


class Liar:
    """A sender that holds the secret and answers the first request with whatever the test says."""

    def __init__(self, answer: Callable[[socket.socket, int, int], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.source = Source("sender-0001", f"{self._listener.getsockname()[1]} 127.0.0.1".encode())
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            listen(sock, Listener(SECRET, "pages", "sender-0001"))
            _magic, pages, batch, _name = ASK.unpack(read_exactly(sock, ASK.size))
            read_exactly(sock, 16 * pages)
            self._answer(sock, pages, batch)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(5)


SIZE = GEOMETRY.page_bytes
LIES: dict[str, Callable[[socket.socket, int, int], None]] = {
    "magic": lambda sock, pages, batch: sock.sendall(GIVE.pack(b"HTTP", 0, pages, batch, pages * SIZE) + bytes(pages * SIZE)),
    "another batch": lambda sock, pages, batch: sock.sendall(GIVE.pack(b"KVG1", 0, pages, batch + 1, pages * SIZE) + bytes(pages * SIZE)),
    "refused": lambda sock, pages, batch: sock.sendall(GIVE.pack(b"KVG1", 1, 0, batch, 0)),
    "no pages": lambda sock, pages, batch: sock.sendall(GIVE.pack(b"KVG1", 0, 0, batch, 0)),
    "more pages": lambda sock, pages, batch: sock.sendall(GIVE.pack(b"KVG1", 0, pages + 1, batch, (pages + 1) * SIZE)),
    "another size": lambda sock, pages, batch: sock.sendall(GIVE.pack(b"KVG1", 0, pages, batch, pages * SIZE - 64)),
    "nothing": lambda sock, pages, batch: None,
    "half a header": lambda sock, pages, batch: sock.sendall(b"KVG1"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_is_not_the_answer_is_refused_before_a_byte_is_placed(near: Near, lie: str) -> None:
    liar = Liar(LIES[lie])
    _, moves = filled()
    assert isinstance(near.fetch(liar.source, moves), Lost)
    assert near.transport.fence("handoff-1") and near.untouched
    liar.close()


def test_a_stream_that_stops_in_the_middle_of_a_page_is_lost(near: Near) -> None:
    liar = Liar(lambda sock, pages, batch: sock.sendall(GIVE.pack(b"KVG1", 0, pages, batch, pages * SIZE) + b"x" * (SIZE + 100)))
    _, moves = filled()
    assert isinstance(near.fetch(liar.source, moves), Lost)
    liar.close()


@pytest.mark.parametrize("piece_bytes", [1_000, SIZE - 1, SIZE + 64])
@pytest.mark.parametrize("groups", [(8,), (1, 3, 4), (7, 1)])
def test_groups_and_packets_may_be_cut_anywhere(near: Near, groups: tuple[int, ...], piece_bytes: int) -> None:
    arena, moves = filled()

    def cut(sock: socket.socket, _pages: int, batch: int) -> None:
        said, first = b"", 0
        for pages in groups:
            said += GIVE.pack(b"KVG1", 0, pages, batch, pages * SIZE) + arena.memory[first : first + pages].tobytes()
            first += pages
        for at in range(0, len(said), piece_bytes):
            sock.sendall(said[at : at + piece_bytes])

    liar = Liar(cut)
    assert isinstance(near.fetch(liar.source, moves), Landed)
    assert np.array_equal(near.arena.memory, arena.memory)
    liar.close()


def test_bytes_that_are_not_the_pages_are_refused_by_their_seals(near: Near) -> None:
    liar = Liar(lambda sock, pages, batch: sock.sendall(GIVE.pack(b"KVG1", 0, pages, batch, pages * SIZE) + b"x" * (pages * SIZE)))
    _, moves = filled()
    lost = near.fetch(liar.source, moves)
    assert isinstance(lost, Lost) and lost.fault is not None and lost.fault.ordinal == 0
    liar.close()


# --- the sender's side -----------------------------------------------------------------------------------------


@pytest.fixture
def far() -> Iterator[TCP]:
    arena, moves = filled()
    transport = TCP(arena.memory, incarnation="sender-0001", secret=SECRET)
    transport.send("handoff-1", "receiver-01", stamps_of(moves))
    yield transport
    transport.close()


def source_of(transport: TCP) -> Source:
    return Source(transport.incarnation, transport.endpoint)


def test_only_what_is_offered_to_this_receiver_is_given(near: Near, far: TCP) -> None:
    _, moves = filled()
    assert isinstance(near.fetch(source_of(far), moves), Landed)
    for transfer, wanted in (("handoff-2", moves), ("handoff-1", [moves[0]._replace(source_nonce=7)])):
        lost = near.fetch(source_of(far), wanted, transfer)
        assert isinstance(lost, Lost) and "does not offer" in lost.detail
    assert far.withdraw("handoff-1")
    far.send("handoff-3", "receiver-02", stamps_of(moves))
    for transfer in ("handoff-1", "handoff-3"):
        assert isinstance(near.fetch(source_of(far), moves, f"{transfer}"), Lost)


def test_a_page_that_was_reused_is_not_given(near: Near) -> None:
    arena, moves = filled()
    far = TCP(arena.memory, incarnation="sender-0001", secret=SECRET)
    far.send("handoff-1", "receiver-01", stamps_of(moves))
    arena.memory[3, 8] ^= 1
    lost = near.fetch(source_of(far), moves)
    assert isinstance(lost, Lost) and lost.fault is None and near.untouched
    far.close()


def trusted(far: TCP) -> socket.socket:
    sock = socket.create_connection((far.host, far.port), 5)
    dial(sock, Dialer(SECRET, "pages", "receiver-01", "sender-0001"))
    return sock


@pytest.mark.parametrize("request_", [b"x" * 80, ASK.pack(b"KVA1", 0, 1, b"handoff-1"), ASK.pack(b"KVA1", 2**31, 1, b"handoff-1")])
def test_a_request_that_is_none_ends_the_connection(far: TCP, request_: bytes) -> None:
    with trusted(far) as sock:
        sock.sendall(request_)
        assert not sock.recv(1)


def test_a_stranger_gets_nothing_but_random_numbers(far: TCP) -> None:
    with socket.create_connection((far.host, far.port), 5) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(500))
        assert not _all_of(sock)
    with socket.create_connection((far.host, far.port), 5) as sock:
        sock.sendall(Dialer(b"another secret, as long", "pages", "receiver-01", "sender-0001").greeting() + bytes(32))
        assert len(_all_of(sock)) <= 128


def _all_of(sock: socket.socket) -> bytes:
    found = b""
    while True:
        try:
            data = sock.recv(4096)
        except ConnectionError:
            return found
        if not data:
            return found
        found += data


def test_a_receiver_that_reads_nothing_does_not_hold_the_senders_pages() -> None:
    """A full network: the sender is stuck in the middle of a page, and withdrawing frees it."""
    geometry = KVGeometry(layers=30, kv_heads=4, head_dim=48)
    arena, moves = filled(120, geometry)
    far = TCP(arena.memory, incarnation="sender-0001", secret=SECRET)
    far.send("handoff-1", "receiver-01", stamps_of(moves))
    with trusted(far) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(ASK.pack(b"KVA1", len(moves), 1, b"handoff-1") + packed_stamps(stamps_of(moves)))
        assert read_exactly(sock, GIVE.size)
        time.sleep(0.1)
        give_up_s = time.monotonic() + 10
        while not far.withdraw("handoff-1"):
            assert time.monotonic() < give_up_s
    far.close()


def test_a_connection_is_used_again_and_a_frozen_one_is_left(near: Near, far: TCP) -> None:
    _, moves = filled()
    for _ in range(3):
        assert isinstance(near.fetch(source_of(far), moves), Landed)
    assert len(far._door._inside) == 1


SIZES = {
    "several groups of many pages": (300, KVGeometry(layers=1, kv_heads=1, head_dim=16, page_tokens=8)),
    "a few pages at a time": (40, KVGeometry(layers=12, kv_heads=4, head_dim=48)),
    "a page that is more than is read at a time": (3, KVGeometry(layers=176, kv_heads=4, head_dim=48)),
}


@pytest.mark.parametrize("inside_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_of_every_size(size: str, inside_tls: bool) -> None:
    pages, geometry = SIZES[size]
    assert (geometry.page_bytes > STAGE_BYTES) is (pages == 3)
    way = contexts(OURS) if inside_tls else None
    arena, moves = filled(pages, geometry)
    far, near = TCP(arena.memory, incarnation="sender-0001", secret=SECRET, tls=way), Near(way, pages, geometry)
    far.send("handoff-1", "receiver-01", stamps_of(moves))
    try:
        landed = near.fetch(source_of(far), [move._replace(page=pages - 1 - move.page) for move in moves])
        assert isinstance(landed, Landed) and np.array_equal(near.arena.memory[::-1], arena.memory)
    finally:
        far.close()
        near.transport.close()


# --- TLS -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls() -> TLS:
    return contexts(OURS)


@pytest.mark.parametrize("files", [OTHERS, IMPOSTOR], ids=["another-authority", "another-certificate"])
def test_nobody_of_another_authority_gets_a_page(tls: TLS, files: TLSFiles) -> None:
    arena, moves = filled()
    far = TCP(arena.memory, incarnation="sender-0001", secret=SECRET, tls=tls)
    far.send("handoff-1", "receiver-01", stamps_of(moves))
    near = Near(contexts(files))
    try:
        lost = near.fetch(source_of(far), moves)
        assert isinstance(lost, Lost) and ("SSL" in lost.detail or "Connection" in lost.detail), lost
        assert near.untouched
    finally:
        far.close()
        near.transport.close()


def test_pages_inside_tls_and_nobody_without_a_certificate(tls: TLS, near: Near) -> None:
    arena, moves = filled()
    far = TCP(arena.memory, incarnation="sender-0001", secret=SECRET, tls=tls)
    far.send("handoff-1", "receiver-01", stamps_of(moves))
    inside = Near(tls)
    try:
        assert isinstance(inside.fetch(source_of(far), moves), Landed)
        assert np.array_equal(inside.arena.memory, arena.memory)
        assert isinstance(near.fetch(source_of(far), moves), Lost), "plain text finds nobody"
        assert near.untouched
    finally:
        far.close()
        inside.transport.close()


def test_inside_tls_a_fence_ends_a_stalled_read(tls: TLS) -> None:
    geometry = KVGeometry(layers=30, kv_heads=4, head_dim=48)
    arena, moves = filled(200, geometry)
    far = TCP(arena.memory, incarnation="sender-0001", secret=SECRET, tls=tls)
    far.send("handoff-1", "receiver-01", stamps_of(moves))
    near = Near(tls, 200, geometry)
    try:
        near.transport.receive("handoff-1", source_of(far), moves, near.landing)
        time.sleep(0.05)
        give_up_s = time.monotonic() + 10
        while not near.transport.fence("handoff-1"):
            assert time.monotonic() < give_up_s
        near.arena.memory[:] = 1
        time.sleep(0.1)
        assert (near.arena.memory == 1).all()
    finally:
        near.transport.close()
        far.close()
