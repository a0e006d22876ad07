"""An engine that does what a test says, event by event."""

from __future__ import annotations

from collections.abc import Callable

from kvseal.core.batch import TokenLogprobs
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Outcome
from kvseal.core.request import Request


class FakeStream:
    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.cancelled = self.finished = False
        self._listener: Callable[[Event], None] | None = None

    def cancel(self) -> None:
        self.cancelled = True

    def finish(self) -> None:
        self.finished = True

    def listen(self, listener: Callable[[Event], None]) -> None:
        self._listener = listener

    def _tell(self, event: Event) -> None:
        assert self._listener is not None
        self._listener(event)

    def tokens(self, *tokens: int, logprobs: bool = False) -> None:
        entries = tuple(TokenLogprobs(token, -1.0) for token in tokens) if logprobs else ()
        self._tell(TokensEvent(self.request_id, tokens, entries, cached_tokens=3))

    def end(self, outcome: Outcome) -> None:
        self._tell(EndedEvent(self.request_id, outcome))


class FakeEngine:
    def __init__(self) -> None:
        self.streams: list[FakeStream] = []

    def submit(self, request: Request) -> FakeStream:
        self.streams.append(FakeStream(request.request_id))
        return self.streams[-1]
