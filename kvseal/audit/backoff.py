"""When to come back after a 429 or 503, and when to stop coming.

Owns the waiting that a server asks for, and the count of requests that it turned away in a row. Never sends. Laws: nobody is asked again
before the moment that he named (where that is within a minute; else three more requests find out whether it holds for all); who turns
everybody away is not asked for the whole budget.
"""

from __future__ import annotations

import time

from kvseal.audit.wire import Answer

BUSY = (429, 503)
MAX_RETRIES = 4
MAX_WAIT_S = 60.0
"""A request is not sent again when its waits, as the server asks for them, would sum up to more than this."""
MOST_TURNED_AWAY = 3
"""So many requests in a row, each refused after all its retries, look like a server that takes nobody."""


class TurnedAway(Exception):
    """The server refuses whatever it is asked with 429 or 503. Probes let it pass; the runner makes a result of it."""

    def __init__(self, answer: Answer, refused: int, seconds: float) -> None:
        self.answer = answer
        said = f" ({answer.error_message[:160]!r})" if answer.error_message else ""
        later = f"; it asks to come back in {answer.retry_after_s:.0f} s" if answer.retry_after_s else ""
        super().__init__(
            f"{refused} requests in {seconds:.0f} s, the last of them a small one, were all refused with {answer.status}{said}{later}"
        )


class Backoff:
    """One for all requests to one server: when it says that it is busy, all of them wait."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._refused = 0
        self._given_up = 0
        self._since_s: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the server may be asked again."""
        return max(0.0, self._until_s - time.monotonic())

    def heard(self, answer: Answer) -> None:
        """Notes what came: anything but a 429 or 503 means that the server takes requests."""
        if answer.status in BUSY:
            self._pause(answer.retry_after_s or 0.0)
            self._refused += 1
            self._since_s = time.monotonic() if self._since_s is None else self._since_s
        elif answer.status:
            self._refused, self._given_up, self._since_s = 0, 0, None

    def again(self, answer: Answer, attempt: int, waited_s: float) -> float | None:
        """How long to wait before a request that was refused `attempt` times (counted from 0) is sent again; None: not at all.
        Where the one before was given up, nobody was served since, and the next one is not worth much waiting either."""
        named_s = answer.retry_after_s
        wait_s = 0.5 * 2.0**attempt if named_s is None else named_s
        if attempt >= MAX_RETRIES or self._given_up or waited_s + wait_s > MAX_WAIT_S:
            return None
        self._pause(wait_s)
        return wait_s

    def _pause(self, wait_s: float) -> None:
        if wait_s <= MAX_WAIT_S:
            self._until_s = max(self._until_s, time.monotonic() + wait_s)

    def given_up(self) -> bool:
        """One more request was refused for good. True when there were so many in a row that the server seems to take nobody."""
        self._given_up += 1
        return self._given_up >= MOST_TURNED_AWAY

    def turned_away(self, answer: Answer) -> TurnedAway:
        """What to raise once a small request was refused as well."""
        since_s = time.monotonic() if self._since_s is None else self._since_s
        return TurnedAway(answer, self._refused, time.monotonic() - since_s)
