"""What a user may wait for, and how many got it: limits, records of requests, attainment.

Owns the definitions: TTFT from arrival to the first token; TPOT = (last - first token) / (tokens - 1); TBT the mean of the longest
tenth of a request's gaps between tokens; attainment = requests within all limits / requests sent, refused ones counted as sent.
A request of one token has no TPOT and no TBT, and meets those limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvseal.core.errors import ConfigError

NAMES = ("ttft", "tpot", "tbt")
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|x|)")
LONGEST_SHARE = 0.1


class Record:
    """What became of one request."""

    __slots__ = ("arrived_s", "first_s", "gaps", "last_s", "output_tokens", "produced", "prompt_tokens", "refused")

    def __init__(self, arrived_s: float, output_tokens: int, prompt_tokens: int = 0) -> None:
        self.arrived_s = arrived_s
        self.output_tokens = output_tokens
        self.prompt_tokens = prompt_tokens
        self.produced = 0
        self.first_s = math.inf
        self.last_s = math.inf
        self.refused = False
        self.gaps: list[tuple[float, int]] = []
        """Times between tokens, and how many in a row were the same; kept where they are looked at."""

    @property
    def done(self) -> bool:
        return self.produced >= self.output_tokens

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Infinite while it is not complete."""
        if not self.done:
            return math.inf
        return (self.last_s - self.first_s) / (self.produced - 1) if self.produced > 1 else 0.0

    @property
    def tbt_s(self) -> float:
        if not self.done:
            return math.inf
        left = longest = max(1, math.ceil(LONGEST_SHARE * (self.produced - 1)))
        total = 0.0
        for gap_s, count in sorted(self.gaps, reverse=True):
            taken = min(left, count)
            total += taken * gap_s
            left -= taken
        return total / longest


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Limits in seconds; None is no limit. At least one is set."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    tbt_s: float | None = None

    def first_in_time(self, record: Record) -> bool:
        return not record.refused and (self.ttft_s is None or record.ttft_s <= self.ttft_s)

    def met(self, record: Record) -> bool:
        return not self.missed(record)

    def missed(self, record: Record) -> tuple[str, ...]:
        """Names of the limits that a record did not meet; all of them where it was refused or never ended."""
        if record.refused or not record.done:
            return tuple(name for name, limit in self.limits() if limit is not None)
        wrong = []
        if self.ttft_s is not None and record.ttft_s > self.ttft_s:
            wrong.append("ttft")
        if self.tpot_s is not None and record.tpot_s > self.tpot_s:
            wrong.append("tpot")
        if self.tbt_s is not None and record.tbt_s > self.tbt_s:
            wrong.append("tbt")
        return tuple(wrong)

    def limits(self) -> tuple[tuple[str, float | None], ...]:
        return ("ttft", self.ttft_s), ("tpot", self.tpot_s), ("tbt", self.tbt_s)

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} <= {seconds(limit)}" for name, limit in self.limits() if limit is not None)


@dataclass(frozen=True, slots=True)
class Asked:
    """Limits as written: seconds, or multiples of what a request takes alone on an idle worker."""

    limits: dict[str, tuple[float, bool]]
    """By name: the number, and whether it is a multiple."""

    def resolved(self, alone: SLO) -> SLO:
        """`alone` holds the idle times."""
        idle = dict(alone.limits())
        values = {}
        for name, (number, multiple) in self.limits.items():
            values[name] = number * (idle[name] or 0.0) if multiple else number
        return SLO(ttft_s=values.get("ttft"), tpot_s=values.get("tpot"), tbt_s=values.get("tbt"))


def parse_slo(text: str) -> Asked:
    """ "ttft=200ms,tpot=0.1", "ttft=10x,tbt=3x". A bare number is in seconds. Raises `ConfigError` that says which part is wrong."""
    limits: dict[str, tuple[float, bool]] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        name = name.strip().lower()
        if not equals or name not in NAMES:
            raise ConfigError(f"--slo has {part.strip()!r}; write limits like ttft=200ms,tpot=0.1 (from {', '.join(NAMES)})")
        if name in limits:
            raise ConfigError(f"--slo names {name} twice")
        found = _TIME.fullmatch(value.strip().lower())
        number = float(found[1]) if found else 0.0
        if not found or number <= 0:
            raise ConfigError(
                f"--slo has {name}={value.strip()}; give seconds (0.2), milliseconds (200ms) or multiples of idle (10x), above 0"
            )
        limits[name] = (number / 1000 if found[2] == "ms" else number, found[2] == "x")
    return Asked(limits)


def attainment(records: Sequence[Record], slo: SLO) -> float:
    return sum(slo.met(record) for record in records) / len(records)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; infinite where there is none."""
    ordered = sorted(values)
    if not ordered:
        return math.inf
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def seconds(value: float | None) -> str:
    """0.0123 -> 12.3 ms, 1.5 -> 1.50 s."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "never"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
