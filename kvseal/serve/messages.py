"""Chat messages: what we accept, and what the template gets to see.

Owns the checks of roles and contents. Everything refused names its place (``messages[2].content``). Only text is served; an image or a
sound is an error, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvseal.core.errors import InvalidRequest

ROLES = ("developer", "system", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_KEPT_TEXT = ("name", "tool_call_id", "reasoning_content", "reasoning")


def read_messages(messages: Sequence[Mapping[str, Any]], *, developer_as_system: bool) -> list[dict[str, Any]]:
    """The messages as a template wants them: contents are strings, arguments of tool calls are objects. Raises `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("messages is empty; a chat needs at least one message", param="messages")
    read = [_message(message, f"messages[{i}]", developer_as_system) for i, message in enumerate(messages)]
    if len(read) > 1 and read[-1]["role"] == read[-2]["role"] == "assistant":
        raise InvalidRequest("messages ends with two assistant messages; the second has nothing to answer", param="messages")
    return read


def _message(message: Mapping[str, Any], where: str, developer_as_system: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    calls = message.get("tool_calls")
    result: dict[str, Any] = {"role": "system" if role == "developer" and developer_as_system else role}
    result["content"] = _content(message, where, may_be_absent=role == "assistant" and bool(calls))
    if calls:
        if role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls: only assistant messages have tool calls", param=f"{where}.tool_calls")
        result["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    for key in _KEPT_TEXT:
        if message.get(key) is not None:
            result[key] = _text(message[key], f"{where}.{key}")
    return result


def _content(message: Mapping[str, Any], where: str, *, may_be_absent: bool) -> str:
    content = message.get("content")
    where = f"{where}.content"
    if content is None:
        if may_be_absent:
            return ""
        raise InvalidRequest(f"{where} is missing; it must be a string or a list of text parts", param=where)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    if not content:
        raise InvalidRequest(f"{where} is an empty list; it needs at least one text part", param=where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type, such as {{'type': 'text', 'text': ...}}", param=where)
    if part["type"] not in _TEXT_PARTS:
        raise InvalidRequest(f"{where} is not text; this server reads text parts only", param=f"{where}.type")
    key = "refusal" if part["type"] == "refusal" else "text"
    return _text(part.get(key), f"{where}.{key}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string", param=where)
    return value


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}[{i}] must be an object with a function that has a name", param=f"{where}[{i}]")
        arguments = function.get("arguments")
        result.append({**call, "function": {**function, "arguments": _arguments(arguments, f"{where}[{i}].function.arguments")}})
    return result


def _arguments(arguments: object, where: str) -> object:
    """OpenAI sends arguments as JSON text; templates of the Hugging Face kind expect the object."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise InvalidRequest(f"{where} must be a string of JSON", param=where)
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # A model may have written it; the template prints it as it is.
