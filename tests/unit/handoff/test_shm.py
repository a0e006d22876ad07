"""Shared memory: whose arena is passed to whom, and what is refused before it is mapped."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from kvseal.exec.backends.cpu import NativeArena, new_arena
from kvseal.handoff.auth import Listener, listen
from kvseal.handoff.lanes import FetchFailed
from kvseal.handoff.shm import SharedMemory
from kvseal.handoff.transport import Source
from kvseal.kv.geometry import KVGeometry

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8, page_tokens=4)
SECRET = b"secret of the tests"


@pytest.fixture
def arena() -> NativeArena:
    return new_arena(GEOMETRY, 8, shared=True)


@pytest.fixture
def near(arena: NativeArena) -> Iterator[SharedMemory]:
    made = SharedMemory(arena.memory, arena.file, incarnation="receiver-01", secret=SECRET)
    yield made
    made.close()


def test_the_arena_is_mapped_read_only_and_shows_what_its_owner_writes(near: SharedMemory, arena: NativeArena) -> None:
    far = SharedMemory(arena.memory, arena.file, incarnation="sender-0001", secret=SECRET)
    mapped = near.map(Source("sender-0001", far.endpoint))
    arena.memory[3, 100] = 77
    assert mapped.memory[3, 100] == 77 and mapped.memory.shape == arena.memory.shape
    with pytest.raises(ValueError, match="read-only"):
        mapped.memory[3, 100] = 1
    mapped.close()
    far.close()
    far.close()


def impostor(files: list[int], shape: bytes) -> tuple[Source, threading.Thread]:
    """Holds the secret, and passes whatever the test says."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"\0kvseal-test-{os.getpid()}-{len(shape)}-{len(files)}-{os.urandom(4).hex()}"
    listener.bind(address)
    listener.listen(1)

    def serve() -> None:
        sock, _ = listener.accept()
        with sock, listener:
            listen(sock, Listener(SECRET, "arena", "sender-0001"))
            socket.send_fds(sock, [shape], files)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return Source("sender-0001", address.encode()), thread


SHAPE = struct.pack("<QQ", 8, GEOMETRY.page_bytes)


def test_an_arena_whose_size_could_change_is_not_mapped(near: SharedMemory, arena: NativeArena) -> None:
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 8 * GEOMETRY.page_bytes)
    wrong = struct.pack("<QQ", 9, GEOMETRY.page_bytes)
    for files, shape in (([loose], SHAPE), ([arena.file], wrong), ([], SHAPE), ([arena.file], SHAPE[:8])):
        source, thread = impostor(files, shape)
        with pytest.raises(FetchFailed):
            near.map(source)
        thread.join(5)
    os.close(loose)


def test_another_user_is_turned_away(near: SharedMemory, arena: NativeArena, monkeypatch: pytest.MonkeyPatch) -> None:
    far = SharedMemory(arena.memory, arena.file, incarnation="sender-0001", secret=SECRET)
    monkeypatch.setattr("kvseal.handoff.shm.os.getuid", lambda: -1)
    with pytest.raises(ConnectionError):
        near.map(Source("sender-0001", far.endpoint))
    far.close()
