"""The transport interface: pages from a peer's arena into ours, placed by the receiver.

Owns the protocol that every transport implements and the words that go through it. A transport moves whole pages as bytes, seals included;
it never reads a seal's meaning, never touches the pool, and never decides whether a transfer was good: the landing that it is given
checks the pages, and the session decides. Laws L3 (stamps are compared after the bytes have come), L8 (`fence`), L9 (nothing has landed is
the initial state).

All transports *pull*: the receiver asks for pages by the stamps that the sender has announced, so the receiver always knows what is in
flight into its own memory. Rules, each held by the conformance suite:

1. A destination page belongs to its transfer from `receive` until `fence` has returned True; an error is not quiet.
2. `fence` says True only when nothing of that transfer can be written into this process's memory any more, whatever the peer does.
   `local_fence` transports always say so, within `FENCE_S`, without the peer's help. Others may say False; then the pages stay in
   quarantine until a later `fence` says True, or until `reset` (which ends the engine below and everything in flight with it) does.
3. No call blocks on the peer: work happens on the transport's own thread, and `poll` tells what has happened. Deadlines are the session's:
   a frozen peer is silence here, and `fence` ends it.
4. Every peer is named by address *and incarnation*; a peer that answers under another incarnation is refused.
5. What a peer says is bounded and checked before it is used: page numbers, counts and sizes before a byte is placed.
6. `poll` reports progress in bytes, and each ordinal of a transfer at most once, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvseal.handoff.proof import Landing, Move, PageFault

FENCE_S = 0.05
"""A local fence takes no longer."""


class Source(NamedTuple):
    """Where a hand-off's pages are: taken from its Intent."""

    incarnation: str
    endpoint: bytes
    """`Transport.endpoint` of the sender's end; its form is the transport's own."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Pages stand in our memory and have passed the check."""

    transfer: str
    first_ordinal: int
    pages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The transfer goes no further. Says nothing about quiet: `fence` does. At most one per transfer, and nothing after it."""

    transfer: str
    detail: str
    fault: PageFault | None = None
    """Set when the check refused a page; None when the bytes did not come."""


Report = Landed | Lost


class Transport(Protocol):
    """Both roles of one process. Methods are called from one thread (the engine's)."""

    name: str
    """Named in the Intent; both ends must use the same."""
    local_fence: bool
    incarnation: str

    @property
    def endpoint(self) -> bytes:
        """What a receiver needs to reach our pages; at most `MAX_ENDPOINT_BYTES`."""
        ...

    def send(self, transfer: str, receiver: str, stamps: Sequence[int]) -> None:
        """These pages (page, nonce, ...) may be fetched by `receiver` (an incarnation) until `withdraw`. Adds to what is offered now."""
        ...

    def withdraw(self, transfer: str) -> bool:
        """Nothing of it is offered any more. True: nothing reads these pages for it any more either. Idempotent; unknown ids are quiet."""
        ...

    def expect(self, transfer: str, source: Source, pages: Sequence[int], landing: Landing) -> None:
        """These pages of ours will be received into soon. Whatever takes time and needs no page of the peer's may be done now; what fails
        of it is told by `receive`. Returns at once."""
        ...

    def receive(self, transfer: str, source: Source, moves: Sequence[Move], landing: Landing) -> None:
        """Fetches these pages, in order, after those of earlier calls for the same transfer, and checks them in `landing`. Returns at once;
        failures come from `poll`."""
        ...

    def poll(self) -> list[Report]:
        """What has happened since the last call. Never waits."""
        ...

    def fence(self, transfer: str) -> bool:
        """Ends the receiving side of a transfer. True: nothing of it will be written into our memory any more, and nothing more is
        reported. Idempotent; unknown ids are quiet."""
        ...

    def reset(self) -> bool:
        """The last resort: ends every transfer and whatever lies below. True: quiet everywhere. Open transfers are reported `Lost`."""
        ...

    def close(self) -> None:
        """Ends everything. The arena may be unmapped afterwards if `reset` said True."""
        ...
