"""How a request ends: exactly one of four ways (L11).

Owns the outcome types. `Refused` means that nothing was reserved; `Failed` carries the error itself. None of them can turn into
another, and only `Completed` may become an HTTP 200.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvseal.core.errors import BrokenSeal, RequestError, Unavailable


class FinishReason(StrEnum):
    """Why a completed request stopped. `stop` carries what stopped it in `Completed.stop_match`."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the client counts them. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Completed:
    reason: FinishReason
    usage: Usage
    stop_token: int | None = None
    """The stop or end-of-sequence token id that ended it, when one did."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was reserved, nothing was computed."""

    error: RequestError | Unavailable


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left or cancelled."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    error: BrokenSeal | Unavailable


Outcome = Completed | Refused | Cancelled | Failed
