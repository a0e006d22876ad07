"""What a node uses: every hand-off that it sends, every hand-off that it receives.

Owns the join of session, pages and transport; carries out what the sessions say. Never speaks to a socket itself: messages come in by
`message` and leave through the `outbox`, wherever the node's control links are. Everything is called from the engine's thread, between
steps. Laws L2 (what a session holds is given back once), L8, L9, L11, L12 (counters).

How a node uses it, once per turn of its loop::

    for message in arrived: sending.message(message, now_s) / receiving.message(message, now_s)
    sending.turn(now_s); receiving.turn(now_s)          # polls the transport, keeps deadlines
    for message in (*sending.outbox(), *receiving.outbox()): the control link to message.receiver / message.sender
    for end in (*sending.ended(), *receiving.ended()): resume, recompute or fail the request
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvseal.core.ids import Scope
from kvseal.handoff.messages import AnyMessage, Reason
from kvseal.handoff.session import Outcome, Patience
from kvseal.handoff.transport import Transport
from kvseal.kv.handles import Pin
from kvseal.kv.manager import Grant as CacheGrant
from kvseal.kv.manager import KVManager
from kvseal.kv.prefix_key import PackedTokens


@dataclass(frozen=True, slots=True)
class End:
    """A hand-off is over. At the receiver, `grant` is the cache grant whose `table.valid_tokens` now covers the pages that arrived (drop it
    when the request has been admitted or given up); None unless delivered."""

    handoff: str
    outcome: Outcome
    grant: CacheGrant | None = None


@dataclass(slots=True)
class Counters:
    """For metrics. By reason: `Reason.value` -> count."""

    delivered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    pages: int = 0
    bytes: int = 0
    ignored_messages: int = 0
    quarantined_pages: int = 0
    """Now, because of hand-offs."""


class Sending:
    """All hand-offs that this process sends."""

    def __init__(self, kv: KVManager, transport: Transport, *, key: bytes, patience: Patience | None = None) -> None: ...

    def begin(
        self,
        handoff: str,
        *,
        receiver: str,
        scope: Scope,
        tokens: Sequence[int] | PackedTokens,
        pages: int,
        deadline_s: float,
        now_s: float,
    ) -> None:
        """Says the Intent. `tokens`: the whole sequence; `pages`: how many of its full pages are handed over (of a prompt that will be
        continued elsewhere: (prompt_tokens - 1) // page_tokens, since its last token is always computed there)."""

    def sealed(self, handoff: str, pin: Pin, stamps: Sequence[int], now_s: float) -> None:
        """The next pages are sealed. Takes its own pin on them. No effect once the hand-off has ended."""

    def cancel(self, handoff: str, reason: Reason, now_s: float) -> None: ...
    def peer_gone(self, incarnation: str, now_s: float) -> None: ...
    def message(self, message: AnyMessage, now_s: float) -> None: ...
    def turn(self, now_s: float) -> None: ...
    def outbox(self) -> list[AnyMessage]: ...  # type: ignore[empty-body]
    def ended(self) -> list[End]: ...  # type: ignore[empty-body]


class Receiving:
    """All hand-offs that this process receives."""

    def __init__(
        self,
        kv: KVManager,
        transport: Transport,
        *,
        key: bytes,
        memory: object,
        patience: Patience | None = None,
        quarantine_cap_pages: int = 0,
        on_ended: Callable[[End], None] | None = None,
    ) -> None: ...

    def expect(
        self,
        handoff: str,
        *,
        sender: str,
        scope: Scope,
        tokens: Sequence[int] | PackedTokens,
        deadline_s: float,
        now_s: float,
    ) -> None:
        """The request of this hand-off is here; its Intent may come, or has come."""

    def cancel(self, handoff: str, reason: Reason, now_s: float) -> None: ...
    def peer_gone(self, incarnation: str, now_s: float) -> None: ...
    def message(self, message: AnyMessage, now_s: float) -> None: ...
    def turn(self, now_s: float) -> None: ...
    def outbox(self) -> list[AnyMessage]: ...  # type: ignore[empty-body]
    def ended(self) -> list[End]: ...  # type: ignore[empty-body]
