"""What an engine says of itself: once at start, and while it runs.

Owns `StartReport` (the numbers that must agree, printed at start and returned by ``/version``) and `EngineStats` (for metrics and health).
Numbers, names and limits only; never content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The HTTP process reads reports too, and starts without NumPy.
    from kvseal.handoff.words import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    model_name: str
    family: str
    backend: str
    instruction_set: str
    weights_format: str
    weights_bytes: int
    threads: int
    kv_dtype: str
    kv_format: str
    """The 64-bit format name as 16 hex digits."""
    page_tokens: int
    kv_token_bytes: int
    kv_token_formula: str
    """How `kv_token_bytes` was computed, e.g. "2 (K and V) x 30 layers x 3 KV heads x 64 x 2 B"."""
    pool_pages: int
    pool_tokens: int
    pool_bytes: int
    model_context_tokens: int
    served_context_tokens: int
    """Prompt and output of one request, at most (L1). What /v1/models calls max_model_len."""
    context_reason: str
    """Why the served context is what it is: "the model's own limit", "what the pool holds", "--context-tokens"."""
    full_length_requests: int
    """How many requests of the served context fit at once."""
    max_running: int
    max_queued: int
    chunk_tokens: int
    wipe_pages: bool
    vocab_size: int
    eos_tokens: tuple[int, ...]
    bos_token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Counters count from the engine's start; `last_step_age_s` is None before the first step."""

    pages_total: int
    pages_free: int
    pages_leased: int
    pages_sealed: int
    pages_draining: int
    pages_quarantined: int
    running: int
    waiting: int
    steps: int
    last_step_age_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    queried_tokens: int
    """Prompt tokens looked up in the prefix cache (first admissions only)."""
    preemptions: int
    recomputed_tokens: int
    evicted_pages: int
    broken_seals: Mapping[str, int] = field(default_factory=dict)
    """By law number."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """completed, refused, cancelled, failed."""
    handoff: Mapping[str, int] = field(default_factory=dict)
    """Counters of the hand-offs of a node; empty for an engine by itself."""
    handoff_seconds: tuple[tuple[float, int], ...] = ()
    """Received hand-offs by how long they took, from Intent to receipt: upper bound, and how many above the one before."""
    handoff_seconds_sum: float = 0.0
    fence_s: float = 0.0
    """What asking the transport whether it is quiet has taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """One node among several. `stats` None: it did not answer."""

    name: str
    role: str
    ready: bool
    restarts: int
    stats: EngineStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats(EngineStats):
    """The sum of those that answered, and each."""

    nodes: tuple[NodeStats, ...]


def with_handoffs(stats: EngineStats, sent: Counters, received: Counters, recomputed: int) -> EngineStats:
    """The same of a node, with what its two ends have counted."""
    return replace(
        stats,
        handoff=handoff_counts(sent, received, recomputed),
        handoff_seconds=received.histogram(),
        handoff_seconds_sum=received.seconds_sum,
        fence_s=received.fence_s,
    )


def handoff_counts(sent: Counters, received: Counters, recomputed: int) -> dict[str, int]:
    """`EngineStats.handoff` of a node: what its two ends have counted."""
    failed = Counter({f"failed_{reason}": count for reason, count in received.failed.items()})
    failed.update({f"failed_{reason}": count for reason, count in sent.failed.items()})
    failed.update({f"received_failed_{reason}": count for reason, count in received.failed.items()})
    failed.update({f"sent_failed_{reason}": count for reason, count in sent.failed.items()})
    return {
        "sent": sent.delivered,
        "received": received.delivered,
        "recomputed": recomputed,
        "pages": received.pages,
        "bytes": received.bytes,
        "ignored_messages": sent.ignored_messages + received.ignored_messages,
        "quarantined_pages": received.quarantined_pages,
        "readmitted_pages": received.readmitted_pages,
        "resets": received.resets,
        "fences": received.fences,
        "fence_waits": received.fence_waits,
        **failed,
    }
