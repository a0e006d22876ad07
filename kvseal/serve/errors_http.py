"""Errors as HTTP: status, headers and the one body shape that every client reads.

Owns that shape (``{"error": {message, type, param, code}}``, plus ``details``) and the retry headers. Unknown errors become a 500 that says
nothing of what was being processed.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from kvseal.core.errors import BrokenSeal, RateLimited, RequestError, Unavailable

ServedError = RequestError | Unavailable | BrokenSeal


def error_body(error: ServedError | None) -> dict[str, Any]:
    """The JSON body; None stands for a bug of ours."""
    if error is None:
        inner: dict[str, Any] = {
            "message": "the server met an error of its own; it has been logged under this request's id",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        return {"error": inner}
    param = error.param if isinstance(error, RequestError) else None
    inner = {"message": error.message, "type": error.type, "param": param, "code": error.code}
    if isinstance(error, RequestError) and error.details:
        inner["details"] = error.details
    if isinstance(error, BrokenSeal):
        inner["details"] = {"law": error.law.value, "check": error.check}
    return {"error": inner}


def error_status(error: ServedError | None) -> int:
    return 500 if error is None else error.status


def error_headers(error: ServedError | None) -> dict[str, str]:
    """Retry-After and its kin. Clients of OpenAI retry 429 and 5xx by themselves, and honour these."""
    headers: dict[str, str] = {}
    wait_s = error.retry_after_s if isinstance(error, Unavailable | RateLimited) else None
    if wait_s is not None:
        headers = {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))}
    if isinstance(error, BrokenSeal):
        headers["x-should-retry"] = "true"
    if isinstance(error, RequestError) and error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_event(error: ServedError | None) -> bytes:
    """The event that ends a stream which has already begun. No [DONE] follows it."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"
