"""Keys are taken out of what a server says, however its library wrote them."""

from __future__ import annotations

import html
import json
import urllib.parse

import pytest

from kvseal.audit.redact import Redactor, key_name

KEY = "sk-ab/cd+ef&gh'ij\"kl"


def _dotnet(text: str) -> str:
    return "".join(f"\\u{ord(char):04X}" if char in "+&'\"" else char for char in text)


@pytest.mark.parametrize(
    "written",
    [
        KEY,
        json.dumps(KEY)[1:-1],
        json.dumps(KEY)[1:-1].replace("/", "\\/"),
        json.dumps(json.dumps(KEY).replace("/", "\\/"))[3:-3],
        _dotnet(KEY),
        "".join(f"\\u{ord(char):04x}" for char in KEY),
        urllib.parse.quote(KEY, safe=""),
        urllib.parse.quote(KEY, safe="").lower(),
        html.escape(KEY),
        "".join(f"&#{ord(char)};" for char in KEY),
    ],
)
def test_a_key_is_found_in_every_spelling(written: str) -> None:
    said = Redactor(("another-key", KEY))(f'{{"error": "Incorrect API key provided: {written}."}}')
    assert said == f'{{"error": "Incorrect API key provided: {key_name(KEY)}."}}'


def test_backslashes_in_a_key() -> None:
    key = "\\\\key\\1"
    assert Redactor((key,))(f"<{json.dumps(json.dumps(key))[1:-1]}>").count(key_name(key)) == 1


def test_a_key_that_another_begins_with() -> None:
    said = Redactor(("sk-one", "sk-one-more"))("sk-one-more, sk-one")
    assert said == f"{key_name('sk-one-more')}, {key_name('sk-one')}"


def test_what_is_no_key_stays() -> None:
    text = "sk-ab/cd 100% &amp; \\u0041"
    assert Redactor((KEY, "", "abc"))(text) == text
    assert Redactor(())(text) == text
