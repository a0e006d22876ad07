"""The one HTTP client of an audit: bounded, polite, and impossible to hang.

Owns concurrency, the budget, deadlines and size limits. Every call returns an `Answer` or a `Reply`; nothing that a server does raises,
except that the budget may be spent, and that it may take no request at all (`kvseal.audit.backoff`). Follows no redirect (an auditor talks
to the host that it was told, and nobody else), asks for no compression (a small body must not become a large one), and keeps keys out of
everything that it hands on.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType

import httpx

from kvseal.audit.backoff import BUSY, Backoff
from kvseal.audit.budget import Budget
from kvseal.audit.redact import Redactor
from kvseal.audit.wire import Answer, Ask, End, Json, parse_json, read_error, read_event, read_whole

MAX_BODY_BYTES = 8 << 20
LEAST_BODY_BYTES = 64 << 10
TOKEN_BYTES = 4 << 10  # What one generated token may take in a body, with its logprobs and the frame of its event.
MAX_EVENT_BYTES = 1 << 20
CONNECTION_LOST = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


@dataclass(frozen=True, slots=True)
class Reply:
    """A raw HTTP reply, for everything that is not a generation. `status` 0 means that there was none, and `note` says why."""

    status: int
    body: bytes = b""
    content_type: str = ""
    note: str = ""
    seconds: float = 0.0
    retry_after_s: float | None = None

    @property
    def json(self) -> Json:
        return parse_json(self.body)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """`url` ends before ``/completions``. `keys` may be empty (no Authorization is sent)."""

    url: str
    model: str = ""
    keys: tuple[str, ...] = ()
    concurrency: int = 4
    timeout_s: float = 120.0
    verify: bool = True
    ca_file: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The address without ``/v1``: where servers keep /health, /metrics and /tokenize."""
        return self.url.removesuffix("/v1")


class Client:
    """Use as ``async with Client(settings, budget) as client``."""

    def __init__(self, settings: ClientSettings, budget: Budget) -> None:
        self.settings = settings
        self.budget = budget
        self.model = settings.model
        self.redact = Redactor(settings.keys)
        self.answers: list[Answer] = []
        self.backoff = Backoff()
        self.in_flight_peak = 0
        self._in_flight = 0
        self._places = asyncio.Semaphore(settings.concurrency)
        limits = httpx.Limits(max_connections=settings.concurrency + 2, max_keepalive_connections=settings.concurrency + 2)
        self._http = _http_client(settings, limits)
        self._fresh = _http_client(settings, httpx.Limits(max_keepalive_connections=0))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()
        await self._fresh.aclose()

    async def ask(self, ask: Ask, *, retry: bool = True, timeout_s: float | None = None) -> Answer:
        """Sends `ask` and reads the answer. On 429 and 503 waits as told and tries again, unless `retry` is off.

        Raises `BudgetSpent`; and `TurnedAway` where the server goes on refusing everything, also a small request.
        """
        deadline_s = self.settings.timeout_s if timeout_s is None else timeout_s
        answer = await self._once(ask, deadline_s)
        attempt, waited_s = 0, 0.0
        while retry and answer.status in BUSY:
            wait_s = self.backoff.again(answer, attempt, waited_s)
            if wait_s is None:
                await self._given_up(ask)
                break
            attempt, waited_s = attempt + 1, waited_s + wait_s
            answer = await self._once(ask, deadline_s)
        return answer

    async def _given_up(self, ask: Ask) -> None:
        """Perhaps this request was too much for a server that serves others: a small one tells. Raises `TurnedAway`."""
        if self.backoff.given_up():
            small = Ask("Hello", max_tokens=1, chat=ask.chat, tenant=ask.tenant, prompt_tokens=32, label="does it take anybody?")
            answer = await self._once(small, self.settings.timeout_s)
            if answer.status in BUSY:
                raise self.backoff.turned_away(answer)

    async def ask_all(self, asks: list[Ask], *, retry: bool = True) -> list[Answer]:
        """All of `asks` at once, as many in flight as the user allows; answers in the order of `asks`."""
        tasks = [asyncio.create_task(self.ask(ask, retry=retry)) for ask in asks]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def sleep(self, seconds: float) -> None:
        """Waits, but not beyond the minutes: raises `BudgetSpent` when they are over."""
        await asyncio.sleep(max(0.0, min(seconds, self.budget.left_s)))
        self.budget.check_time()

    async def get(self, path: str, *, root: bool = False, tenant: int = 0, timeout_s: float = 10.0) -> Reply:
        """GET of an address under the base address, or beside it (`root`). Counts as one request."""
        self.budget.take(0)
        return await self._plain("GET", path, None, root=root, tenant=tenant, timeout_s=timeout_s)

    async def post(self, path: str, body: bytes | Json, *, root: bool = False, tenant: int = 0, timeout_s: float | None = None) -> Reply:
        """POST of any body, also a broken one (bytes go as they are)."""
        self.budget.take(0)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._plain("POST", path, data, root=root, tenant=tenant, timeout_s=timeout_s or self.settings.timeout_s)

    async def _once(self, ask: Ask, deadline_s: float) -> Answer:
        async with self._places:
            while (left_s := self.backoff.left_s) > 0:
                await self.sleep(left_s)
            booked = max(0, ask.prompt_tokens) + ask.max_tokens
            self.budget.take(booked)
            answer = Answer(ask, number=len(self.answers) + 1)
            self.answers.append(answer)
            self._in_flight += 1
            self.in_flight_peak = max(self.in_flight_peak, self._in_flight)
            began_s = time.monotonic()
            try:
                limit_s = deadline_s if ask.cancel_after_s is None else min(deadline_s, ask.cancel_after_s)
                async with asyncio.timeout(min(limit_s, max(0.1, self.budget.left_s))):
                    await self._exchange(answer, began_s, deadline_s)
            except asyncio.CancelledError:
                answer.end, answer.note = End.CANCELLED, "given up by the audit"
                raise
            except TimeoutError:
                if time.monotonic() - began_s < limit_s:  # Our time is over, not the server's: this is no hang.
                    answer.end, answer.note = End.CANCELLED, "given up: the audit's minutes are over"
                    self.budget.check_time()
                answer.end = End.CANCELLED if ask.cancel_after_s is not None and ask.cancel_after_s <= deadline_s else End.TIMEOUT
                answer.note = f"no end within {deadline_s:g} s"
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ssl.SSLError, OSError, ValueError) as error:
                timed_out = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
                answer.end = End.TIMEOUT if timed_out else End.CUT
                answer.note = self.redact(_said(error))[:200]
            finally:
                self._in_flight -= 1
                answer.total_s = time.monotonic() - began_s
                self.backoff.heard(answer)
                answer.text = self.redact(answer.text)  # A stream may have brought a key letter by letter.
                if answer.end is End.REFUSED:
                    self.budget.settle(booked, 0)
                elif answer.prompt_tokens is not None:
                    self.budget.settle(booked, answer.prompt_tokens + (answer.completion_tokens or 0))
            return answer

    async def _exchange(self, answer: Answer, began_s: float, deadline_s: float) -> None:
        """One request. Sent again on a fresh connection where the kept one was closed before a word came: that is no fault of a server."""
        try:
            await self._exchange_on(self._http, answer, began_s, deadline_s)
        except CONNECTION_LOST:
            if answer.status:
                raise
            await self._exchange_on(self._fresh, answer, began_s, deadline_s)

    async def _exchange_on(self, http: httpx.AsyncClient, answer: Answer, began_s: float, deadline_s: float) -> None:
        ask = answer.ask
        content = json.dumps(ask.body(self.model)).encode()
        headers = {"Content-Type": "application/json", **self._authorization(ask.tenant)}
        url = self.settings.url + ask.path()
        patience = httpx.Timeout(deadline_s, connect=min(10.0, deadline_s))
        async with http.stream("POST", url, content=content, headers=headers, timeout=patience) as response:
            answer.status = response.status_code
            answer.header_id = self.redact(response.headers.get("x-request-id", ""))[:80]
            answer.retry_after_s = _retry_after(response.headers.get("retry-after"))
            kind, most_bytes = self.redact(response.headers.get("content-type", "")), _most_bytes(ask, content)
            if response.status_code == 200 and ask.stream and "text/event-stream" in kind.lower():
                await _read_stream(answer, response, began_s, self.redact, most_bytes)
                return
            raw, cut = await _read_bounded(response, self.redact, most_bytes)
            answer.first_s = time.monotonic() - began_s
            if cut:
                answer.end, answer.note = End.OVERSIZE, f"the body is longer than {most_bytes} bytes"
            elif response.status_code == 200 and ask.stream:
                answer.end, answer.note = End.MALFORMED, f"a stream was asked for, content type {kind[:60]!r} came"
                body = parse_json(raw)
                if isinstance(body, dict) and body.get("error") is not None:
                    read_error(answer, body)
            elif response.status_code == 200:
                read_whole(answer, parse_json(raw))
                if answer.end is End.MALFORMED:
                    answer.note += _odd_body(response)
            elif 300 <= response.status_code < 400:
                where = self._location(response)
                answer.end, answer.note = End.MALFORMED, f"status {response.status_code}: redirects are not followed{where}"
            else:
                read_error(answer, parse_json(raw), raw)

    async def _plain(self, method: str, path: str, data: bytes | None, *, root: bool, tenant: int, timeout_s: float) -> Reply:
        url = (self.settings.root if root else self.settings.url) + path
        headers = self._authorization(tenant)
        if data is not None:
            headers["Content-Type"] = "application/json"
        began_s = time.monotonic()
        try:
            async with self._places, asyncio.timeout(min(timeout_s, max(0.1, self.budget.left_s))):
                try:
                    return await self._reply(self._http, method, url, data, headers, began_s)
                except CONNECTION_LOST:  # Perhaps only the kept connection was: see `_exchange`.
                    return await self._reply(self._fresh, method, url, data, headers, began_s)
        except TimeoutError:
            if time.monotonic() - began_s < timeout_s:
                self.budget.check_time()
            return Reply(0, note=f"no end within {timeout_s:g} s", seconds=time.monotonic() - began_s)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ssl.SSLError, OSError, ValueError) as error:
            return Reply(0, note=self.redact(_said(error))[:200], seconds=time.monotonic() - began_s)

    async def _reply(
        self, http: httpx.AsyncClient, method: str, url: str, data: bytes | None, headers: dict[str, str], began_s: float
    ) -> Reply:
        async with http.stream(method, url, content=data, headers=headers) as response:
            raw, cut = await _read_bounded(response, self.redact, MAX_BODY_BYTES)
            return Reply(
                response.status_code,
                raw,
                self.redact(response.headers.get("content-type", ""))[:80],
                "the body is too long" if cut else (_odd_body(response) + self._location(response)).strip(),
                time.monotonic() - began_s,
                _retry_after(response.headers.get("retry-after")),
            )

    def _location(self, response: httpx.Response) -> str:
        """Where a redirect points, for the note of it."""
        location = self.redact(response.headers.get("location", "")) if response.is_redirect else ""
        return f" (to {location[:120]})" if location else ""

    def _authorization(self, tenant: int) -> dict[str, str]:
        keys = self.settings.keys
        return {"Authorization": f"Bearer {keys[tenant % len(keys)]}"} if keys and keys[tenant % len(keys)] else {}


def _http_client(settings: ClientSettings, limits: httpx.Limits) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=httpx.Timeout(settings.timeout_s, connect=min(10.0, settings.timeout_s)),
        limits=limits,
        verify=_tls(settings),
        follow_redirects=False,
        trust_env=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "kvseal-audit", **settings.headers},
    )


def _tls(settings: ClientSettings) -> bool | ssl.SSLContext:
    if not settings.verify or settings.url.startswith("http://"):
        return False  # Without TLS there is nothing to verify, and loading the authorities takes time.
    return ssl.create_default_context(cafile=settings.ca_file) if settings.ca_file else True


def _retry_after(value: str | None) -> float | None:
    """Seconds from now; the header holds them, or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        due = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, (due.replace(tzinfo=due.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _odd_body(response: httpx.Response) -> str:
    """Why a body may not read: it is compressed although that was declined (and is not unpacked: it may be a bomb)."""
    coding = response.headers.get("content-encoding", "identity")[:20]
    return "" if coding in ("", "identity") else f" (it is compressed, {coding!r}, although the request declined that)"


def _most_bytes(ask: Ask, content: bytes) -> int:
    """What an honest answer to `ask` stays under: hundreds of answers are kept, so a flood must be small each time."""
    return min(MAX_BODY_BYTES, LEAST_BODY_BYTES + TOKEN_BYTES * ask.max_tokens + 4 * len(content))


async def _read_bounded(response: httpx.Response, redact: Callable[[str], str], most_bytes: int) -> tuple[bytes, bool]:
    """The body, and whether it was cut off at `most_bytes`."""
    held = bytearray()
    async for chunk in response.aiter_raw():
        held += chunk
        if len(held) > most_bytes:
            break
    text = redact(held[:most_bytes].decode("utf-8", "surrogateescape"))
    return text.encode("utf-8", "surrogateescape"), len(held) > most_bytes


async def _lines(response: httpx.Response, most_bytes: int) -> AsyncIterator[str]:
    """Lines of a stream. Raises ValueError for a line that is too long, and for a stream that is."""
    held, total = bytearray(), 0
    async for chunk in response.aiter_raw():
        total += len(chunk)
        held += chunk
        while (cut := held.find(b"\n")) >= 0:
            yield held[:cut].decode("utf-8", "replace").rstrip("\r")
            del held[: cut + 1]
        if len(held) > MAX_EVENT_BYTES or total > most_bytes:
            raise ValueError(f"the stream is longer than any answer can be: over {most_bytes} bytes")
    if held:
        yield held.decode("utf-8", "replace")


async def _read_stream(answer: Answer, response: httpx.Response, began_s: float, redact: Callable[[str], str], most_bytes: int) -> None:
    """Reads server-sent events until [DONE], the end, an error event, or the chunk at which we hang up."""
    ask, chunks = answer.ask, 0
    try:
        async for line in _lines(response, most_bytes):
            if not line.startswith("data:"):
                continue
            before = len(answer.text) + len(answer.steps)
            read_event(answer, redact(line[5:]))
            if len(answer.text) + len(answer.steps) > before:
                chunks += 1
                answer.first_s = answer.first_s if answer.first_s is not None else time.monotonic() - began_s
            if answer.done_seen or answer.end is not End.ANSWERED:
                break
            if chunks > 4 * ask.max_tokens + 64:
                answer.end, answer.note = End.OVERSIZE, f"{chunks} pieces for max_tokens {ask.max_tokens}"
                return
            if ask.cancel_after_chunks is not None and chunks >= ask.cancel_after_chunks:
                answer.end = End.CANCELLED
                return
    except ValueError as error:
        answer.end, answer.note = End.OVERSIZE, str(error)
        return
    if answer.end is End.ANSWERED and answer.finish_reason is None:
        said = "said [DONE]" if answer.done_seen else "stopped without [DONE]"
        answer.end, answer.note = End.CUT, f"the stream {said} and gave no finish reason"
