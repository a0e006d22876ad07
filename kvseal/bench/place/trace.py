"""Loads: what arrives when, and how long it is. Read from a trace file, or drawn from one at a rate.

Owns the reading of trace files and the making of arrivals. Formats (columns may stand in any order, others are ignored):

- CSV with a header: `input_tokens`, `output_tokens`, and `t_s` (seconds) if arrival times are known;
- CSV as Azure publishes its LLM inference traces: `TIMESTAMP` (a date and a time, or seconds), `ContextTokens`, `GeneratedTokens`;
- JSON lines with `input_length`, `output_length`, `timestamp` (milliseconds) and `hash_ids` (one id per block of the prompt; equal ids
  are equal blocks after equal prefixes);
- JSON lines with `turns`: [["h", tokens], ["g", tokens], ...]: each reply is a request whose prompt is all that stands before it.

Never knows text. Everything drawn depends on the seed alone.
"""

from __future__ import annotations

import csv
import json
import random
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from kvseal.core.errors import ConfigError

CSV_COLUMNS = {"input_tokens": "contexttokens", "output_tokens": "generatedtokens", "t_s": "timestamp"}
"""Ours, and Azure's in small letters: capitals, blanks and a byte order mark in a header say nothing."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T]")
_LONG_FRACTION = re.compile(r"(\.[0-9]{6})[0-9]+")
JSON_FIELDS = ("input_length", "output_length")
READ_AT_MOST = 200_000
"""Requests of a file that are used, from where the window begins; of a longer one the report says so."""
MOST = 1e15
"""Of any number in a trace: milliseconds since 1970 are fewer."""
TICKED_SHARE = 0.5
"""Where more arrivals than this share bear the time of the one before, times are taken as ticks of a coarse clock."""


class Job(NamedTuple):
    """One request of a load."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks; empty where nothing is known of shared prefixes."""
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of a file in its order. `timed`: their times are real; else all are 0 and only lengths are known."""

    name: str
    jobs: tuple[Job, ...]
    timed: bool
    spread: bool = False
    """Times came in coarse ticks, and requests of a tick were spread evenly to the next one."""

    @property
    def rate(self) -> float:
        """Requests per second as recorded; 0 where no times are known."""
        span = self.jobs[-1].at_s - self.jobs[0].at_s
        return (len(self.jobs) - 1) / span if span > 0 else 0.0

    def means(self) -> tuple[float, float]:
        """Prompt and output tokens."""
        count = len(self.jobs)
        return sum(job.prompt_tokens for job in self.jobs) / count, sum(job.output_tokens for job in self.jobs) / count

    def at_rate(self, rate: float, requests: int, *, poisson: bool, seed: int = 0) -> list[Job]:
        """So many requests at `rate` per second. With `poisson` gaps are exponential and requests come in an order drawn by `seed`; else
        order and gaps are the trace's own, stretched to the rate. A trace that is too short starts again, sharing nothing with before."""
        if poisson or not self.timed:
            order = random.Random(f"order {seed}")
            gaps = random.Random(f"gaps {seed}")
            numbers = list(islice(_shuffled(len(self.jobs), order), requests))
            at_s, times = 0.0, []
            for _ in numbers:
                times.append(at_s)
                at_s += gaps.expovariate(rate)
        else:
            numbers = list(range(requests))
            times = self._stretched(rate, requests)
        return [self._job(number, at_s) for number, at_s in zip(numbers, times, strict=True)]

    def as_recorded(self, requests: int) -> list[Job]:
        """The first `requests`, at their own times from 0."""
        start_s = self.jobs[0].at_s
        return [job._replace(at_s=job.at_s - start_s) for job in self.jobs[:requests]]

    def _stretched(self, rate: float, requests: int) -> list[float]:
        count = len(self.jobs)
        span = self.jobs[-1].at_s - self.jobs[0].at_s
        around_s = span * count / max(1, count - 1)  # the gap before the trace starts again is a mean one
        raw = [around_s * (number // count) + self.jobs[number % count].at_s - self.jobs[0].at_s for number in range(requests)]
        factor = (requests - 1) / rate / raw[-1] if raw[-1] > 0 else 0.0
        return [at_s * factor for at_s in raw]

    def _job(self, number: int, at_s: float) -> Job:
        around, place = divmod(number, len(self.jobs))
        job = self.jobs[place]
        if around and job.blocks:  # another round: other prefixes
            return job._replace(at_s=at_s, blocks=tuple(block + around * 10**12 for block in job.blocks))
        return job._replace(at_s=at_s)


def _shuffled(count: int, order: random.Random) -> Iterator[int]:
    around = 0
    while True:
        numbers = list(range(count))
        order.shuffle(numbers)
        yield from (number + around * count for number in numbers)
        around += 1


def fixed(prompt_tokens: int, output_tokens: int) -> Trace:
    """Requests of one length, no times."""
    return Trace(f"{prompt_tokens} in, {output_tokens} out", (Job(0.0, prompt_tokens, output_tokens),), timed=False)


def read_trace(path: Path, *, skip: int = 0, requests: int | None = None) -> Trace:
    """Rows `skip` to `skip` + `requests` of a file. Raises `ConfigError` that names the line and the field."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = _csv_jobs(lines) if path.suffix.lower() == ".csv" else _json_jobs(lines)
            jobs = list(islice(rows, skip, skip + min(READ_AT_MOST if requests is None else requests, READ_AT_MOST)))
            cut = len(jobs) == READ_AT_MOST != requests and next(rows, None) is not None
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the trace {path} is no text: byte {error.start} is no valid UTF-8") from error
    except (ConfigError, csv.Error) as error:
        raise ConfigError(f"{path.name}: {error}") from error
    if not jobs:
        raise ConfigError(f"{path.name}: the trace holds no request" + (f" after row {skip}" if skip else ""))
    block_tokens = max(job.block_tokens for job in jobs)  # one size for the file; a row with few blocks leaves it open
    jobs = [job._replace(block_tokens=block_tokens) if job.blocks else job for job in jobs]
    jobs.sort(key=lambda job: job.at_s)
    timed = jobs[-1].at_s > jobs[0].at_s
    same = sum(later.at_s == earlier.at_s for earlier, later in pairwise(jobs))
    spread = timed and same > TICKED_SHARE * len(jobs)
    name = f"{path.name} (no more than {READ_AT_MOST} requests of it: choose others with --skip and --rows)" if cut else path.name
    return Trace(name, tuple(_spread(jobs) if spread else jobs), timed, spread)


def _spread(jobs: list[Job]) -> Iterable[Job]:
    """Requests of one tick, evenly over the time to the next tick (the last one: as long as the one before)."""
    ticks: list[list[Job]] = []
    for job in jobs:
        if ticks and ticks[-1][0].at_s == job.at_s:
            ticks[-1].append(job)
        else:
            ticks.append([job])
    width = 0.0
    for number, tick in enumerate(ticks):
        if number + 1 < len(ticks):
            width = ticks[number + 1][0].at_s - tick[0].at_s
        for place, job in enumerate(tick):
            yield job._replace(at_s=job.at_s + width * place / len(tick))


def _csv_jobs(lines: Iterable[str]) -> Iterator[Job]:
    reader = csv.DictReader(lines)
    headed = {name.strip().lstrip("\ufeff").lower(): name for name in reader.fieldnames or ()}
    prompt, output, time = (headed.get(ours, headed.get(azure, "")) for ours, azure in CSV_COLUMNS.items())
    if not prompt or not output:
        missing = [name for name, found in (("input_tokens", prompt), ("output_tokens", output)) if not found]
        raise ConfigError(
            f"no column {' and '.join(missing)}; a CSV trace has input_tokens, output_tokens and perhaps t_s, or Azure's ContextTokens, "
            f"GeneratedTokens and TIMESTAMP; found: {', '.join(reader.fieldnames or ()) or 'none'}"
        )
    start_s: float | None = None
    for row in reader:
        where = f"line {reader.line_num}"
        at_s = _moment(row, time, where) if time else 0.0
        start_s = at_s if start_s is None else start_s
        if headed.get("t_s") != time:  # a date: what counts is the distance from the first
            at_s -= start_s
        yield Job(at_s, _whole(row, prompt, where, 1), max(1, _whole(row, output, where, 0)))


def _moment(row: Mapping[str, object], name: str, where: str) -> float:
    """Seconds, or the seconds since 1970 of a date with a time; of a fraction that is longer than microseconds, the first six digits."""
    value = row.get(name)
    if not isinstance(value, str) or not _DATE.match(value.strip()):
        return _number(row, name, where)
    text = _LONG_FRACTION.sub(r"\1", value.strip())
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} of {where} is {value!r}; it must be a date and a time, as in 2023-11-16 18:15:46.68, or seconds"
        ) from error
    return ((at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - _EPOCH).total_seconds()


def _json_jobs(lines: Iterable[str]) -> Iterator[Job]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is no JSON; a trace that is no .csv has one JSON object a line") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is no JSON object")
        if "turns" in row:
            yield from _turns(row["turns"], where)
            continue
        missing = [name for name in JSON_FIELDS if name not in row]
        if missing:
            raise ConfigError(f"{where} has no {' and no '.join(missing)}; a JSON trace has {', '.join(JSON_FIELDS)}, or turns")
        prompt = _whole(row, "input_length", where, 1)
        at_s = _number(row, "timestamp", where) / 1000 if "timestamp" in row else 0.0
        blocks = _blocks(row.get("hash_ids"), where)
        yield Job(at_s, prompt, max(1, _whole(row, "output_length", where, 0)), blocks, _block_tokens(prompt, len(blocks)))


def _block_tokens(prompt_tokens: int, blocks: int) -> int:
    """The least power of two that makes no more blocks of such a prompt."""
    if not blocks:
        return 0
    size = 1
    while -(-prompt_tokens // size) > blocks:
        size *= 2
    return size


def _blocks(value: object, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, int) and one >= 0 for one in value):
        raise ConfigError(f"hash_ids of {where} is no list of whole numbers")
    return tuple(value)


def _turns(turns: object, where: str) -> Iterator[Job]:
    if not isinstance(turns, list):
        raise ConfigError(f"turns of {where} is no list")
    before = 0
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2 or type(turn[1]) is not int or not 0 <= turn[1] <= 10**8:
            raise ConfigError(f"a turn of {where} is no pair of speaker and tokens")
        if turn[0] == "g" and before and turn[1]:
            yield Job(0.0, before, turn[1])
        before += turn[1]


def _number(row: Mapping[str, object], name: str, where: str) -> float:
    value = row.get(name)
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else float("nan")
    except (ValueError, OverflowError):
        number = float("nan")
    if not 0 <= number < MOST:
        raise ConfigError(f"{name} of {where} is {reprlib.repr(value)}; it must be a number from 0 to {MOST:g}")
    return number


def _whole(row: Mapping[str, object], name: str, where: str, low: int) -> int:
    number = _number(row, name, where)
    if number != int(number) or not low <= number <= 10**8:
        raise ConfigError(f"{name} of {where} is {row.get(name)!r}; it must be a whole number from {low} to {10**8}")
    return int(number)
