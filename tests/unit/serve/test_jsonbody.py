"""What is not plain, unambiguous JSON gets an error that says why, and never quotes the body."""

from __future__ import annotations

import pytest

from kvseal.core.errors import InvalidRequest
from kvseal.serve.jsonbody import MAX_DEPTH, parse_json_object


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"secret"', "line 1"),
        (b'{"secret": 1,}', "line 1"),
        (b"[1]", "array"),
        (b'"secret"', "string"),
        (b"null", "value|null"),
        (b"NaN", "NaN"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": 1, "a": 2}', "repeats"),
        (b'{"x": {"a": 1, "a": 2}}', "repeats"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "nested"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested"),
        (b'{"a": ' + b"[" * 200_000, "nested|valid JSON"),
    ],
)
def test_bad_bodies(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parse_json_object(body)
    assert "secret" not in str(caught.value)


def test_good_bodies() -> None:
    assert parse_json_object(b' {"a": [1, 2.5, null, true, "\\ud83d\\ude00"]} ') == {"a": [1, 2.5, None, True, "\U0001f600"]}
    deep = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert isinstance(parse_json_object(deep)["a"], list)
