"""Prometheus text as values, and the few metrics of known engines that an audit understands.

Owns the reading of the exposition format and the names per engine. Never fetches.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{([^}]*)\})?\s+([-+0-9.eEinfNa]+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_MAX_LINES = 50_000

_BUSY = (
    "kvseal_requests_running",
    "kvseal_requests_waiting",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
)
_HELD_PAGES = (
    ("kvseal_kv_pages", "state", ("leased", "draining")),
    ("vllm:kv_cache_usage_perc", "", ()),
    ("vllm:gpu_cache_usage_perc", "", ()),
)
_COUNT = re.compile(r"[0-9]{1,15}")
_QUARANTINE = ("kvseal_kv_pages", "state", ("quarantined",))


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def label(self, name: str) -> str:
        return dict(self.labels).get(name, "")


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of one scrape."""

    all: tuple[Sample, ...]

    def __bool__(self) -> bool:
        return bool(self.all)

    def total(self, name: str, label: str = "", values: tuple[str, ...] = ()) -> float | None:
        """Sum of `name` over the samples whose `label` is one of `values` (all of them when no label is given); None when there is none."""
        found = [s.value for s in self.all if s.name == name and (not label or s.label(label) in values)]
        return sum(found) if found and math.isfinite(sum(found)) else None

    def engine(self) -> str:
        for prefix, engine in (("kvseal_", "kvseal"), ("vllm:", "vllm"), ("sglang:", "sglang"), ("llamacpp:", "llamacpp")):
            if any(sample.name.startswith(prefix) for sample in self.all):
                return engine
        return ""

    def pool_tokens(self) -> int | None:
        """Tokens that the KV pool holds, where an engine says it."""
        for name in ("kvseal_kv_pool_tokens", "sglang:max_total_num_tokens"):
            if (value := _tokens(self.total(name))) is not None:
                return value
        for sample in self.all:
            blocks, size = sample.label("num_gpu_blocks"), sample.label("block_size")
            if sample.name == "vllm:cache_config_info" and _COUNT.fullmatch(blocks) and _COUNT.fullmatch(size):
                return _tokens(float(blocks) * float(size))
        return None

    def context_tokens(self) -> int | None:
        return _tokens(self.total("kvseal_max_servable_tokens"))

    def busy(self) -> float | None:
        """Requests that run or wait by the engine's own count; None when it does not count them."""
        found = [value for name in _BUSY if (value := self.total(name)) is not None]
        return sum(found) if found and math.isfinite(sum(found)) else None

    def held(self) -> float | None:
        """KV held by requests (pages, or a share of the pool): must go back to what it was once all requests are gone."""
        for name, label, values in _HELD_PAGES:
            if (value := self.total(name, label, values)) is not None:
                return value
        return None


def _tokens(value: float | None) -> int | None:
    """`value` if it can be a number of tokens."""
    return int(value) if value is not None and 0 < value < 1 << 63 else None


def parse_metrics(text: str) -> Samples:
    """Samples of `text`; lines that do not read, and values that are no numbers (NaN, +Inf), are left out: a stranger wrote them."""
    samples: list[Sample] = []
    for line in text.splitlines()[:_MAX_LINES]:
        if line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        samples.append(Sample(match[1], tuple(_LABEL.findall(match[2] or "")), value))
    return Samples(tuple(samples))
