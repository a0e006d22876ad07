"""Keys out of everything that a server says: servers echo them in errors, each in the spelling of its library.

Owns how a key is found in a text, and how it is called instead. Laws: a report holds no key, however a server wrote it.
"""

from __future__ import annotations

import hashlib
import html
import re

_LEAST_SECRET_LETTERS = 4  # A shorter key is no secret, and would be found in every text.
_NAMED = {entity: f"|&{entity};" for entity in ("amp", "lt", "gt", "quot", "apos")}
_PARTS = re.compile(r"\\+|[^\\]")
_BACKSLASHES = r"(?:\\|u005[cC]|%5[cC]|&#(?:92|[xX]5[cC]);){1,32}+"  # However many: escapes double them.


class Redactor:
    """Replaces the user's keys by the beginning of a digest."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        secret = sorted({key for key in keys if len(key) >= _LEAST_SECRET_LETTERS}, key=len, reverse=True)  # One may begin another.
        self._names = [key_name(key) for key in secret]
        self._pattern = re.compile("|".join(f"({''.join(map(_spellings, _PARTS.findall(key)))})" for key in secret)) if secret else None

    def __call__(self, text: str) -> str:
        """`text` without keys. Everything that a server says goes through this before anything else sees it, above all before a text is cut
        to its first letters: half a key would not be found any more."""
        return text if self._pattern is None else self._pattern.sub(lambda found: self._names[(found.lastindex or 1) - 1], text)


def key_name(key: str) -> str:
    """How a key is called in a report: the beginning of its SHA-256, from which it cannot be had back."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:8]


def _spellings(char: str) -> str:
    """A pattern for one letter (or a run of backslashes) as it is, as JSON may escape it (also a JSON text within another), in an address,
    and in HTML. No two of its ways begin alike, so that no text makes the search slow."""
    if char.startswith("\\"):
        return _BACKSLASHES
    code = ord(char)
    named = "".join(pattern for entity, pattern in _NAMED.items() if html.unescape(f"&{entity};") == char)
    escaped = rf"u00{code:02x}" + ("" if char.isalnum() else "|" + re.escape(char))
    return rf"(?:{re.escape(char)}|\\{{1,8}}(?i:{escaped})|%(?i:{code:02x})|&#(?:[xX]0{{0,4}}(?i:{code:x})|0{{0,4}}{code});{named})"
