"""What our side of NIXL does when the engine below refuses, fails or never ends. The engine is a stand-in here, so that every answer of its
API can be given; the real one runs the conformance suite where the extra is installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvseal.core.errors import ConfigError
from kvseal.core.ids import Scope
from kvseal.exec.backends.cpu import new_arena
from kvseal.handoff import nixl
from kvseal.handoff.proof import Landing, Move
from kvseal.handoff.transport import Landed, Lost, Report, Source
from kvseal.kv.geometry import KVGeometry
from kvseal.lab.pages import digests_of, payload, write_digested

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8, page_tokens=4)
SENDER, RECEIVER = "sender-00000001", "receiver-000001"


class RefusedByEngine(Exception):
    """One of those that the binding defines."""


class Handle:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def release(self) -> None:
        self.engine.released += 1
        if self.engine.release_fails:
            raise RefusedByEngine


class Agent:
    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        engine.living.add(name)

    def __del__(self) -> None:
        self.engine.living.discard(self.name)

    def create_backend(self, backend: str, asked: dict[str, str]) -> None:
        self.engine.asked.append((backend, asked))
        if self.engine.refuses == "backend":
            raise RefusedByEngine

    def register_memory(self, *_: object) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def get_new_notifs(self) -> None:
        self.engine.looks += 1

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if self.engine.refuses == "metadata":
            raise RefusedByEngine
        return b"somebody else" if self.engine.refuses == "name" else metadata

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return places

    def initialize_xfer(self, *_: object) -> Handle:
        if self.engine.refuses == "transfer":
            raise RefusedByEngine
        return Handle(self.engine)

    def transfer(self, handle: Handle) -> str:
        return self.engine.states[0]

    def check_xfer_state(self, handle: Handle) -> str:
        if self.engine.states[-1] == "raises":
            raise RefusedByEngine
        return self.engine.states[-1]


class Engine(ModuleType):
    """What `nixl.load` returns."""

    def __init__(self) -> None:
        super().__init__("engine")
        self.living: set[str] = set()
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.states, self.refuses, self.released, self.looks, self.release_fails = ["PROC", "DONE"], "", 0, 0, False
        self.logger = SimpleNamespace(name="test-nixl")
        self.nixlBind = SimpleNamespace(refused=RefusedByEngine, version="0")
        self.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)

    def nixl_agent_config(self, **_: object) -> None: ...

    def nixl_agent(self, name: str, config: object) -> Agent:
        return Agent(self, name)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(nixl, "load", lambda: made)
    return made


class Ends:
    """A sender and a receiver on one engine."""

    def __init__(self) -> None:
        self.arenas = [new_arena(GEOMETRY, 8) for _ in range(2)]
        self.sender = nixl.Nixl(self.arenas[0].memory, incarnation=SENDER)
        self.receiver = nixl.Nixl(self.arenas[1].memory, incarnation=RECEIVER)
        self.reports: list[Report] = []

    def fetch(self, *, endpoint: bytes | None = None, page: int = 0, fold: bytes = bytes(16)) -> None:
        landing = Landing(self.arenas[1].memory, GEOMETRY, Scope(bytes(16)))
        source = Source(SENDER, self.sender.endpoint if endpoint is None else endpoint)
        self.receiver.receive("T", source, [Move(0, page, 7, 0, fold, 4)], landing)

    def ended(self) -> Landed | Lost:
        self.until(lambda: bool(self.reports.__iadd__(self.receiver.poll())))
        return self.reports[0]

    def until(self, what: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 20
        while not what():
            assert time.monotonic() < give_up_s
            time.sleep(0.001)

    def close(self) -> None:
        for end in (self.sender, self.receiver):
            end.close()


@pytest.fixture
def ends(engine: Engine) -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


@pytest.mark.parametrize("what", ["metadata", "name", "transfer"])
def test_what_the_engine_refuses_is_a_lost_transfer(what: str, ends: Ends, engine: Engine) -> None:
    engine.refuses = what
    ends.fetch()
    lost = ends.ended()
    assert isinstance(lost, Lost) and "FetchFailed" in lost.detail and lost.fault is None
    assert ends.receiver.fence("T")


@pytest.mark.parametrize("states", [["ERR"], ["PROC", "ERR"], ["PROC", "raises"]])
@pytest.mark.parametrize("release_fails", [False, True])
def test_an_error_destroys_the_agent_and_with_it_what_is_in_flight(
    states: list[str], release_fails: bool, ends: Ends, engine: Engine
) -> None:
    engine.states, engine.release_fails = states, release_fails
    ends.fetch()
    assert isinstance(ends.ended(), Lost) and engine.released == 1
    ends.until(lambda: not any("reader" in name for name in engine.living))


def test_a_transfer_that_never_ends_is_not_quiet_before_its_agent_is_gone(
    ends: Ends, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.states = ["PROC"]
    ends.fetch()
    ends.until(lambda: any("reader" in name for name in engine.living))
    while not ends.receiver.fence("T"):
        assert any("reader" in name for name in engine.living), "True came after it, False before"
    ends.until(lambda: not any("reader" in name for name in engine.living))
    assert ends.receiver.poll() == []


def test_what_is_done_and_right_has_landed(ends: Ends, engine: Engine) -> None:
    content = payload(GEOMETRY, b"content")
    digests = digests_of(GEOMETRY, content)
    ends.fetch(fold=write_digested(ends.arenas[1].memory, GEOMETRY, 0, digests, 7, Scope(bytes(16)), 0, content))  # as the engine would
    landed = ends.ended()
    assert isinstance(landed, Landed) and (landed.first_ordinal, landed.pages) == (0, 1) and engine.released == 1
    assert ends.receiver.fence("T") and ends.receiver.poll() == []


def test_bytes_that_are_not_what_was_announced_are_a_fault(ends: Ends) -> None:
    ends.fetch()
    lost = ends.ended()
    assert isinstance(lost, Lost) and lost.fault is not None and lost.fault.ordinal == 0


@pytest.mark.parametrize("how", ["no endpoint", "another incarnation", "past the arena", "another page size"])
def test_what_a_peer_says_is_checked_before_it_is_used(how: str, ends: Ends) -> None:
    where: Any = msgspec.msgpack.decode(ends.sender.endpoint, type=nixl._Where)
    if how == "no endpoint":
        ends.fetch(endpoint=b"\xc1")
    elif how == "another incarnation":
        ends.fetch(endpoint=msgspec.msgpack.encode(msgspec.structs.replace(where, agent="kvseal-somebody")))
    elif how == "past the arena":
        ends.fetch(page=8)
    else:
        ends.fetch(endpoint=msgspec.msgpack.encode(msgspec.structs.replace(where, page_bytes=64)))
    assert isinstance(ends.ended(), Lost) and not np.any(ends.arenas[1].memory)


def test_the_sender_looks_after_the_engine_while_something_is_offered_and_only_then(ends: Ends, engine: Engine) -> None:
    assert engine.looks == 0
    for transfer in ("T", "U"):
        ends.sender.send(transfer, RECEIVER, [0, 7])
    ends.until(lambda: engine.looks > 2)
    assert ends.sender.withdraw("T") and ends.sender.withdraw("T")
    looks = engine.looks
    ends.until(lambda: engine.looks > looks)
    ends.sender.withdraw("U")

    def still() -> bool:
        looks = engine.looks
        time.sleep(0.01)
        return engine.looks == looks

    ends.until(still)


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("nowhere.invalid", True), ("10.0.0.1", False), ("0.0.0.0", False)],
)
def test_beyond_a_loopback_address_no_port_is_opened(host: str, inside: bool, engine: Engine) -> None:
    made = nixl.Nixl(new_arena(GEOMETRY, 8).memory, incarnation=SENDER, host=host)
    made.close()
    assert engine.asked == [("UCX", {"engine_config": "NET_DEVICES=lo" if inside else "TLS=ib"})]


@pytest.mark.parametrize(
    ("host", "remedy"), [("127.0.0.1", "cannot use UCX here"), ("10.0.0.1", "no RDMA device here; take --transport tcp")]
)
def test_where_the_engine_finds_no_device_the_remedy_is_said(host: str, remedy: str, engine: Engine) -> None:
    engine.refuses = "backend"
    with pytest.raises(ConfigError, match=remedy):
        nixl.Nixl(new_arena(GEOMETRY, 8).memory, incarnation=SENDER, host=host)


@pytest.mark.skipif(not nixl.installed(), reason="the extra [nixl] is not installed")
@pytest.mark.skipif(any(Path("/sys/class").glob("infiniband/*")), reason="there is an RDMA device here")
def test_the_real_engine_opens_no_port_beyond_loopback() -> None:
    with pytest.raises(ConfigError, match="no RDMA device"):
        nixl.Nixl(new_arena(GEOMETRY, 8).memory, incarnation=SENDER, host="0.0.0.0")


def test_reset_and_close_leave_no_agent(engine: Engine) -> None:
    ends = Ends()
    engine.states = ["PROC"]
    ends.fetch()
    ends.until(lambda: any("reader" in name for name in engine.living))
    assert ends.receiver.reset() and isinstance(ends.ended(), Lost)
    ends.close()
    ends.until(lambda: not engine.living)


def test_the_api_is_found_by_name_or_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nixl._MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    assert not nixl.installed()
    with pytest.raises(ConfigError, match=r"kvseal\[nixl\]"):
        nixl.load()
    monkeypatch.setitem(sys.modules, nixl._MODULES[-1].partition(".")[0], ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, nixl._MODULES[-1], Engine())
    assert nixl.installed() and isinstance(nixl.load(), Engine)
