"""How much of somebody's server an audit may use: requests, tokens and minutes.

Owns the counting. Never waits and never sends: `Client` asks it before each request.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass


class BudgetSpent(Exception):
    """The next request would go over the budget. Probes let it pass; the runner notes what was left undone."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What an audit may use at most."""

    requests: int = 2_000
    tokens: int = 1_000_000
    minutes: float = 30.0

    @staticmethod
    def parse(text: str) -> Allowance:
        """Reads ``requests=500,tokens=200000,minutes=10``; k and M may follow a number. Raises ValueError with the part that is wrong."""
        found: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            match = re.fullmatch(r"(requests|tokens|minutes)\s*=\s*([0-9]+(?:\.[0-9]+)?)([kKmM]?)", part)
            if match is None:
                raise ValueError(f"cannot read {part!r}: write requests=N, tokens=N or minutes=N, parted by commas")
            scale = {"": 1.0, "k": 1e3, "m": 1e6}[match[3].lower()]
            found[match[1]] = float(match[2]) * scale
            least = 0.0 if match[1] == "minutes" else 1.0 - 1e-9
            if not least < found[match[1]] < 1e15:
                raise ValueError(f"{match[1]} must be {'above 0' if match[1] == 'minutes' else 'at least 1'}, and less than 10^15")
        usual = Allowance()
        return Allowance(
            requests=int(found.get("requests", usual.requests)),
            tokens=int(found.get("tokens", usual.tokens)),
            minutes=found.get("minutes", usual.minutes),
        )

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.tokens} tokens, {self.minutes:g} minutes"


class Budget:
    """Counts against an `Allowance`. Tokens are counted before sending, by what the request may use, and set right afterwards."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        self.requests = 0
        self.tokens = 0
        self._began_s = time.monotonic()
        self._ceiling = allowance

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds until the minutes of the present share are over."""
        return self._ceiling.minutes * 60.0 - self.elapsed_s

    @property
    def spent(self) -> bool:
        """Nothing is left of the whole."""
        whole = self.allowance
        return self.requests >= whole.requests or self.tokens >= whole.tokens or self.elapsed_s >= whole.minutes * 60.0

    def share(self, part: float, minutes_part: float | None = None) -> None:
        """Until the next call at most this part (0 to 1) of what is left may be taken, so that one probe leaves something to the others.

        `minutes_part` is the part of the time, where that is another one.
        """
        whole, elapsed_minutes = self.allowance, self.elapsed_s / 60.0
        self._ceiling = Allowance(
            requests=self.requests + math.ceil((whole.requests - self.requests) * part),
            tokens=self.tokens + math.ceil((whole.tokens - self.tokens) * part),
            minutes=elapsed_minutes + (whole.minutes - elapsed_minutes) * (part if minutes_part is None else minutes_part),
        )

    def affords(self, tokens: int) -> bool:
        """Would a request of `tokens` fit in the present share?"""
        return self.tokens + tokens <= self._ceiling.tokens

    def take(self, tokens: int) -> None:
        """Books one request of `tokens`. Raises `BudgetSpent`, and books nothing, when that is too much."""
        ceiling = self._ceiling
        share = "" if ceiling.requests == self.allowance.requests else "this probe's share of "
        if self.requests + 1 > ceiling.requests:
            raise BudgetSpent(f"{share}the budget of {self.allowance.requests} requests is spent")
        if self.tokens + tokens > ceiling.tokens:
            raise BudgetSpent(f"{share}the budget of {self.allowance.tokens} tokens is spent: the next request may take {tokens}")
        self.check_time()
        self.requests += 1
        self.tokens += tokens

    def check_time(self) -> None:
        """Raises `BudgetSpent` when the minutes of the present share are over."""
        if self.left_s <= 0:
            share = "" if self._ceiling.minutes == self.allowance.minutes else "this probe's share of "
            raise BudgetSpent(f"{share}the budget of {self.allowance.minutes:g} minutes is spent")

    def settle(self, booked: int, used: int) -> None:
        """Replaces the booked tokens of one request by those that it really used (a refused request uses none)."""
        self.tokens += max(0, used) - booked
