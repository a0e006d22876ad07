"""A config read with suspicion: typed, bounded, and remembering every class default it had to use.

Owns the conversion from untrusted JSON values to numbers. A key that is absent means the class default, which is then listed; a key
that is null or of another type is an error that names it. Never guesses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvseal.core.errors import ModelCorrupt

_LIMITS = {"layers": 4096, "heads": 65536, "dim": 1 << 20, "tokens": 1 << 40, "count": 1 << 24}


class Fields:
    """Reads one flat dictionary. `defaults` are the class defaults of its model type."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "") -> None:
        self.raw = raw
        self.class_defaults = defaults
        self.where = where
        self.used_defaults: list[str] = []
        self.notes: list[str] = []
        self.rules: list[str] = []

    def has(self, key: str) -> bool:
        """Present and not null."""
        return self.raw.get(key) is not None

    def is_null(self, key: str) -> bool:
        return key in self.raw and self.raw[key] is None

    def value(self, *keys: str) -> Any:
        """The raw value of the first key present; the class default next; None otherwise."""
        for key in keys:
            if self.has(key):
                return self.raw[key]
        for key in keys:
            if key not in self.raw and self.class_defaults.get(key) is not None:
                self.note_default(key, self.class_defaults[key])
                return self.class_defaults[key]
        return None

    def note_default(self, key: str, value: object) -> None:
        text = f"{self.where}{key} = {value if not isinstance(value, list) or len(value) < 9 else '[...]'}"
        if text not in self.used_defaults:
            self.used_defaults.append(text)

    def integer(self, *keys: str, limit: str = "dim", fallback: int | None = None, minimum: int = 1) -> int:
        """The first key present, else its class default, else `fallback` (listed), else an error that names the keys."""
        for key in keys:
            if self.has(key):
                return self.check(key, self.raw[key], limit, minimum)
        for key in keys:
            if self.is_null(key) and fallback is None:
                raise ModelCorrupt(f"{self.where}{key} is null; it must be a whole number of at least {minimum}")
        value = self.value(*keys)
        if value is not None:
            return self.check(keys[0], value, limit, minimum)
        if fallback is None:
            raise ModelCorrupt(f"the config has none of {', '.join(self.where + key for key in keys)}, and its class has no default")
        self.note_default(keys[0], f"{fallback} (derived)")
        return fallback

    def optional(self, *keys: str, limit: str = "dim", minimum: int = 1) -> int | None:
        """Like `integer`, but None when neither the file nor the class has it; null counts as absent."""
        value = self.value(*keys)
        if value is None:
            return None
        key = next((key for key in keys if self.has(key)), keys[0])
        return self.check(key, value, limit, minimum)

    def boolean(self, key: str, fallback: bool = False) -> bool:
        value = self.value(key)
        if value is None:
            return fallback
        if not isinstance(value, bool):
            raise ModelCorrupt(f"{self.where}{key} is {_short(value)}; it must be true or false")
        return value

    def sequence(self, key: str) -> list[Any] | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > 2 * _LIMITS["layers"]:
            raise ModelCorrupt(f"{self.where}{key} is {_short(value)}; it must be a list with one entry per layer")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ModelCorrupt(f"{self.where}{key} is {_short(value)}; it must be an object")
        return value

    def inner(self, key: str) -> Fields:
        """A nested object with no class defaults of its own, reporting into the same lists."""
        child = Fields(self.mapping(key), {}, f"{self.where}{key}.")
        child.used_defaults, child.notes, child.rules = self.used_defaults, self.notes, self.rules
        return child

    def check(self, key: str, value: object, limit: str, minimum: int = 1) -> int:
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelCorrupt(f"{self.where}{key} is {_short(value)}; it must be a whole number")
        if not minimum <= value <= _LIMITS[limit]:
            raise ModelCorrupt(f"{self.where}{key} is {_short(value)}; it must be between {minimum} and {_LIMITS[limit]:,}")
        return value


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "an absurdly large number"
    return repr(value)[:60]
