"""The model as the HTTP side knows it: its name, its tokenizer, its template, its limits.

Owns `ServedModel`. Immutable for the life of the server; the numbers are the engine's `StartReport`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvseal.core.errors import ContextLengthExceeded, InvalidRequest
from kvseal.core.request import SamplingParams
from kvseal.node.report import StartReport
from kvseal.serve.chat_template import ChatTemplate
from kvseal.serve.tokenizer import Tokenizer

_THREAD_ABOVE_CHARS = 16 * 1024
_THREAD_ABOVE_TOKENS = 16 * 1024
"""Longer texts are encoded on a thread: the library lets go of the interpreter lock, and streams go on meanwhile."""

_HUGE_CHARS = 256 * 1024
"""Texts beyond wait for each other alone: what is mostly too long for any context holds up nobody whose prompt is merely long."""

_MESSAGE_CHARS = 64
"""About what a template adds to each message, and what running it costs."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a template is to be run."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    report: StartReport
    created_s: int
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """What holds for a request that does not say how to sample."""
    long_texts: asyncio.Lock = field(default_factory=asyncio.Lock)
    huge_texts: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One long text is encoded at a time, and one huge one: whatever callers send, it costs the engine no more than that."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Every id that ends an answer unless ``ignore_eos``: the weights' and the tokenizer's."""
        return frozenset(self.report.eos_tokens) | frozenset(self.tokenizer.eos_tokens)

    @property
    def prefers_developer_role(self) -> bool:
        return self.template is not None and self.template.knows_developer_role

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) < _THREAD_ABOVE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        async with self._lane(len(text)):
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], how: Rendering) -> list[int]:
        chars = sum(_MESSAGE_CHARS + len(message["content"]) for message in messages if isinstance(message.get("content"), str))
        if chars < _THREAD_ABOVE_CHARS:
            return self.encode_chat_now(messages, how)
        async with self._lane(chars):
            return await asyncio.to_thread(self.encode_chat_now, messages, how)

    async def decode(self, tokens: Sequence[int]) -> str:
        if len(tokens) < _THREAD_ABOVE_TOKENS:
            return self.tokenizer.decode(tokens)
        async with self._lane(len(tokens)):
            return await asyncio.to_thread(self.tokenizer.decode, tokens)

    async def texts_of(self, tokens: Sequence[int]) -> list[str]:
        """Each token's text alone."""
        if len(tokens) < _THREAD_ABOVE_TOKENS:
            return list(map(self.tokenizer.text_of, tokens))
        async with self._lane(len(tokens)):
            return await asyncio.to_thread(list, map(self.tokenizer.text_of, tokens))

    def _lane(self, length: int) -> asyncio.Lock:
        return self.huge_texts if length > _HUGE_CHARS else self.long_texts

    def encode_chat_now(self, messages: Sequence[Mapping[str, Any]], how: Rendering) -> list[int]:
        """Renders and encodes; message contents cannot forge special tokens (see `tokenizer`). Raises `InvalidRequest`."""
        if self.template is None:
            raise InvalidRequest(
                f"model {self.name!r} has no chat template, so messages cannot become a prompt. "
                "Use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        guard = self.tokenizer.content_guard()
        guarded = [{key: value if key == "role" else guard.protect(value) for key, value in message.items()} for message in messages]
        variables = {key: guard.protect(value) for key, value in (how.variables or {}).items()}
        rendered = self.template.render(
            guarded,
            add_generation_prompt=how.add_generation_prompt,
            continue_final_message=how.continue_final_message,
            variables=variables,
        )
        return self.tokenizer.encode_chat(rendered, guard)

    def output_budget(self, prompt_tokens: int, asked_tokens: int | None, *, where: str) -> int:
        """How many tokens the answer may have (L1): what was asked, or all that the context leaves. Raises `ContextLengthExceeded`."""
        served = self.report.served_context_tokens
        budget = asked_tokens if asked_tokens is not None else max(1, served - prompt_tokens)
        if prompt_tokens + budget > served:
            raise ContextLengthExceeded.of(
                prompt_tokens=prompt_tokens,
                max_output_tokens=budget,
                max_servable_tokens=served,
                pool_tokens=self.report.pool_tokens,
                where=where,
            )
        return budget
