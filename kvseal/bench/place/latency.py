"""How long a step takes, as a function of what is in it; and the kinds of worker that take so long.

Owns the shape of a step (`Step`), two forms of cost, and the JSON that carries them. `Knots` is what ``kvseal bench fit`` measures of this
engine; `Phases` is the form of published profiles, with prefill and decode fitted apart. Never measures and never simulates.
All times are seconds.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from kvseal.core.errors import ConfigError
from kvseal.node.placement import DIRECT_TOKENS

FORMAT = "kvseal-latency-1"
PUBLISHED = Path(__file__).parent / "published"


class Step(NamedTuple):
    """What one step computes."""

    prefill_rows: int
    prefill_tokens: int
    pairs: float
    """Over all prefill tokens, the positions that they attend to, added up."""
    decode_rows: int
    decode_context: int
    """Over all decode rows, the positions that they attend to, added up."""
    sampled: int
    """Rows that need logits."""


class Cost(Protocol):
    def step_s(self, step: Step) -> float: ...

    def to_json(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Knots:
    """t = curve(tokens) + logits_s if any row samples + sampled_s * rows that sample + pair_s * pairs + context_s * decode context.

    `curve` runs in straight lines through (tokens, seconds); before the first knot it is flat, after the last it goes on as before.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    logits_s: float
    sampled_s: float
    pair_s: float
    context_s: float

    def step_s(self, step: Step) -> float:
        seconds = self._curve(step.prefill_tokens + step.decode_rows)
        if step.sampled:
            seconds += self.logits_s + self.sampled_s * step.sampled
        return seconds + self.pair_s * step.pairs + self.context_s * step.decode_context

    def scaled(self, factor: float) -> Knots:
        """The same machine, so many times as slow."""
        return Knots(
            self.tokens,
            tuple(factor * one for one in self.seconds),
            logits_s=factor * self.logits_s,
            sampled_s=factor * self.sampled_s,
            pair_s=factor * self.pair_s,
            context_s=factor * self.context_s,
        )

    def _curve(self, count: int) -> float:
        knots, values = self.tokens, self.seconds
        if count <= knots[0]:
            return values[0]
        at = min(bisect_right(knots, count), len(knots) - 1)
        low, high = knots[at - 1], knots[at]
        return values[at - 1] + (values[at] - values[at - 1]) * (count - low) / (high - low)

    def to_json(self) -> dict[str, object]:
        return {
            "form": "knots",
            "tokens": list(self.tokens),
            "seconds": list(self.seconds),
            "logits_s": self.logits_s,
            "sampled_s": self.sampled_s,
            "pair_s": self.pair_s,
            "context_s": self.context_s,
        }


class DecodeLine(NamedTuple):
    """Decode steps of at least `rows_from` rows take step_s + context_s * context + row_s * rows."""

    rows_from: int
    step_s: float
    context_s: float
    row_s: float


@dataclass(frozen=True, slots=True)
class Phases:
    """Prefill: step_s + token_s * tokens + pair_s * pairs. Decode: one line for few rows, another for many. A step with both takes as long
    as one of each: the two were measured apart, and nobody promised that they overlap."""

    step_s_prefill: float
    token_s: float
    pair_s: float
    decode: tuple[DecodeLine, ...]

    def step_s(self, step: Step) -> float:
        seconds = 0.0
        if step.prefill_tokens:
            seconds = self.step_s_prefill + self.token_s * step.prefill_tokens + self.pair_s * step.pairs
        if step.decode_rows:
            line = next(line for line in reversed(self.decode) if step.decode_rows >= line.rows_from)
            seconds += line.step_s + line.context_s * step.decode_context + line.row_s * step.decode_rows
        return seconds

    def to_json(self) -> dict[str, object]:
        return {
            "form": "phases",
            "prefill": {"step_s": self.step_s_prefill, "token_s": self.token_s, "pair_s": self.pair_s},
            "decode": [line._asdict() for line in self.decode],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """One way to run an engine: on so many devices, with such a pool, in such a time."""

    name: str
    cost: Cost
    width: int = 1
    """Devices that it takes (workers of the pool that is being placed)."""
    stages: int = 1
    """Pipeline stages: so many batches are under way at once, and each takes its time once through all stages."""
    pool_tokens: int
    context_tokens: int
    max_running: int = 64
    page_tokens: int = 16
    chunk_tokens: tuple[int, ...] = (512,)
    """Chunk sizes to try where prefill and decode share a worker."""
    step_s: float | None = None
    """What the engine's own chunking aims at, see `sched.chunk`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """What a file of latencies says: the model, where the figures come from, and the kinds of worker."""

    model: str
    source: str
    kv_token_bytes: int
    handoff_bytes_per_s: float
    handoff_step_s: float = 0.0
    """What a hand-off takes beside its bytes."""
    direct_tokens: int = DIRECT_TOKENS
    """Prompts with no more tokens are computed where they are answered."""
    kinds: tuple[WorkerKind, ...]
    notes: Mapping[str, object] = field(default_factory=dict)
    """Residuals, machine, versions: for people."""

    def handoff_s(self, tokens: int) -> float:
        return self.handoff_step_s + tokens * self.kv_token_bytes / self.handoff_bytes_per_s


def save(latency: Latency, path: Path) -> None:
    kinds: list[dict[str, object]] = []
    for kind in latency.kinds:
        kinds.append(
            {
                "name": kind.name,
                "width": kind.width,
                "stages": kind.stages,
                "pool_tokens": kind.pool_tokens,
                "context_tokens": kind.context_tokens,
                "max_running": kind.max_running,
                "page_tokens": kind.page_tokens,
                "chunk_tokens": list(kind.chunk_tokens),
                "step_s": kind.step_s,
                "cost": kind.cost.to_json(),
            }
        )
    whole = {
        "format": FORMAT,
        "model": latency.model,
        "source": latency.source,
        "kv_token_bytes": latency.kv_token_bytes,
        "handoff_bytes_per_s": latency.handoff_bytes_per_s,
        "handoff_step_s": latency.handoff_step_s,
        "direct_tokens": latency.direct_tokens,
        "kinds": kinds,
        "notes": dict(latency.notes),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=2) + "\n")


def published() -> list[str]:
    """Names of the latency models that come with the package."""
    return sorted(path.stem for path in PUBLISHED.glob("*.json"))


def load(name: Path) -> Latency:
    """A file, or the name of a published one. Raises `ConfigError` that says which field is wrong."""
    path = name if name.exists() else PUBLISHED / f"{name}.json"
    try:
        whole = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"there is no latency model {str(name)!r}: measure this machine with `kvseal bench fit`, or name a file or one of "
            f"{', '.join(published())}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{name} is no JSON: {error}") from error
    try:
        return _latency(_Fields(whole, "the file"))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


class _Fields:
    """An object of the file, whose values are checked as they are taken."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is no JSON object")
        self._value = value
        self._where = where

    def number(self, name: str, default: float | None = None, *, at_least: float = 0.0) -> float:
        return _number(self._value.get(name, default), f"{name!r} of {self._where}", at_least)

    def count(self, name: str, default: int | None = None) -> int:
        return _count(self._value.get(name, default), f"{name!r} of {self._where}")

    def text(self, name: str) -> str:
        value = self._value.get(name)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name!r} of {self._where} is no text")
        return value

    def several(self, name: str) -> list[object]:
        value = self._value.get(name)
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{name!r} of {self._where} is no list, or is empty")
        return value

    def inner(self, name: str) -> _Fields:
        return _Fields(self._value.get(name), f"{name!r} of {self._where}")

    def optional(self, name: str) -> object:
        return self._value.get(name)


def _number(value: object, what: str, at_least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < at_least:
        raise ConfigError(f"{what} is {value!r}; it must be a number of at least {at_least:g}")
    return float(value)


def _count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what} is {value!r}; it must be a whole number of at least 1")
    return value


def _latency(fields: _Fields) -> Latency:
    if fields.optional("format") != FORMAT:
        raise ConfigError(f"'format' is {fields.optional('format')!r}; this version reads {FORMAT!r}")
    notes = fields.optional("notes")
    return Latency(
        model=fields.text("model"),
        source=fields.text("source"),
        kv_token_bytes=fields.count("kv_token_bytes"),
        handoff_bytes_per_s=fields.number("handoff_bytes_per_s", at_least=1.0),
        handoff_step_s=fields.number("handoff_step_s", 0.0),
        direct_tokens=int(fields.number("direct_tokens", DIRECT_TOKENS)),
        kinds=tuple(_kind(_Fields(kind, f"kind {number}")) for number, kind in enumerate(fields.several("kinds"), 1)),
        notes=notes if isinstance(notes, dict) else {},
    )


def _kind(fields: _Fields) -> WorkerKind:
    return WorkerKind(
        name=fields.text("name"),
        cost=_cost(fields.inner("cost")),
        width=fields.count("width", 1),
        stages=fields.count("stages", 1),
        pool_tokens=fields.count("pool_tokens"),
        context_tokens=fields.count("context_tokens"),
        max_running=fields.count("max_running", 64),
        page_tokens=fields.count("page_tokens", 16),
        chunk_tokens=tuple(_count(chunk, "a chunk size") for chunk in fields.several("chunk_tokens")),
        step_s=None if fields.optional("step_s") is None else fields.number("step_s", at_least=1e-6),
    )


def _cost(fields: _Fields) -> Cost:
    form = fields.text("form")
    if form == "phases":
        prefill = fields.inner("prefill")
        lines = [_line(_Fields(line, "a decode line")) for line in fields.several("decode")]
        if lines[0].rows_from > 1 or any(one.rows_from >= other.rows_from for one, other in pairwise(lines)):
            raise ConfigError("decode lines must start at 1 row and rise")
        return Phases(prefill.number("step_s"), prefill.number("token_s"), prefill.number("pair_s"), tuple(lines))
    if form != "knots":
        raise ConfigError(f"the form of a cost is {form!r}; it must be 'knots' or 'phases'")
    tokens = [_count(one, "a knot") for one in fields.several("tokens")]
    seconds = [_number(one, "the time of a knot") for one in fields.several("seconds")]
    if len(tokens) != len(seconds) or len(tokens) < 2 or any(one >= other for one, other in pairwise(tokens)):
        raise ConfigError("knots need at least two token counts that rise, and as many times")
    return Knots(
        tuple(tokens),
        tuple(seconds),
        fields.number("logits_s"),
        fields.number("sampled_s"),
        fields.number("pair_s"),
        fields.number("context_s"),
    )


def _line(fields: _Fields) -> DecodeLine:
    return DecodeLine(fields.count("rows_from"), fields.number("step_s"), fields.number("context_s"), fields.number("row_s"))
