"""An engine that does what a test says, event by event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvseal.core.batch import TokenLogprobs
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Outcome
from kvseal.core.request import Request


class FakeStream:
    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self.queue.get()
            yield event
            if isinstance(event, EndedEvent):
                return

    def tokens(self, *tokens: int, logprobs: bool = False) -> None:
        entries = tuple(TokenLogprobs(token, -1.0) for token in tokens) if logprobs else ()
        self.queue.put_nowait(TokensEvent(self.request_id, tokens, entries, cached_tokens=3))

    def end(self, outcome: Outcome) -> None:
        self.queue.put_nowait(EndedEvent(self.request_id, outcome))


class FakeEngine:
    def __init__(self) -> None:
        self.streams: list[FakeStream] = []

    def submit(self, request: Request) -> FakeStream:
        self.streams.append(FakeStream(request.request_id))
        return self.streams[-1]
