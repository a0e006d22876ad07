"""Messages to one prompt text, by the model's own template.

Owns the jinja2 sandbox and the helpers that templates written for Hugging Face transformers expect (``raise_exception``,
``strftime_now``, ``tojson``, loop controls, the ``generation`` tag). Templates come from the model or the operator, never from a caller.
An error of the template becomes `InvalidRequest`; its text never quotes a message's content beyond what the template itself chose to say.

Reference for the helpers: the chat-template page of the transformers documentation.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvseal.core.errors import InvalidRequest, ModelUnsupported

MAX_RENDERED_CHARS = 32 * 2**20
"""A template that prints more than this is cut off with an error: more than any prompt, and little enough to hold."""


class _TemplateRefusal(jinja2.TemplateError):
    """``raise_exception`` of a template: these messages are not what the model was trained on."""


class ChatTemplate:
    """One compiled template. Rendering has no side effects and may run in several threads."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnsupported(f"the chat template is not one that jinja2 can read: {error}") from error
        self._special_texts = dict(special_texts)
        self.knows_developer_role = "developer" in source
        """Templates that do not speak of it get such messages as system messages."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises `InvalidRequest` when the template refuses the messages or cannot cope with them."""
        messages = list(messages)
        final_text = _final_text(messages) if continue_final_message else ""
        names = {"tools": None, "documents": None, **(variables or {}), **self._special_texts}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        text = self._bounded(names)
        if not continue_final_message:
            return text
        at = text.rfind(final_text.strip())
        if at < 0:
            raise InvalidRequest(
                "continue_final_message: the chat template changes the final message, so it cannot be continued", param="messages"
            )
        # Templates may strip what they print; text after the final message closes its turn and is dropped.
        whole = text.rfind(final_text)
        return text[: whole + len(final_text)] if whole >= 0 else text[: at + len(final_text.strip())]

    def _bounded(self, names: Mapping[str, Any]) -> str:
        parts: list[str] = []
        total_chars = 0
        try:
            for part in self._template.generate(**names):
                parts.append(part)
                total_chars += len(part)
                if total_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequest(
                        f"the chat template made more than {MAX_RENDERED_CHARS} characters of these messages", param="messages"
                    )
        except _TemplateRefusal as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error.message}", param="messages") from error
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template cannot render these messages ({type(error).__name__})", param="messages") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError, OverflowError, RecursionError) as error:
            # Plain Python errors inside a template: a message without a field that the template needs.
            raise InvalidRequest(f"the chat template cannot render these messages ({type(error).__name__})", param="messages") from error
        return "".join(parts)


def _final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest("continue_final_message needs a final message with text", param="messages")
    return content


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["range"] = _bounded_range
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(str(message)[:500])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_range(*arguments: int) -> range:
    numbers = range(*arguments)
    if len(numbers) > 100_000:
        raise _TemplateRefusal("range is longer than 100000")
    return numbers
