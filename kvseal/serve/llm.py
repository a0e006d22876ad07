"""Offline batches in this process: ``from kvseal import LLM``.

Owns `LLM`: prompts in, finished texts out, computed together by the same scheduler, cache and kernels as the server's. Blocking and
single-threaded; for a service use ``kvseal serve``. A request that is refused or stopped raises its error, and nothing of it is returned.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvseal.core.batch import TokenLogprobs
from kvseal.core.config import EngineConfig
from kvseal.core.errors import InvalidRequest, KVSealError, Unavailable
from kvseal.core.events import Event, TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused
from kvseal.core.request import Request, SamplingParams
from kvseal.node.build import build_engine
from kvseal.node.models import model_name, resolve_model
from kvseal.node.report import EngineStats, StartReport
from kvseal.serve.auth import NO_TENANT, Scopes
from kvseal.serve.chat_template import ChatTemplate
from kvseal.serve.detokenizer import Detokenizer
from kvseal.serve.generation import Choice
from kvseal.serve.messages import read_messages
from kvseal.serve.served import Rendering, ServedModel
from kvseal.serve.tokenizer_files import load_tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Generated:
    """One finished answer."""

    text: str
    tokens: tuple[int, ...]
    """Every generated id, the one that ended it included."""
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more text of one of several answers that are being streamed; the last one has `finished`."""

    index: int
    text: str
    finished: Generated | None = None


class LLM:
    """A model in this process. Use as a context manager, or call `close`.

    `model` is what ``kvseal serve`` takes: nothing (the demo model), a directory, a .gguf file, or a hub id. `options` are the fields of
    `EngineConfig`: pool_tokens, kv_memory_bytes, context_tokens, kv_dtype, threads, ... Raises `SetupError`.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        named = None if model is None else str(model)
        path = resolve_model(named)
        self._start(EngineConfig(model=path, **options), model_name(named, path))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The same from a complete `EngineConfig`, whose model is on disk already."""
        llm = cls.__new__(cls)
        llm._start(config, config.model.stem)
        return llm

    def _start(self, config: EngineConfig, name: str) -> None:
        tokenizer = load_tokenizer(config.model)
        self._engine = build_engine(config)
        template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer.chat_template, tokenizer.special_texts)
        self._model = ServedModel(name=name, tokenizer=tokenizer, template=template, report=self._engine.report, created_s=0)
        self._scopes = Scopes(bytes.fromhex(self._engine.report.kv_format))
        self._inboxes: dict[RequestId, deque[Event]] = {}
        """Where the events of each open request go. Requests of one call share one."""
        self._closed = False

    @property
    def report(self) -> StartReport:
        """Sizes and limits, as the server prints them at start."""
        return self._engine.report

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = 16,
        stop: str | Sequence[str] = (),
        salt: str = "",
    ) -> list[Generated]:
        """Completes texts or lists of token ids, all in one batch; answers come in the order of the prompts.

        Raises the first error that any of them met (`RequestError`, `Unavailable` or `BrokenSeal`); the others are cancelled.
        """
        encoded = [self._encode(prompt) for prompt in _listed(prompts)]
        return self._finished(self._run(encoded, max_tokens, sampling, stop, salt, where="prompt"), len(encoded))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        salt: str = "",
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[Generated]:
        """Answers one conversation, or several in one batch. Without `max_tokens` an answer may fill what the context leaves."""
        encoded = [self._encode_chat(each, template_variables) for each in _conversations(messages)]
        return self._finished(self._run(encoded, max_tokens, sampling, stop, salt, where="messages"), len(encoded))

    def stream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None, *, max_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> Iterator[Piece]:
        """One conversation's answer as it grows. Dropping the iterator cancels it."""
        return self._run([self._encode_chat(messages, None)], max_tokens, sampling, stop, "", where="messages")

    def close(self) -> None:
        """Gives back the memory. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- inside ---

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this LLM is closed")

    def _encode(self, prompt: Prompt) -> list[int]:
        tokens = self._model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        return tokens

    def _encode_chat(self, messages: Messages, variables: Mapping[str, Any] | None) -> list[int]:
        read = read_messages(messages, developer_as_system=not self._model.prefers_developer_role)
        return self._model.encode_chat_now(read, Rendering(variables=variables))

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        sampling: SamplingParams | None,
        stop: str | Sequence[str],
        salt: str,
        *,
        where: str,
    ) -> Iterator[Piece]:
        self._check_open()
        sampling = sampling or SamplingParams(temperature=0.0)
        sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | self._model.end_tokens)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(stops):
            raise InvalidRequest("stop holds an empty string; leave it out instead", param="stop")
        choices: dict[RequestId, _Open] = {}
        for index, tokens in enumerate(prompts):
            request = Request(
                request_id=RequestId(f"llm-{secrets.token_hex(8)}-{index}"),
                prompt_tokens=tuple(tokens),
                max_output_tokens=self._model.output_budget(len(tokens), max_tokens, where=where),
                scope=self._scopes.scope(NO_TENANT, salt),
                sampling=sampling,
            ).checked(self.report.vocab_size)
            detokenizer = Detokenizer(self._model.tokenizer, stops, min_tokens=sampling.min_tokens)
            choices[request.request_id] = _Open(Choice(index, request, detokenizer, include_stop=False))
        return self._pieces(choices)

    def _pieces(self, choices: dict[RequestId, _Open]) -> Iterator[Piece]:
        waiting = deque(choices.values())
        running: dict[RequestId, _Open] = {}
        inbox: deque[Event] = deque()
        try:
            while waiting or running:
                while waiting and len(self._inboxes) < self.report.max_running + self.report.max_queued:
                    self._submit(waiting[0], running, inbox)
                    waiting.popleft()
                if not inbox:
                    self._step()
                while inbox:
                    event = inbox.popleft()
                    one = running.get(event.request_id)
                    if one is None:  # It has met its stop string; the engine had gone on by then.
                        continue
                    piece = one.take(event) if isinstance(event, TokensEvent) else one.end(event.outcome)
                    if piece.finished is not None:
                        self._engine.finish(event.request_id)  # Without effect unless its own text ended it.
                        self._forget(event.request_id, running)
                    yield piece
        finally:
            for request_id in list(running):
                self._forget(request_id, running)

    def _submit(self, one: _Open, running: dict[RequestId, _Open], inbox: deque[Event]) -> None:
        refused = self._engine.submit(one.choice.request)
        if refused is not None:
            raise refused.error
        running[one.choice.request.request_id] = one
        self._inboxes[one.choice.request.request_id] = inbox

    def _step(self) -> None:
        """One step for everybody: a stream that is not being read just now finds its events later. Raises `Unavailable` once closed."""
        self._check_open()
        for event in self._engine.step():
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:  # Else it is the end of something that was cancelled.
                inbox.append(event)

    def _forget(self, request_id: RequestId, running: dict[RequestId, _Open]) -> None:
        """Whoever has ended, or is not wanted any more; cancelling what has ended does nothing."""
        del running[request_id], self._inboxes[request_id]
        self._engine.cancel(request_id)

    def _finished(self, pieces: Iterator[Piece], count: int) -> list[Generated]:
        found: dict[int, Generated] = {piece.index: piece.finished for piece in pieces if piece.finished is not None}
        return [found[index] for index in range(count)]


class _Open:
    """One answer under way."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def take(self, event: TokensEvent) -> Piece:
        delta = self.choice.take(event)
        self._text.append(delta.text)
        self._tokens += event.tokens
        self._logprobs += delta.logprobs
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        finished = self._generated(delta.finish.reason) if delta.finish is not None else None
        return Piece(self.choice.index, delta.text, finished)

    def end(self, outcome: Outcome) -> Piece:
        if not isinstance(outcome, Completed):
            raise _error_of(outcome)
        delta = self.choice.end(outcome)
        self._text.append(delta.text)
        self._logprobs += delta.logprobs
        reason = delta.finish.reason if delta.finish is not None else outcome.reason
        return Piece(self.choice.index, delta.text, self._generated(reason))

    def _generated(self, reason: FinishReason) -> Generated:
        return Generated(
            text="".join(self._text),
            tokens=tuple(self._tokens),
            finish_reason=reason,
            prompt_tokens=len(self.choice.request.prompt_tokens),
            cached_tokens=self.choice.cached_tokens,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )


def _error_of(outcome: Outcome) -> KVSealError:
    match outcome:
        case Refused(error) | Failed(error):
            return error
        case Cancelled():
            return Unavailable("the request was cancelled before it was complete")
    raise TypeError(f"{type(outcome).__name__} is no failure")


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a string, a list of ids, or a list of those. Raises `InvalidRequest`: nothing is left out silently."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidRequest("prompts must be a string, a list of token ids, or a list of those", param="prompt")
    if ids := [item for item in prompts if type(item) is int]:
        if len(ids) != len(prompts):
            raise InvalidRequest("prompts mixes token ids with something else; give one list of ids, or a list of prompts", param="prompt")
        return [ids]
    listed: list[Prompt] = []
    for position, item in enumerate(prompts):
        if not isinstance(item, str) and not (isinstance(item, list | tuple) and all(type(token) is int for token in item)):
            raise InvalidRequest(f"prompts[{position}] must be a string or a list of token ids", param="prompt")
        listed.append(item)
    return listed


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or several. Raises `InvalidRequest`: nothing is left out silently."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest("messages must be a list of messages, or a list of such lists", param="messages")
    single = [item for item in messages if isinstance(item, Mapping)]
    if single or not messages:  # An empty list is one conversation without messages, which `read_messages` refuses.
        if len(single) != len(messages):
            raise InvalidRequest("messages mixes messages with conversations; give one conversation, or a list of them", param="messages")
        return [single]
    several: list[Messages] = []
    for position, item in enumerate(messages):
        if not isinstance(item, list | tuple) or not all(isinstance(message, Mapping) for message in item):
            raise InvalidRequest(f"messages[{position}] must be a message or a list of messages", param="messages")
        several.append(item)
    return several
