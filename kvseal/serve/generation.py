"""One HTTP request's sequences, from submission to the last piece of text.

Owns `Generation`: the engine streams of all choices, their detokenizers, and what becomes of them when one fails or the client leaves.
Laws: L11 (a choice ends once: with a finish reason or with an error, never both), L12 (an error of one choice is the request's error,
and the others are cancelled at once). Never writes HTTP.

A stop string is found here, in text; the engine is then told to stop, and the choice is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvseal.core.batch import TokenLogprobs
from kvseal.core.errors import BrokenSeal, KVSealError, RequestError, Unavailable
from kvseal.core.events import Event, TokensEvent
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused
from kvseal.core.request import Request
from kvseal.serve.detokenizer import Detokenizer, Released
from kvseal.serve.tokenizer import Tokenizer

ServedError = RequestError | Unavailable | BrokenSeal


class EventStream(Protocol):
    """`node.client.RequestStream`, as far as it is used here."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def cancel(self) -> None: ...


class Submitter(Protocol):
    """`node.client.EngineClient`, as far as it is used here."""

    def submit(self, request: Request) -> EventStream: ...


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stopped_by: str | int | None = None
    """The stop string or token id, when one ended it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Something new of one choice. The last one has `finish`."""

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How tokens become text, the same for all choices."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(slots=True)
class Choice:
    """One sequence and what is known of it so far."""

    index: int
    request: Request
    detokenizer: Detokenizer
    include_stop: bool
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprob_sum: float = 0.0
    _unreleased: deque[tuple[int, TokenLogprobs | None]] = field(default_factory=deque)

    def take(self, event: TokensEvent) -> Delta:
        """The delta that these tokens make; with a finish when a stop string was completed."""
        self.cached_tokens = event.cached_tokens
        text: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for i, token in enumerate(event.tokens):
            self.completion_tokens += 1
            entry = event.logprobs[i] if event.logprobs else None
            self.logprob_sum += entry.logprob if entry is not None else 0.0
            if token in self.request.sampling.stop_token_ids and not self.include_stop:
                tokens.append(token)  # The end: it has no text and no logprobs entry; the engine says so next.
                continue
            self._unreleased.append((token, entry))
            released = self.detokenizer.push(token)
            text.append(released.text)
            self._move(released, tokens, logprobs)
            if self.detokenizer.stopped:
                break
        finish = Finish(FinishReason.STOP, self.detokenizer.stopped_by) if self.detokenizer.stopped else None
        return Delta(self.index, "".join(text), tuple(tokens), tuple(logprobs), event.prompt_logprobs, finish)

    def end(self, completed: Completed) -> Delta:
        """The last delta: what was held back, and why it ended."""
        released = self.detokenizer.finish()
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        self._move(released, tokens, logprobs)
        stopped_by = self.detokenizer.stopped_by
        finish = Finish(FinishReason.STOP, stopped_by) if stopped_by is not None else Finish(completed.reason, completed.stop_token)
        return Delta(self.index, released.text, tuple(tokens), tuple(logprobs), (), finish)

    def _move(self, released: Released, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        for _ in range(released.tokens):
            token, entry = self._unreleased.popleft()
            tokens.append(token)
            if entry is not None:
                logprobs.append(entry)


class Generation:
    """All choices of one HTTP request. Use as an async context manager: leaving it, for whatever reason, stops the engine's work."""

    def __init__(self, engine: Submitter, tokenizer: Tokenizer, requests: Sequence[Request], rules: TextRules) -> None:
        self._engine = engine
        self.choices = [
            Choice(
                index,
                request,
                Detokenizer(
                    tokenizer,
                    rules.stop,
                    skip_special_tokens=rules.skip_special_tokens,
                    include_stop_in_output=rules.include_stop,
                    min_tokens=request.sampling.min_tokens,
                ),
                rules.include_stop,
            )
            for index, request in enumerate(requests)
        ]
        self._queue: asyncio.Queue[Delta | ServedError] = asyncio.Queue()
        self._streams: list[EventStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._first: list[Delta] = []
        self._error: ServedError | None = None
        self._open = len(self.choices)

    async def __aenter__(self) -> Generation:
        for choice in self.choices:
            stream = self._engine.submit(choice.request)
            self._streams.append(stream)
            self._tasks.append(asyncio.create_task(self._follow(choice, stream)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Tells the engine to stop every choice that still runs. What is queued there is dropped before it ever runs."""
        for stream in self._streams:
            stream.cancel()

    async def wait_first(self, timeout_s: float) -> None:
        """Returns when something has come, or the time is up. Raises the request's error if it was refused or failed before that."""
        with contextlib.suppress(TimeoutError):
            self._first.append(await asyncio.wait_for(self._next(), timeout_s))
        if self._error is not None:
            raise self._error

    async def deltas(self) -> AsyncIterator[Delta]:
        """Deltas of all choices as they come; ends when all have finished. Raises the request's error."""
        while self._first:
            yield self._counted(self._first.pop())
        while self._open:
            yield self._counted(await self._next())

    def _counted(self, delta: Delta) -> Delta:
        self._open -= delta.finish is not None
        return delta

    async def _next(self) -> Delta:
        item = await self._queue.get()
        if isinstance(item, KVSealError):
            raise item
        return item

    async def _follow(self, choice: Choice, stream: EventStream) -> None:
        async for event in stream:
            if isinstance(event, TokensEvent):
                delta = choice.take(event)
                self._queue.put_nowait(delta)
                if delta.finish is not None:
                    stream.cancel()
                    return
            elif isinstance(event.outcome, Completed):
                self._queue.put_nowait(choice.end(event.outcome))
                return
            else:
                self._fail(_error_of(event.outcome))
                return

    def _fail(self, error: ServedError) -> None:
        if self._error is None:
            self._error = error
            self._queue.put_nowait(error)
            self.cancel()


def _error_of(outcome: Outcome) -> ServedError:
    match outcome:
        case Refused(error) | Failed(error):
            return error
        case Cancelled():
            return Unavailable("the request was cancelled by the server before it was complete")
    raise TypeError(f"{type(outcome).__name__} is no failure")
