"""Reading a configuration strictly: every field has a type and a range, and an error names it.

Owns `Fields`. Never invents a value: a default is always given by the caller, who states whose default it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvseal.core.errors import ModelCorrupt, ModelUnsupported

MAX_COUNT = 2**31 - 1
MAX_LAYERS = 10_000
MAX_HEAD_DIM = 8192
"""Bounds on what is multiplied out before any tensor is looked at."""


class Fields:
    """A mapping with typed access. `where` opens every message: the file, and the key of a nested mapping."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        """Present and not null."""
        return self._values.get(key) is not None

    def names(self, key: str) -> bool:
        """Present, null included."""
        return key in self._values

    def raw(self, key: str) -> object:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT) -> int:
        """A whole number from `low` to `high`. Raises ModelCorrupt when missing without a default, or out of range."""
        value = self._present(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.corrupt(key, f"is {_shown(value)}; it must be a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or (positive and value <= 0):
            raise self.corrupt(key, f"is {_shown(value)}; it must be a {'positive ' if positive else ''}number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.corrupt(key, f"is {_shown(value)}; it must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.corrupt(key, f"is {_shown(value)}; it must be a string")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Exactly `length` positive numbers."""
        value = self._present(key, None)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != length:
            raise self.corrupt(key, f"must be a list of {length} numbers")
        if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x > 0 for x in value):
            raise self.corrupt(key, "holds something that is not a positive number")
        return tuple(float(x) for x in value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= MAX_COUNT for x in ids):
            raise self.corrupt(key, f"is {_shown(value)}; it must be a token id or a list of them")
        return tuple(ids)

    def nested(self, key: str) -> Fields | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.corrupt(key, f"is {_shown(value)}; it must be an object")
        return Fields(value, f"{self.where}: {key}")

    def corrupt(self, key: str, what: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.where}: {key} {what}")

    def unsupported(self, key: str, what: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self.where}: {key} {what}")

    def _present(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if isinstance(value, np.generic):
            value = value.item()
        if value is None:
            value = default
        if value is None:
            raise ModelCorrupt(f"{self.where}: key {key} is missing")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
