"""NIXL (the extra ``[nixl]``): pages are read from the sender's registered arena by an engine that can use RDMA.

Owns the agents. NIXL's cancel does not stop what is in flight, and no call of its API proves quiet (https://github.com/ai-dynamo/nixl,
issue 2067), so this transport has no local fence: a transfer that ends early is quiet only when every handle of it is terminal, or when
the agent that made them has been destroyed, which is what a lane does when that does not happen within `DRAIN_S`. Until then `fence` says
False and the pages stay out of use. One agent per source and lane, so that destroying one costs nobody else anything; every agent's name
is new, since a name that was known before is refused. Laws L3 (the landing compares after the bytes have come), L8, L9.

NIXL proves nothing about who connects. So an agent whose host is a loopback address listens there alone, and any other opens no port:
it uses RDMA devices only, where a page is read with the key that our own authenticated link has brought, and who may send at all is the
fabric's to say. Registered memory is never unmapped while an agent lives: `close` first, the arena after.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from kvseal.core.errors import ConfigError
from kvseal.core.hosts import addresses_of
from kvseal.handoff.lanes import FetchFailed, Pulling
from kvseal.handoff.messages import MAX_ENDPOINT_BYTES
from kvseal.handoff.proof import Claims, Landing, Memory, Move
from kvseal.handoff.transport import Source

BATCH_BYTES = 4 * 2**20
BATCH_PAGES = 64
"""Of one handle: few enough that one is terminal soon, and that its pages are still in the cache when they are checked."""
POLL_S = 0.0002
DRAIN_S = 0.5
"""For the handles of an aborted transfer to become terminal; then their agent is destroyed."""
_LOOPBACK_ALONE, _RDMA_ALONE = "NET_DEVICES=lo", "TLS=ib"
"""Of UCX: its TCP would listen for anybody, on every device."""
_UNAVAILABLE = (
    "--transport nixl goes between machines over RDMA alone (UCX's TCP would listen for anybody), and UCX finds no RDMA device here; take"
    " --transport tcp, which proves both ends, or --listen on a loopback address"
)
_MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")


def load() -> ModuleType:
    """NIXL's Python API. Raises `ConfigError` when the extra is not installed."""
    for name in _MODULES:
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        logging.getLogger(found.logger.name).setLevel(logging.WARNING)
        return found
    raise ConfigError("the transport nixl needs the extra: pip install 'kvseal[nixl]'")


def installed() -> bool:
    try:
        load()
    except ConfigError:
        return False
    return True


class _Where(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What `Nixl.endpoint` says."""

    agent: str
    metadata: bytes
    address: int
    pages: int
    page_bytes: int


class Nixl(Pulling):
    name = "nixl"
    local_fence = False

    def __init__(self, memory: Memory, *, incarnation: str, host: str = "127.0.0.1", wake: Callable[[], None] | None = None) -> None:
        self.incarnation = incarnation
        self._api = load()
        self._memory = memory
        self._inside = on_loopback(host)
        self._serving = self._agent(_serving_name(incarnation))
        super().__init__(self.name, self._dial, wake)
        self._busy = threading.Event()
        self._offered: set[str] = set()
        self._closed = False
        self._server = threading.Thread(target=self._serve, name="kvseal-nixl", daemon=True)
        self._server.start()

    @property
    def endpoint(self) -> bytes:
        pages, page_bytes = self._memory.shape
        where = _Where(_serving_name(self.incarnation), self._serving.get_agent_metadata(), _address(self._memory), pages, page_bytes)
        return msgspec.msgpack.encode(where)

    def send(self, transfer: str, receiver: str, stamps: Sequence[int]) -> None:
        """The arena is registered as a whole; this only makes us look after the engine while somebody may read."""
        self._offered.add(transfer)
        self._busy.set()

    def withdraw(self, transfer: str) -> bool:
        """True: as over shared memory, a page that is read too late bears another nonce, and its reader refuses it."""
        self._offered.discard(transfer)
        if not self._offered:
            self._busy.clear()
        return True

    def fence(self, transfer: str) -> bool:
        """False until every handle is terminal or its agent destroyed, which the lane brings about by itself within about `DRAIN_S`."""
        return super().fence(transfer)

    def close(self) -> None:
        self._lanes.stop()
        self._closed = True
        self._busy.set()
        self._server.join(2.0)

    # --- the sender's side -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Over TCP a read needs the sender's progress. A thread of ours gives it while something is offered, and sleeps otherwise: NIXL's
        own progress thread would spin for ever."""
        while True:
            self._busy.wait()
            if self._closed:
                break
            self._serving.get_new_notifs()
            time.sleep(POLL_S)
        self._serving = None

    # --- the receiver's side, on a lane's thread -------------------------------------------------------------

    def _dial(self, source: Source) -> _Reader:
        try:
            where = msgspec.msgpack.decode(source.endpoint[:MAX_ENDPOINT_BYTES], type=_Where)
        except msgspec.MsgspecError:
            raise FetchFailed("the sender's endpoint is not one of NIXL") from None
        if where.agent != _serving_name(source.incarnation):
            raise FetchFailed("the endpoint is another incarnation's")
        agent = self._agent(f"kvseal-reader-{self.incarnation}-{secrets.token_hex(8)}")
        try:
            name = agent.add_remote_agent(where.metadata)
        except self._errors() as error:
            raise FetchFailed(f"NIXL refuses the sender's metadata ({type(error).__name__})") from None
        if (name.decode() if isinstance(name, bytes) else name) != where.agent:
            raise FetchFailed("the metadata is another agent's")
        return _Reader(agent, where, self._errors())

    def _errors(self) -> tuple[type[BaseException], ...]:
        return nixl_errors(self._api)

    # --- both ------------------------------------------------------------------------------------------------

    def _agent(self, name: str) -> Any:
        api = self._api
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        agent = api.nixl_agent(name, config)
        try:
            agent.create_backend("UCX", {"engine_config": _LOOPBACK_ALONE if self._inside else _RDMA_ALONE})
        except self._errors() as error:
            raise ConfigError(_UNAVAILABLE if not self._inside else f"NIXL cannot use UCX here ({type(error).__name__})") from None
        agent.register_memory([(_address(self._memory), self._memory.nbytes, 0, "")], "DRAM")
        return agent


def on_loopback(host: str) -> bool:
    """Whether this host, name or address, is reached from this machine alone. One that nobody can resolve is."""
    try:
        return all(address.is_loopback for address in addresses_of(host))
    except OSError:
        return True


def nixl_errors(api: ModuleType) -> tuple[type[BaseException], ...]:
    """Every exception that NIXL's binding defines, and those that a binding raises for bad values."""
    binding = vars(api)["nixlBind"]
    own = [kind for kind in vars(binding).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError, ValueError, TypeError)


class _Reader:
    """One agent that reads from one source. It lives until its lane closes it; destroying it is the last resort that proves quiet."""

    def __init__(self, agent: Any, where: _Where, errors: tuple[type[BaseException], ...]) -> None:
        self._agent = agent
        self._where = where
        self._errors = errors
        self._stop = threading.Event()

    def fetch(self, transfer: str, moves: Sequence[Move], landing: Landing) -> Iterator[int]:
        where = self._where
        if where.page_bytes != landing.page_bytes or any(move.source_page >= where.pages for move in moves):
            raise FetchFailed(f"a page is outside the sender's arena of {where.pages} pages, or of another size")
        step = min(BATCH_PAGES, max(1, BATCH_BYTES // landing.page_bytes))
        claims = Claims(moves)
        for first in range(0, len(moves), step):
            batch = claims.part(first, first + step)
            self._read(batch.moves, landing)
            fault = landing.check(batch)
            if fault is not None:
                raise FetchFailed("a page is not what was announced", fault)
            yield len(batch)

    def _read(self, batch: Sequence[Move], landing: Landing) -> None:
        size, there, here = landing.page_bytes, self._where.address, _address(landing.memory)
        agent = self._agent
        try:
            ours = agent.get_xfer_descs([(here + move.page * size, size, 0) for move in batch], "DRAM")
            theirs = agent.get_xfer_descs([(there + move.source_page * size, size, 0) for move in batch], "DRAM")
            handle = agent.initialize_xfer("READ", ours, theirs, self._where.agent)
        except self._errors as error:
            raise FetchFailed(f"NIXL refuses the transfer ({type(error).__name__})") from None
        if not self._until_terminal(handle):
            self._destroy(handle)
            raise FetchFailed("the transfer was ended before it was complete")
        handle.release()

    def _until_terminal(self, handle: Any) -> bool:
        """True: DONE. False: an error, or interrupted and not terminal within `DRAIN_S`."""
        try:
            state = self._agent.transfer(handle)
            give_up_s: float | None = None
            while state == "PROC":
                if self._stop.is_set():
                    give_up_s = give_up_s or time.monotonic() + DRAIN_S
                    if time.monotonic() >= give_up_s:
                        return False
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
        except self._errors:
            return False
        return bool(state == "DONE") and not self._stop.is_set()

    def _destroy(self, handle: Any) -> None:
        """Nothing is written after this: the engine below, its connections and its requests are gone."""
        with contextlib.suppress(*self._errors):  # it goes with its agent
            handle.release()
        del handle
        self._agent = None

    def interrupt(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._agent = None


def _address(memory: Memory) -> int:
    return int(np.asarray(memory).ctypes.data)


def _serving_name(incarnation: str) -> str:
    return f"kvseal-{incarnation}"
