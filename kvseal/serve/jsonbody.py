"""Bytes of a request body to a JSON object, or an error that says what is wrong with them.

Owns what we accept as JSON: UTF-8 without a byte order mark, an object, no NaN or Infinity, no repeated keys, no half surrogate pairs, no
numbers longer than any number can mean, nested at most `MAX_DEPTH` deep. Never quotes the body in an error.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from kvseal.core.errors import InvalidRequest

MAX_DEPTH = 64
MAX_NUMBER_CHARS = 40
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises `InvalidRequest`."""
    if not body.strip():
        raise InvalidRequest("the request body is empty; it must be a JSON object")
    if body.startswith(_BOM):
        raise InvalidRequest("the request body starts with a byte order mark; send plain UTF-8")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is no valid UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_int=_bounded_int, parse_float=_bounded_float)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the request body is no valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body is a JSON {_json_name(value)}; it must be an object")
    _check_depth(value)
    if _SURROGATE.search(text):
        _check_strings(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise InvalidRequest("the request body repeats a key inside one object; which value is meant is not clear")
    return result


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the request body holds {name}, which is no JSON number")


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARS:
        raise InvalidRequest(f"the request body holds a number of {len(digits)} digits; at most {MAX_NUMBER_CHARS} are read")
    return int(digits)


def _bounded_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise InvalidRequest("the request body holds a number too large for a 64-bit float")
    return number


def _check_depth(value: object) -> None:
    """Level by level, so that the check itself cannot run out of stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")


def _check_strings(value: object) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the request body holds half a surrogate pair, which is no character") from None
    elif isinstance(value, list):
        for item in value:
            _check_strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_strings(key)
            _check_strings(item)


def _json_name(value: object) -> str:
    names = {str: "string", int: "number", float: "number", bool: "boolean", list: "array", type(None): "null"}
    return names.get(type(value), "value")
