"""The events of one request on their way to whoever asked.

Owns `RequestStream`. Law L11: nothing is delivered behind an end. Buffering: events wait until their reader takes them; each carries at
least one token, so a stream never holds more than the request's own output budget.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvseal.core.events import EndedEvent, Event
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Outcome


class Stops(Protocol):
    def cancel(self, request_id: RequestId) -> None: ...

    def finish(self, request_id: RequestId) -> None: ...


class RequestStream:
    """The events of one request, in order, for one reader: ``async for event in stream``, or `listen`. The last is an `EndedEvent`."""

    def __init__(self, client: Stops, request_id: RequestId) -> None:
        self.request_id = request_id
        self._client = client
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._listener: Callable[[Event], None] | None = None
        self._ended = False
        self._delivered_end = False

    @property
    def ended(self) -> bool:
        """Its end has been put into it; the reader may not have come to it yet."""
        return self._ended

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        if self._delivered_end:
            raise StopAsyncIteration
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._delivered_end = isinstance(event, EndedEvent)
        return event

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Events go to the listener from now on, in the moment in which they arrive: no task has to be woken for a token. It must not
        raise. Those that are here already come first."""
        while self._events:
            listener(self._events.popleft())
        self._listener = listener

    def cancel(self) -> None:
        """Asks the engine to stop. Whatever comes is still delivered; the end is `Cancelled` unless another end was faster."""
        if not self._ended:
            self._client.cancel(self.request_id)

    def finish(self) -> None:
        """Tells the engine that it has been completed by what it has said so far (a stop string); the end is `Completed`."""
        if not self._ended:
            self._client.finish(self.request_id)

    def put(self, event: Event) -> None:
        """L11: nothing is delivered behind an end."""
        if self._ended:
            return
        self._ended = type(event) is EndedEvent
        if self._listener is not None:
            self._listener(event)
            return
        self._events.append(event)
        self._arrived.set()

    def end(self, outcome: Outcome) -> None:
        self.put(EndedEvent(self.request_id, outcome))
