"""The HTTP process's hold on the engine process: start it, watch it, talk to it, start it again when it dies.

Owns the engine's life and every open stream. Laws: L11 (each stream ends exactly once, whatever happens to the engine), L12 (a death is
seen, said and survived). Never blocks the event loop on the engine, and never lets a slow reader block the engine.

Liveness: the engine is pinged every second. Its last *progress* is the last completed step, or the last answer that said there was
nothing to do. If that is older than `stall_after_s` the state is ``stalled`` (readiness fails); at `KILL_AFTER_STALLS` times that age
the process is killed, which turns a hang into a death. A death ends every open stream with ``Failed(EngineDied)`` at once; the engine
is started again after a pause that doubles from `RESTART_FIRST_S` to `RESTART_MAX_S` while it keeps dying young.

Buffering: frames are read as they come. Events wait in their own stream until its reader takes them; a request's events carry at least one
token each, so a stream never holds more than the request's own output budget. What goes to the engine is bounded by `MAX_UNSENT_BYTES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import StrEnum

from kvseal.core.clock import Clock, MonotonicClock
from kvseal.core.config import EngineConfig
from kvseal.core.errors import Draining, EngineDied, Overloaded, SetupError
from kvseal.core.events import EndedEvent, Event
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Failed, Refused
from kvseal.core.request import Request
from kvseal.node import messages as m
from kvseal.node.link import Link
from kvseal.node.report import EngineStats, StartReport
from kvseal.node.spawn import ENGINE_MODULE, SpawnedEngine
from kvseal.node.stream import RequestStream

STALL_AFTER_S = 20.0
KILL_AFTER_STALLS = 6
RESTART_FIRST_S = 0.1
RESTART_MAX_S = 10.0
HEALTHY_AFTER_S = 60.0
"""An engine that lived this long dies with a clean record: the next pause is the first one again."""
CLOSE_TIMEOUT_S = 5.0
MAX_UNSENT_BYTES = 64 * 2**20

_log = logging.getLogger("kvseal.node")


async def drained(idle: asyncio.Event, timeout_s: float, open_ids: Iterable[RequestId], cancel: Callable[[RequestId], None]) -> bool:
    """Waits until nothing is open. False: it did not end in time, was cancelled, and has had `CLOSE_TIMEOUT_S` to take note."""
    try:
        async with asyncio.timeout(timeout_s):
            await idle.wait()
    except TimeoutError:
        for request_id in list(open_ids):
            cancel(request_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await idle.wait()
        return False
    return True


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    DEAD = "dead"
    DRAINING = "draining"
    CLOSED = "closed"


class EngineClient:
    """Made by `EngineClient.start`. All methods belong to the event loop that made it."""

    def __init__(self, config: EngineConfig, *, module: str, stall_after_s: float, clock: Clock) -> None:
        self._config = config
        self._module = module
        self._stall_after_s = stall_after_s
        self._clock = clock
        self._phase = EngineState.STARTING
        self._report: StartReport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._streams: dict[RequestId, RequestStream] = {}
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}
        self._asks = 0
        self._restarts = 0
        self._steps = 0
        self._progress_at_s = clock.now_s()
        self._idle = asyncio.Event()
        self._idle.set()
        self._keeper: asyncio.Task[None] | None = None
        self._failed = 0
        """Requests that ended with the connection; the log has not told of them yet."""
        self._spawned: SpawnedEngine | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        module: str = ENGINE_MODULE,
        stall_after_s: float = STALL_AFTER_S,
        clock: Clock | None = None,
        spawned: SpawnedEngine | None = None,
    ) -> EngineClient:
        """Starts the engine and waits until it can serve. Raises the engine's own `SetupError`, or `EngineDied`.

        `spawned`: its first process, started before with this config and module.
        """
        client = cls(config, module=module, stall_after_s=stall_after_s, clock=clock or MonotonicClock())
        client._spawned = spawned
        await client._begin()
        return client

    async def _begin(self) -> None:
        try:
            link = await self._spawn()
        except BaseException:
            await self._reap()
            raise
        self._keeper = asyncio.create_task(self._keep(link))

    # --- what is known of the engine ---

    @property
    def report(self) -> StartReport:
        if self._report is None:
            raise EngineDied("the engine has not started")
        return self._report

    @property
    def state(self) -> EngineState:
        if self._phase is EngineState.READY and self.last_progress_age_s > self._stall_after_s:
            return EngineState.STALLED
        return self._phase

    @property
    def last_progress_age_s(self) -> float:
        """Seconds since the engine last completed a step or said that it had nothing to do."""
        return self._clock.now_s() - self._progress_at_s

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    # --- requests ---

    def submit(self, request: Request) -> RequestStream:
        """Never raises for the engine's state: what cannot be served now is a stream whose only event is its end."""
        if request.request_id in self._streams:
            raise ValueError("a request with this id is open; ids are made by the server and never reused")
        stream = RequestStream(self, request.request_id)
        if self._phase in (EngineState.DRAINING, EngineState.CLOSED):
            stream.end(Refused(Draining("the server is shutting down")))
        elif self._link is None or not self._link.ready.done():
            stream.end(Refused(EngineDied("the engine is being restarted; try again in a moment")))
        elif self._link.unsent_bytes > MAX_UNSENT_BYTES:
            stream.end(Refused(Overloaded("the engine does not take requests fast enough", retry_after_s=5.0)))
        else:
            self._streams[request.request_id] = stream
            self._idle.clear()
            self._link.send(m.Submit(request))
        return stream

    def cancel(self, request_id: RequestId) -> None:
        if self._link is not None and request_id in self._streams:
            self._link.send(m.Cancel(request_id))

    def finish(self, request_id: RequestId) -> None:
        if self._link is not None and request_id in self._streams:
            self._link.send(m.Finish(request_id))

    async def stats(self) -> EngineStats:
        """Raises `EngineDied` when there is no engine to ask, or it dies before it answers."""
        if self._link is None or not self._link.ready.done():
            raise EngineDied("the engine is not running")
        self._asks += 1
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._asked[self._asks] = answer
        self._link.send(m.AskStats(self._asks))
        return await answer

    # --- the end ---

    async def drain(self, timeout_s: float) -> bool:
        """Takes nothing new and waits for what is open; True if all of it ended by itself, else the rest is cancelled."""
        self._phase = EngineState.DRAINING
        if await drained(self._idle, timeout_s, self._streams, self.cancel):
            return True
        self._end_all(Draining("the server is shutting down"))  # of an engine that does not even cancel
        return False

    async def close(self) -> None:
        """Ends the engine process and every stream. Safe to call twice."""
        self._phase = EngineState.CLOSED
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        await self._reap()
        self._end_all(Draining("the server is shutting down"))

    # --- the engine's life ---

    async def _spawn(self) -> Link:
        spawned, self._spawned = self._spawned or SpawnedEngine(self._config, module=self._module), None
        self._process, ours = spawned.take()
        ours.setblocking(False)
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: Link(self._handle, self._connection_lost), sock=ours)
        await self._introduced(link)
        # A restart gets the same pool, however much memory is free by then: what was advertised stays true.
        self._config = replace(self._config, pool_tokens=self.report.pool_tokens, kv_memory_bytes=None)
        return link

    async def _introduced(self, link: Link) -> None:
        """The other end says who it is, or why it cannot serve."""
        self._link = link
        self._report = await link.ready
        self._steps = 0
        self._progress_at_s = self._clock.now_s()
        if self._phase is not EngineState.DRAINING:
            self._phase = EngineState.READY

    async def _keep(self, link: Link) -> None:
        pause_s = RESTART_FIRST_S
        while True:
            born_s = self._clock.now_s()
            await self._watch(link)
            status = await self._reap()
            if self._phase is EngineState.DRAINING and status == 0 and not self._streams:
                return  # It was told to stop as well (a signal to the whole process group) and has finished first.
            self._lose(status)
            if self._phase is EngineState.DRAINING:
                return  # Nothing new is taken any more, so there is nothing to start it again for.
            if self._clock.now_s() - born_s > HEALTHY_AFTER_S:
                pause_s = RESTART_FIRST_S
            link, pause_s = await self._restart(pause_s)

    async def _restart(self, pause_s: float) -> tuple[Link, float]:
        while True:
            _log.error("starting the engine again in %.1f s", pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_MAX_S)
            if self._phase is not EngineState.DRAINING:
                self._phase = EngineState.STARTING
            try:
                link = await self._spawn()
            except (SetupError, EngineDied, OSError) as error:
                _log.error("the engine did not start: %s: %s", type(error).__name__, error)
                await self._reap()
                self._lose(None)
                continue
            self._restarts += 1
            _log.warning("the engine runs again (restart %d)", self._restarts)
            return link, pause_s

    async def _watch(self, link: Link) -> None:
        """Returns when the connection is gone; makes it go when the engine hangs for too long."""
        every_s = min(1.0, self._stall_after_s / 4)
        stalled = False
        while not link.lost.is_set():
            link.send(m.Ping())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await link.lost.wait()
            age_s = self.last_progress_age_s
            if (age_s > self._stall_after_s) is not stalled:
                stalled = not stalled
                _log.error("the engine has made no step for %.1f s", age_s) if stalled else _log.warning("the engine steps again")
            if age_s > KILL_AFTER_STALLS * self._stall_after_s:
                _log.error("killing the engine: no step for %.1f s", age_s)
                self._kill()
                await link.lost.wait()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _reap(self) -> int | None:
        """Closes the connection, waits for the process to go, and makes it go if it will not."""
        if self._link is not None:
            self._link.close()
            self._link = None
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            return await asyncio.to_thread(process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)

    def _lose(self, status: int | None) -> None:
        if self._phase is not EngineState.DRAINING:
            self._phase = EngineState.DEAD
        failed, self._failed = self._failed + len(self._streams), 0
        _log.error("the engine is gone (exit status %s); %d open requests failed", status, failed)
        self._end_all(EngineDied("the engine stopped while this request was open; it is being restarted"))

    def _connection_lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            link.close()
            if self._phase is EngineState.READY:
                self._phase = EngineState.DEAD
            self._failed += len(self._streams)
            self._end_all(EngineDied("the engine stopped while this request was open; it is being restarted"))

    def _end_all(self, error: EngineDied | Draining) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(Failed(error))
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(EngineDied("the engine stopped"))
        self._idle.set()

    # --- what the engine says ---

    def _handle(self, message: m.FromEngine) -> None:
        match message:
            case m.Events(steps, tokens, ended):
                self._progressed(steps)
                for event in tokens:
                    self._deliver(event)
                for wire in ended:
                    self._deliver(m.unpack_ended(wire))
            case m.Pong(steps, has_work):
                if steps != self._steps or not has_work:
                    self._progressed(steps)
            case m.Stats(ask, stats):
                answer = self._asked.pop(ask, None)
                if answer is not None and not answer.done():
                    answer.set_result(stats)
            case _:
                raise m.ProtocolBroken("the engine introduced itself twice")

    def _progressed(self, steps: int) -> None:
        self._steps = steps
        self._progress_at_s = self._clock.now_s()

    def _deliver(self, event: Event) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            if self._phase is EngineState.DRAINING:
                return
            raise m.ProtocolBroken("the engine speaks of a request that is not open")
        if type(event) is EndedEvent:
            del self._streams[event.request_id]
            if not self._streams:
                self._idle.set()
        stream.put(event)
