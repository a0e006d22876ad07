"""What is remembered of one HTTP request while it is open, and the one line that is logged at its end.

Owns `Record`. Numbers, names and ids only: never a prompt, an output, a query string or a key.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope as AsgiScope

_KEY = "kvseal.record"
_log = logging.getLogger("kvseal.http")


@dataclass(slots=True)
class Record:
    """Filled by whoever knows; written once, by the gate."""

    request_id: str
    """What x-request-id says: the caller's own within bounds, else ours."""
    method: str
    tenant: str = ""
    route: str = "none"
    status: int = 0
    outcome: str = "-"
    """completed, refused, cancelled or failed; "-" for routes that generate nothing."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    started_at_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at_s

    def write(self) -> None:
        """The terminal record. Probes and scrapes are only of interest when something is being looked for."""
        generates = self.outcome != "-"
        level = logging.INFO if generates or self.status >= 400 else logging.DEBUG
        if not _log.isEnabledFor(level):
            return
        line = f"id={self.request_id} method={self.method} route={self.route} status={self.status} total_ms={self.age_s * 1000:.0f}"
        if generates:
            first = "-" if self.first_token_s is None else f"{self.first_token_s * 1000:.0f}"
            line += (
                f" outcome={self.outcome} prompt_tokens={self.prompt_tokens} cached_tokens={self.cached_tokens}"
                f" completion_tokens={self.completion_tokens} first_token_ms={first}"
            )
        _log.log(level, line)


def put_record(scope: AsgiScope, record: Record) -> None:
    scope[_KEY] = record


def record_of(scope: AsgiScope) -> Record:
    record: Any = scope[_KEY]
    if not isinstance(record, Record):
        raise TypeError("this request did not come through the gate")
    return record
