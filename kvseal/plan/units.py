"""Whole numbers, and how people write them. Owns rounding and parsing; knows nothing of models. Bytes stay integers to the end."""

from __future__ import annotations

import math
import re

from kvseal.core.errors import ConfigError

GIB = 2**30
MIB = 2**20
KIB = 2**10
MAX_TOKENS = 2**40
"""No context, pool or promise is larger than this; a larger number is a slip of the keyboard."""
MAX_BYTES = 2**60

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "kib": 2**10}
_FACTORS |= {"mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "b": 1}
_NUMBER = re.compile(r"([0-9][0-9,_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


def cdiv(value: int, divisor: int) -> int:
    """Division rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return cdiv(value, multiple) * multiple


def parse_tokens(text: str, flag: str) -> int:
    """``131072``, ``131,072``, ``128k`` (x 1,000), ``128Ki`` (x 1,024) or ``1M``."""
    number, unit = _split(text, flag)
    if unit not in ("", "k", "m", "ki", "mi"):
        raise ConfigError(f"{flag}: {text!r} has a unit that tokens do not come in; write 131072, 128k or 128Ki")
    if not unit and isinstance(number, float):
        raise ConfigError(f"{flag}: {text!r} is not a whole number of tokens")
    return _whole(number, unit, text, flag, MAX_TOKENS)


def parse_bytes(text: str, flag: str) -> int:
    """``34.2GiB``, ``12 GB`` or a plain number of bytes."""
    number, unit = _split(text, flag)
    if unit not in _FACTORS:
        raise ConfigError(f"{flag}: {text!r} has no unit that I know; write 34.2GiB, 12GB or a number of bytes")
    return _whole(number, unit, text, flag, MAX_BYTES)


def parse_gib(text: str, flag: str) -> int:
    """Bytes; a bare number means GiB."""
    number, unit = _split(text, flag)
    if unit and unit not in _FACTORS:
        raise ConfigError(f"{flag}: {text!r} has no unit that I know; write 34.2 (GiB), 34.2GiB or 12GB")
    return _whole(number, unit or "gib", text, flag, MAX_BYTES)


def is_tokens(text: str) -> bool:
    """Whether a pool was given in tokens (no unit of bytes)."""
    match = _NUMBER.fullmatch(text.strip())
    return bool(match) and match.group(2).lower() in ("", "k", "m", "ki", "mi")  # type: ignore[union-attr]


def _split(text: str, flag: str) -> tuple[float | int, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or len(text) > 40:
        raise ConfigError(f"{flag}: {text[:40]!r} is not a positive number")
    digits = match.group(1).replace(",", "").replace("_", "")
    return (float(digits) if "." in digits else int(digits)), match.group(2).lower()


def _whole(number: float | int, unit: str, text: str, flag: str, limit: int) -> int:
    value = math.floor(number * _FACTORS[unit])
    if not 0 < value <= limit:
        raise ConfigError(f"{flag}: {text!r} is out of range (1 to {limit:,})")
    return value


def printable(text: str) -> str:
    """One line without control characters: names come from untrusted files and go to terminals."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def gib(size_bytes: int | float) -> str:
    """Three significant places, in GiB."""
    value = size_bytes / GIB
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3f}"


def human_bytes(size_bytes: int) -> str:
    """A short figure with its own unit: 56 KiB, 1.75 GiB."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size_bytes} B"
