"""The gate that every HTTP request passes: identity, authentication, errors, the record at the end.

Owns the order of these, and default-deny: with a key file every route but the probes needs a key, unknown routes too. Turns every error
into the contract's JSON shape. This is the HTTP app's one place that catches everything.
"""

from __future__ import annotations

import logging
import secrets
import traceback
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvseal.core.errors import BrokenSeal, RequestError, Unavailable
from kvseal.serve.auth import KeyRing
from kvseal.serve.errors_http import ServedError, error_body, error_headers, error_status
from kvseal.serve.metrics import Metrics
from kvseal.serve.parse import REQUEST_ID
from kvseal.serve.record import Record, put_record

OPEN_ROUTES = ("/livez", "/readyz", "/health")
GENERATING = ("/chat/completions", "/completions")
_log = logging.getLogger("kvseal.http")


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own_id = headers.get("x-request-id", "")
        record = Record(own_id if REQUEST_ID.fullmatch(own_id) else new_id("req"), scope["method"])
        put_record(scope, record)
        answer = _Answer(send, record)
        try:
            if scope["path"] not in OPEN_ROUTES:
                record.tenant = self._keys.tenant(headers.get("authorization"))
            await self._app(scope, receive, answer)
        except (RequestError, Unavailable, BrokenSeal) as error:
            if record.outcome == "-" and scope["path"].endswith(GENERATING):
                record.outcome = "refused"  # before the engine was asked: malformed, unauthenticated or over a limit
            await answer.fail(error)
        except ClientDisconnect:
            record.outcome = "cancelled"
        except Exception as error:  # noqa: BLE001 - the HTTP app's one catch-all
            # Types and places only: an exception's text may hold content.
            places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            _log.error("id=%s internal error %s at %s", record.request_id, type(error).__name__, " < ".join(reversed(places[-8:])))
            await answer.fail(None)
        finally:
            self._close(scope, record)

    def _close(self, scope: Scope, record: Record) -> None:
        route = scope.get("route")
        record.route = route.path if route is not None else "none"
        status = str(record.status) if record.status else "disconnected"
        self._metrics.http_requests.labels(record.route, status).inc()
        if record.outcome != "-":
            self._metrics.http_outcomes.labels(record.outcome).inc()
        record.write()


class _Answer:
    """A `send` that knows whether the answer has begun, and puts the request's id on it."""

    def __init__(self, send: Send, record: Record) -> None:
        self._send = send
        self._record = record

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._record.request_id
        await self._send(message)

    async def fail(self, error: ServedError | None) -> None:
        if self._record.status:  # The answer has begun: what is broken stays visibly broken, and the connection is closed.
            return
        await send_json(self, error_status(error), error_body(error), error_headers(error))


async def send_json(send: Send, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
    """One JSON answer."""
    raw = msgspec.json.encode(body)
    fields = {"content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": raw})


def new_id(prefix: str) -> str:
    """An id that only the server can make and nobody can guess."""
    return f"{prefix}-{secrets.token_hex(16)}"
