"""The engine as a process of its own: ``python -m kvseal.node.engine_process FD``.

Owns the loop between one socket and one engine. The socket is one end of a socketpair that the parent made: no path, no port. The first
frame carries the whole configuration. Never opens a file itself, never logs content, and never outlives its parent (end of file ends it).

The one place that catches everything: an exception that nobody expected (a `LawBroken` above all) means that the engine's own state
can no longer be trusted, so it is logged by type and place, and the process ends with status 70. The parent tells every open request and
starts a fresh engine (L12).

Buffering: what the socket does not take at once waits in an outbox. Above `MAX_OUTBOX_BYTES` the engine stops stepping until the parent has
read: the parent reads always, so this happens only when the parent itself hangs, and memory stays bounded then too.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvseal.core.config import EngineConfig
from kvseal.core.errors import BrokenSeal, Draining, LawBroken, PoolTooSmall, SetupError, Unavailable
from kvseal.core.events import EndedEvent, Event
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Failed, Refused
from kvseal.core.request import Request
from kvseal.node import messages as m
from kvseal.node.peer_messages import NodeCard
from kvseal.node.report import EngineStats, StartReport

MAX_OUTBOX_BYTES = 16 * 2**20
RECEIVE_BYTES = 256 * 1024
EMPTY_STEP_WAIT_MS = 5
"""With work but nothing to compute (a page still drains), look again after this."""

EXIT_SETUP_FAILED = 3
EXIT_UNTRUSTED = 70

_log = logging.getLogger("kvseal.node.engine")


class EngineDoor(Protocol):
    """What the loop needs of an engine."""

    @property
    def report(self) -> StartReport: ...

    @property
    def card(self) -> NodeCard | None: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    def submit(self, request: Request) -> Refused | None: ...

    def cancel(self, request_id: RequestId) -> None: ...

    def finish(self, request_id: RequestId) -> None: ...

    def step(self) -> list[Event]: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


LoopMaker = Callable[[socket.socket, EngineDoor, socket.socket], "EngineLoop"]


class Gone(Exception):
    """The parent closed its end."""


class EngineLoop:
    """Messages in, steps, events out, until the parent goes or a drain is complete."""

    def __init__(self, sock: socket.socket, engine: EngineDoor, wakeup: socket.socket) -> None:
        self._sock = sock
        self._engine = engine
        self._wakeup = wakeup
        self._frames = m.Frames()
        self._outbox = bytearray()
        self._draining = False
        sock.setblocking(False)
        wakeup.setblocking(False)
        self._wants_out = False
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._poller.register(wakeup, select.POLLIN)

    def drain(self) -> None:
        self._draining = True

    def run(self) -> None:
        while True:
            work = self._engine.has_work
            if self._draining and not work and not self._outbox:
                return
            blocked = len(self._outbox) > MAX_OUTBOX_BYTES
            self._poll(0 if work and not blocked else None)
            if self._engine.has_work and len(self._outbox) <= MAX_OUTBOX_BYTES:
                self._step()

    def _step(self) -> None:
        before = self._engine.steps
        events = self._engine.step()
        for event in events:
            if type(event) is EndedEvent and isinstance(event.outcome, Failed):
                _log_failure(event.request_id, event.outcome.error)
        if events or self._engine.steps != before:
            self._send(m.pack_events(self._engine.steps, events))
        else:
            self._poll(EMPTY_STEP_WAIT_MS)

    def _poll(self, timeout_ms: int | None) -> None:
        """Takes what has arrived and gives away what the socket will have. None waits for either."""
        wants_out = bool(self._outbox)
        if wants_out is not self._wants_out:
            self._wants_out = wants_out
            self._poller.modify(self._sock, select.POLLIN | (select.POLLOUT if wants_out else 0))
        found = self._poller.poll(timeout_ms)
        if not found:
            return
        ready = dict(found)
        if self._wakeup.fileno() in ready:
            self._wakeup.recv(4096)
        happened = ready.get(self._sock.fileno(), 0)
        if happened & select.POLLOUT:
            self._flush()
        if happened & (select.POLLIN | select.POLLHUP | select.POLLERR):
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            raise Gone from None
        if not data:
            raise Gone
        for body in self._frames.feed(data):
            self._handle(m.decode_to_engine(body))

    def _handle(self, message: m.ToEngine) -> None:
        match message:
            case m.Submit(request):
                if self._draining:
                    self._refuse_draining(request.request_id)
                elif (refused := self._engine.submit(request)) is not None:
                    self._refuse(request.request_id, refused)
            case m.Cancel(request_id):
                self._engine.cancel(request_id)
            case m.Finish(request_id):
                self._engine.finish(request_id)
            case m.Ping():
                self._send(m.Pong(self._engine.steps, self._engine.has_work))
            case m.AskStats(ask):
                self._send(m.Stats(ask, self._engine.stats()))
            case m.Drain():
                self.drain()
            case m.Hello():
                raise m.ProtocolBroken("a second hello")
            case _:
                raise m.ProtocolBroken(f"{type(message).__name__} is for a node of several, and this engine stands by itself")

    def _refuse_draining(self, request_id: RequestId) -> None:
        self._refuse(request_id, Refused(Draining("the server is shutting down")))

    def _refuse(self, request_id: RequestId, refused: Refused) -> None:
        self._send(m.pack_events(self._engine.steps, (EndedEvent(request_id, refused),)))

    def _send(self, message: m.FromEngine) -> None:
        self._outbox += m.frame(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                sent = self._sock.send(self._outbox)
                del self._outbox[:sent]
        except BlockingIOError:
            return
        except ConnectionError:
            raise Gone from None


def serve(sock: socket.socket, build: Callable[[EngineConfig], EngineDoor], make_loop: LoopMaker | None = None) -> int:
    """Says hello, builds the engine, runs it. Returns the process's exit status."""
    wake_reader, wake_writer = socket.socketpair()
    wake_writer.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: terminated.append(number))
    signal.set_wakeup_fd(wake_writer.fileno())
    try:
        config = _hello(sock)
        try:
            engine = build(config)
        except MemoryError:
            raise PoolTooSmall("the machine refused the memory for the KV pool; give a smaller --pool-tokens or --kv-memory") from None
    except SetupError as error:
        sock.sendall(m.frame(m.SetupFailed(m.pack_error(error))))
        return EXIT_SETUP_FAILED
    except Gone:
        return 0
    try:
        sock.sendall(m.frame(m.Ready(m.PROTOCOL_VERSION, engine.report, engine.card)))
        loop = (make_loop or EngineLoop)(sock, engine, wake_reader)
        gc.freeze()  # What is here now stays: later collections need not look at it.
        signal.signal(signal.SIGTERM, lambda _number, _frame: loop.drain())
        if terminated:
            loop.drain()
        if config.node is None or config.node.memory_share == 1.0:  # Else other nodes of this machine have the same first core.
            stay_on_first_core(engine.report.threads)
        loop.run()
    except (Gone, ConnectionError):
        pass
    finally:
        engine.close()
    return 0


def stay_on_first_core(threads: int) -> None:
    """The kernels' workers stay on a core each when there is one per core (native/threads.h); the first is the calling thread's."""
    if sys.platform != "linux":
        return
    cores = sorted(os.sched_getaffinity(0))
    if threads == len(cores) > 1:
        os.sched_setaffinity(0, cores[:1])


def _log_failure(request_id: RequestId, error: BrokenSeal | Unavailable) -> None:
    """L12: every violation is logged, by ids alone."""
    if isinstance(error, BrokenSeal):
        place = (error.page, error.ordinal, error.layer)
        _log.error("request %s: broken seal, law %s, check %s, page %d, ordinal %d, layer %d", request_id, error.law, error.check, *place)
    else:
        _log.warning("request %s failed: %s", request_id, type(error).__name__)


def _hello(sock: socket.socket) -> EngineConfig:
    frames = m.Frames()
    while True:
        data = sock.recv(RECEIVE_BYTES)
        if not data:
            raise Gone
        for body in frames.feed(data):
            message = m.decode_to_engine(body)
            if not isinstance(message, m.Hello):
                raise m.ProtocolBroken("the first message must be a hello")
            if message.version != m.PROTOCOL_VERSION:
                raise m.ProtocolBroken(f"the parent speaks version {message.version}, this engine {m.PROTOCOL_VERSION}")
            return message.config


def run(argv: list[str], build: Callable[[EngineConfig], EngineDoor], make_loop: LoopMaker | None = None) -> int:
    """`serve` with the catch-all around it. Logs types, laws and places; never an unknown exception's text, which may hold content."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=int(argv[1]))
    try:
        return serve(sock, build, make_loop)
    except (LawBroken, m.ProtocolBroken) as error:
        _log.critical("engine stops: %s: %s", type(error).__name__, error)
    except Exception as error:  # noqa: BLE001 - the engine loop's one catch-all: see the module's docstring
        _log.critical("engine stops: %s at %s", type(error).__name__, _places(error))
    return EXIT_UNTRUSTED


def _places(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-6:]))


def main() -> None:
    from kvseal.node.build import build_engine

    sys.exit(run(sys.argv, build_engine))


if __name__ == "__main__":
    main()
