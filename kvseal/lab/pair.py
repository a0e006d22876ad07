"""Two nodes of the oracle model in one process, and everything between them under the test's control.

Owns `Pair`: a prefill node and a decode node that are real down to the bytes of their pages, the messages and pages between them, and one
manual clock. Deterministic: nothing moves unless `turn` moves it, and every part can be replaced by a broken one. The legs of a request are
joined by the router's own `SplitRequest`. Never used by the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvseal.core.clock import ManualClock
from kvseal.core.config import NodeConfig
from kvseal.core.errors import EngineDied
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Failed, Outcome
from kvseal.core.request import Request
from kvseal.handoff.proof import Landing, Memory, Move
from kvseal.handoff.transport import Landed, Lost, Report, Source
from kvseal.lab.local_transport import ProverAtOnce
from kvseal.lab.oracle_node import oracle_node
from kvseal.lab.rig import GREEDY, SCOPE
from kvseal.node import peer_messages as p
from kvseal.node.node_engine import NodeEngine
from kvseal.node.router import HANDOFF_TIMEOUT_S, QUEUED_TIMEOUT_S
from kvseal.node.split_request import Next, SplitRequest

SECRET = b"a secret of the laboratory"


class Air:
    """Where the transports of one laboratory find each other."""

    def __init__(self) -> None:
        self.transports: dict[str, LoopTransport] = {}


class LoopTransport:
    """Fetches `pages_per_poll` pages whenever it is polled. `frozen`: nothing moves; `gone`: its pages cannot be had any more."""

    name = "loop"
    local_fence = True

    def __init__(self, air: Air, memory: Memory, incarnation: str) -> None:
        self.incarnation = incarnation
        self.memory = memory
        self.pages_per_poll = 2
        self.frozen = False
        self.gone = False
        self.landed = 0
        self.skip_copy = False
        """Says that pages have landed which were never copied."""
        self._air = air
        self._wanted: dict[str, deque[tuple[Source, Move, Landing]]] = {}
        self._lost: list[Report] = []
        air.transports[incarnation] = self

    @property
    def endpoint(self) -> bytes:
        return self.incarnation.encode()

    def send(self, transfer: str, receiver: str, stamps: Sequence[int]) -> None:
        """Whoever asks may read."""

    def withdraw(self, transfer: str) -> bool:
        return True

    def expect(self, transfer: str, source: Source, pages: Sequence[int], landing: Landing) -> None:
        """There is nothing to make ready."""

    def receive(self, transfer: str, source: Source, moves: Sequence[Move], landing: Landing) -> None:
        self._wanted.setdefault(transfer, deque()).extend((source, move, landing) for move in moves)

    def poll(self) -> list[Report]:
        if self.frozen:
            return []
        found, left = self._lost, self.pages_per_poll
        self._lost = []
        for transfer, wanted in list(self._wanted.items()):
            while wanted and left:
                left -= 1
                report = self._fetch(transfer, *wanted.popleft())
                found.append(report)
                if isinstance(report, Lost):
                    wanted.clear()
            if not wanted:
                del self._wanted[transfer]
        return found

    def _fetch(self, transfer: str, source: Source, move: Move, landing: Landing) -> Report:
        other = self._air.transports.get(source.incarnation)
        if other is None or other.gone:
            return Lost(transfer, "the sender is gone")
        if not self.skip_copy:
            fault = landing.copy(other.memory, [move])
            if fault is not None:
                return Lost(transfer, "a page is not what was announced", fault)
        self.landed += 1
        return Landed(transfer, move.ordinal, 1, landing.page_bytes)

    def fence(self, transfer: str) -> bool:
        self._wanted.pop(transfer, None)
        return True

    def reset(self) -> bool:
        self._lost += [Lost(transfer, "the transport was torn down") for transfer in self._wanted]
        self._wanted.clear()
        return True

    def close(self) -> None:
        self._wanted.clear()
        self.gone = True


@dataclass(slots=True)
class Heard:
    """What the reader of one request has got, in the shape of a `RequestStream`."""

    tokens: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    cached_tokens: int = 0

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    def put(self, event: Event) -> None:
        if isinstance(event, TokensEvent):
            self.tokens += event.tokens
            self.cached_tokens = event.cached_tokens
        else:
            self.end(event.outcome)

    def end(self, outcome: Outcome) -> None:
        self.outcome = outcome


@dataclass(slots=True, eq=False)
class _Leg:
    request_id: RequestId
    ended: bool = False

    def cancel(self) -> None:
        """`Pair.cancel` does."""

    def finish(self) -> None:
        """No reader here stops by text."""


@dataclass(slots=True)
class _Asked:
    joined: SplitRequest
    prefill: _Leg
    decode: _Leg


Filter = Callable[[NodeEngine, p.Relay], Iterable[p.Relay]]


class Pair:
    """`filter`, when set, sees every relayed message and says what arrives instead of it."""

    def __init__(
        self, *, on_failure: str = "recompute", prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
    ) -> None:
        self.clock = ManualClock()
        self.air = Air()
        self._on_failure = on_failure
        self.prefill = self.node("prefill", **(prefill or {}))
        self.decode = self.node("decode", **(decode or {}))
        self.filter: Filter | None = None
        self.on_event: Callable[[NodeEngine, Event], None] | None = None
        """Sees every event of requests that did not come by `submit`."""
        self.frozen: set[NodeEngine] = set()
        self.heard: dict[str, Heard] = {}
        self._requests: dict[str, _Asked] = {}

    def node(self, role: str, **options: Any) -> NodeEngine:
        incarnation = f"{role}-incarnation-{len(self.air.transports)}"

        def transport(memory: Memory, _file: int) -> LoopTransport:
            return LoopTransport(self.air, memory, incarnation)

        node = NodeConfig(role=role, name=role, secret=SECRET, on_failure=self._on_failure)
        return oracle_node(node, transport, clock=self.clock, secret=incarnation.encode(), prover=ProverAtOnce(), **options)

    def restart(self, role: str, **options: Any) -> None:
        """The process dies and is started again, as another incarnation: what was open there fails, and the other node is told."""
        old, other = (self.prefill, self.decode) if role == "prefill" else (self.decode, self.prefill)
        self.transport(old).gone = True
        self.frozen.discard(old)
        new = self.node(role, **options)
        if role == "prefill":
            self.prefill = new
        else:
            self.decode = new
        other.take(p.PeerGone(old.incarnation))
        for name, one in self._requests.items():
            leg = one.prefill if role == "prefill" else one.decode
            if not leg.ended:
                self._told(new, EndedEvent(RequestId(name), Failed(EngineDied("the engine stopped"))))

    def lose(self, name: str) -> None:
        """What the router does when the prefill node makes no progress: it gives it up, and says so to the other."""
        self.prefill.cancel(RequestId(name))
        self.decode.take(p.HandoffLost(RequestId(name)))

    def transport(self, node: NodeEngine) -> LoopTransport:
        return self.air.transports[node.incarnation]

    def submit(self, name: str, prompt: Iterable[int], output_tokens: int = 8, *, scope: Scope = SCOPE, **fields: Any) -> Heard:
        """Through both nodes, as the router would."""
        request = Request(
            request_id=RequestId(name),
            prompt_tokens=tuple(prompt),
            max_output_tokens=output_tokens,
            scope=scope,
            **{"sampling": GREEDY} | fields,
        )
        heard = self.heard[name] = Heard()
        one = SplitRequest(request, heard, [], early=self._on_failure == "recompute")
        one.begin()
        asked = _Asked(one, _Leg(request.request_id), _Leg(request.request_id))
        one.prefill, one.decode = asked.prefill, asked.decode
        self._requests[name] = asked
        self.decode.take(p.Receive(request, f"handoff-{name}", self.prefill.incarnation, QUEUED_TIMEOUT_S))
        self.prefill.take(p.Prefill(request, f"handoff-{name}", self.decode.incarnation, HANDOFF_TIMEOUT_S))
        return heard

    @staticmethod
    def decode_id(name: str) -> RequestId:
        """What the decode node calls the request."""
        return RequestId(name)

    def cancel(self, name: str) -> None:
        self.prefill.cancel(RequestId(name))
        self.decode.cancel(RequestId(name))

    def turn(self, *nodes: NodeEngine) -> None:
        """One turn of both loops (or of those named), and 10 ms, or 100 ms when both only wait."""
        for node in nodes or (self.prefill, self.decode):
            if node in self.frozen:
                continue
            node.turn()
            for message in node.outbox():
                if isinstance(message, p.Relay):
                    self._relay(node, message)
            if node.has_work:
                for event in node.step():
                    self._told(node, event)
        working = any(node.has_work for node in (self.prefill, self.decode) if node not in self.frozen)
        self.clock.advance(0.01 if working else 0.1)

    def run(self, *, most_turns: int = 3_000, checked: bool = True) -> None:
        """Until every request has ended and every hand-off is over. Raises `TimeoutError`."""
        for _ in range(most_turns):
            if not self.busy:
                return
            self.turn()
            if checked:
                self.check()
        raise TimeoutError(f"still open after {most_turns} turns")

    @property
    def busy(self) -> bool:
        nodes = [node for node in (self.prefill, self.decode) if node not in self.frozen]
        return any(node.has_work or node.poll_ms is not None for node in nodes) or not all(heard.ended for heard in self.heard.values())

    def check(self) -> None:
        """All laws on both nodes."""
        self.prefill.check()
        self.decode.check()

    def settled(self) -> None:
        """Every page of both nodes is accounted for: free, or sealed in the cache with nobody on it."""
        for node in (self.prefill, self.decode):
            usage = node.kv.usage()
            busy = usage.leased + usage.draining + usage.quarantined
            if busy or usage.evictable != usage.sealed or usage.free + usage.sealed != usage.total:
                raise AssertionError(f"{node.name} is left with {usage}")
        self.check()

    # --- inside ---

    def _relay(self, node: NodeEngine, message: p.Relay) -> None:
        for relay in [message] if self.filter is None else self.filter(node, message):
            target = next((one for one in (self.prefill, self.decode) if one.incarnation == relay.peer), None)
            if target is None:
                node.take(p.PeerGone(relay.peer))
            elif target not in self.frozen:
                target.take(p.Relay(relay.handoff, node.incarnation, relay.body))

    def _told(self, node: NodeEngine, event: Event) -> None:
        asked = self._requests.get(event.request_id)
        if asked is None:
            if self.on_event is not None:
                self.on_event(node, event)
            return
        leg = asked.prefill if node is self.prefill else asked.decode
        leg.ended = leg.ended or isinstance(event, EndedEvent)
        what = asked.joined.event(leg, event)
        if what is Next.NOT_HANDED_OVER and not asked.decode.ended:
            self.decode.take(p.HandoffLost(event.request_id))
        elif what is Next.DONE:
            self.cancel(event.request_id)
        elif what is Next.PLACE_AGAIN and isinstance(event, EndedEvent):
            asked.joined.end(event.outcome)
