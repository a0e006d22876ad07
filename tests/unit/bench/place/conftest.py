"""A small machine with round figures, and loads to run on it."""

from __future__ import annotations

import pytest

from kvseal.bench.place.latency import Knots, Latency, WorkerKind
from kvseal.bench.place.trace import Job, Trace

COST = Knots((1, 8, 512), (0.008, 0.012, 0.5), logits_s=0.001, sampled_s=0.0002, pair_s=6e-8, context_s=1e-7)


def kind_of(**changed: object) -> WorkerKind:
    values: dict[str, object] = {"name": "cpu", "cost": COST, "pool_tokens": 65_536, "context_tokens": 8_192, "step_s": 1.0}
    return WorkerKind(**{**values, **changed})  # type: ignore[arg-type]


def latency_of(*kinds: WorkerKind, **changed: object) -> Latency:
    values: dict[str, object] = {"model": "small", "source": "by hand", "kv_token_bytes": 23_040, "handoff_bytes_per_s": 4e9}
    return Latency(**{**values, **changed}, kinds=kinds or (kind_of(),))  # type: ignore[arg-type]


@pytest.fixture
def kind() -> WorkerKind:
    return kind_of()


@pytest.fixture
def latency(kind: WorkerKind) -> Latency:
    return latency_of(kind)


@pytest.fixture(scope="session")
def mixed() -> Trace:
    """Short and long prompts, short and long answers."""
    lengths = [(20, 30), (700, 12), (90, 64), (1_500, 5), (300, 1), (45, 90), (420, 33), (2_000, 20), (64, 8), (65, 40)]
    return Trace("mixed", tuple(Job(0.0, prompt, output) for prompt, output in lengths), timed=False)
