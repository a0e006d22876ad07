"""One HTTP request's sequences, from submission to the last piece of text.

Owns `Generation`: the engine streams of all choices, their detokenizers, and what becomes of them when one fails or the client leaves.
Laws: L11 (a choice ends once: with a finish reason or with an error, never both), L12 (an error of one choice is the request's error,
and the others are cancelled at once). Never writes HTTP.

A stop string is found here, in text; the engine is then told that the choice is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvseal.core.batch import TokenLogprobs
from kvseal.core.errors import BrokenSeal, RequestError, Unavailable
from kvseal.core.events import Event, TokensEvent
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused
from kvseal.core.request import Request
from kvseal.serve.detokenizer import Detokenizer, Released
from kvseal.serve.tokenizer import Tokenizer

ServedError = RequestError | Unavailable | BrokenSeal


class EventStream(Protocol):
    """`node.client.RequestStream`, as far as it is used here."""

    def listen(self, listener: Callable[[Event], None]) -> None: ...

    def cancel(self) -> None: ...

    def finish(self) -> None: ...


class Submitter(Protocol):
    """`node.client.EngineClient`, as far as it is used here."""

    def submit(self, request: Request) -> EventStream: ...


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stopped_by: str | int | None = None
    """The stop string or token id, when one ended it."""


@dataclass(slots=True)
class Delta:
    """Something new of one choice. The last one has `finish`. Not frozen, since one is made for every token and that triples its price."""

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
        if len(event.tokens) == 1 and not event.logprobs and not self.detokenizer.watches:
            return self._take_one(event, event.tokens[0])
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

    def _take_one(self, event: TokensEvent, token: int) -> Delta:
        """`take` where nothing can be held back: no stop strings to watch for, no logprobs to align."""
        self.completion_tokens += 1
        silent = token in self.request.sampling.stop_token_ids and not self.include_stop
        text = "" if silent else self.detokenizer.text_of(token)
        return Delta(self.index, text, (token,), (), event.prompt_logprobs)

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
    """All choices of one HTTP request. Use as an async context manager: leaving it, for whatever reason, stops the engine's work.

    What comes is taken in the moment in which it arrives, and goes to `sink` or wakes whoever waits in `more`.
    """

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
        self.sink: Callable[[], bool] | None = None
        """Called when something has come; True when it has taken everything and needs no task. It may raise: the task then does."""
        self.open_choices = len(self.choices)
        """Whose finish has not been taken yet."""
        self._streams: list[EventStream] = []
        self._ready: list[Delta] = []
        self._error: ServedError | None = None
        self._bug: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._stirring = False

    async def __aenter__(self) -> Generation:
        for choice in self.choices:
            stream = self._engine.submit(choice.request)
            self._streams.append(stream)
            stream.listen(_Follower(self, choice, stream).take)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sink = None
        self.cancel()

    def cancel(self) -> None:
        """Tells the engine to stop every choice that still runs. What is queued there is dropped before it ever runs."""
        for stream in self._streams:
            stream.cancel()

    async def wait_first(self, timeout_s: float) -> None:
        """Returns when something has come, or the time is up. Raises the request's error if it was refused or failed before that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._something()
        self._raise(self._error or self._bug)

    async def more(self) -> list[Delta]:
        """Everything that has come since the last time, waiting for it if need be; empty when all choices have finished. Raises the
        request's error after what came before it."""
        if self.open_choices and not self._ready:
            await self._something()
        found = self.taken()
        if not found:
            self._raise(self._error or self._bug)
        return found

    async def deltas(self) -> AsyncIterator[Delta]:
        """Deltas of all choices as they come; ends when all have finished. Raises the request's error."""
        while found := await self.more():
            for delta in found:
                yield delta

    def taken(self) -> list[Delta]:
        """What has come and nobody has seen."""
        found, self._ready = self._ready, []
        for delta in found:
            self.open_choices -= delta.finish is not None
        return found

    def _raise(self, error: ServedError | Exception | None) -> None:
        if error is not None:
            raise error

    async def _something(self) -> None:
        while self.open_choices and not (self._ready or self._error or self._bug):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    # --- told by the followers ---

    def put(self, delta: Delta) -> None:
        self._ready.append(delta)
        if len(self.choices) == 1:
            self._stir()
        elif not self._stirring:  # The other choices' tokens of the same step come in the same moment: one write for all.
            self._stirring = True
            asyncio.get_running_loop().call_soon(self._stir)

    def fail(self, error: ServedError) -> None:
        if self._error is None:
            self._error = error
            self.cancel()
            self._wake()

    def break_off(self, error: Exception) -> None:
        """A fault of our own while a token was taken: it is this request's alone, so its task raises it, and not the engine's link."""
        self._bug = error
        self._wake()

    def _stir(self) -> None:
        self._stirring = False
        try:
            if self.sink is not None and self._error is None and self.sink():
                return
        except Exception as error:  # noqa: BLE001 - see `break_off`
            self._bug = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Follower:
    """Takes one choice's events, in order, until it has ended (L11)."""

    def __init__(self, generation: Generation, choice: Choice, stream: EventStream) -> None:
        self._generation = generation
        self._choice = choice
        self._stream = stream
        self._ended = False

    def take(self, event: Event) -> None:
        if self._ended:
            return
        try:
            self._take(event)
        except Exception as error:  # noqa: BLE001 - see `Generation.break_off`
            self._ended = True
            self._generation.break_off(error)

    def _take(self, event: Event) -> None:
        generation = self._generation
        if isinstance(event, TokensEvent):
            delta = self._choice.take(event)
            if delta.finish is not None:
                self._ended = True
                self._stream.finish()
            generation.put(delta)
            return
        self._ended = True
        if isinstance(event.outcome, Completed):
            generation.put(self._choice.end(event.outcome))
        else:
            generation.fail(_error_of(event.outcome))


def _error_of(outcome: Outcome) -> ServedError:
    match outcome:
        case Refused(error) | Failed(error):
            return error
        case Cancelled():
            return Unavailable("the request was cancelled by the server before it was complete")
    raise TypeError(f"{type(outcome).__name__} is no failure")
