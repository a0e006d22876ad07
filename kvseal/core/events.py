"""What the engine tells the world about a request, in order: any number of `TokensEvent`, then exactly one `EndedEvent` (L11).

Owns the event types that pass from `sched` through `node` to `serve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvseal.core.batch import TokenLogprobs
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Outcome


class TokensEvent(NamedTuple):
    """New output tokens, and the logprobs that were asked for."""

    request_id: RequestId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """As long as `tokens` when logprobs were asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """On the first event only, when asked for: one entry per prompt token, None for the first."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at the first admission (the same on every event)."""


@dataclass(frozen=True, slots=True)
class EndedEvent:
    """The last event of a request. A stop token that ended it has been emitted in a `TokensEvent` before."""

    request_id: RequestId
    outcome: Outcome


Event = TokensEvent | EndedEvent
