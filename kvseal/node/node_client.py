"""The router's hold on one node: an `EngineClient` that also passes on what hand-offs say, and knows what the node's cache holds.

Owns the node's card, its cached keys and the legs of requests that run there. A leg is a `RequestStream` whose events go to whoever joins
the legs of a request, instead of to a reader. Laws: as `client`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvseal.core.clock import Clock, MonotonicClock
from kvseal.core.config import EngineConfig
from kvseal.core.errors import Draining, EngineDied, Overloaded
from kvseal.core.events import EndedEvent, Event
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Refused
from kvseal.kv.feed import split_keys
from kvseal.node import messages as m
from kvseal.node import peer_messages as p
from kvseal.node.client import MAX_UNSENT_BYTES, STALL_AFTER_S, EngineClient, EngineState
from kvseal.node.link import Link
from kvseal.node.spawn import cpu_ticks
from kvseal.node.stream import RequestStream

NODE_MODULE = "kvseal.node.node_process"


class Leg(RequestStream):
    """One node's share of a request. Its events go to `sink`, the last one an `EndedEvent`, and nothing after it."""

    def __init__(self, client: NodeClient, request_id: RequestId, sink: Callable[[Leg, Event], None]) -> None:
        super().__init__(client, request_id)
        self.node = client
        self._sink = sink

    def put(self, event: Event) -> None:
        if not self._ended:
            self._ended = isinstance(event, EndedEvent)
            self._sink(self, event)


class NodeClient(EngineClient):
    """Made by `start_node`. `on_relay` is called with what the node says to a peer."""

    def __init__(self, config: EngineConfig, *, module: str, stall_after_s: float, clock: Clock) -> None:
        super().__init__(config, module=module, stall_after_s=stall_after_s, clock=clock)
        self.cached: set[bytes] = set()
        """Keys of the pages in the node's prefix cache, `kv.feed.FEED_KEY_BYTES` each."""
        self.on_relay: Callable[[NodeClient, p.Relay], None] | None = None
        self.on_lost: Callable[[NodeClient, str], None] | None = None
        """Called with the incarnation that is no more."""
        self.on_cache: Callable[[p.CacheChanges], None] | None = None
        self._card: p.NodeCard | None = None
        self._ticks, self._computed_at_s = 0, clock.now_s()
        self._name, self._role = (config.node.name, config.node.role) if config.node is not None else ("engine", "decode")

    @classmethod
    async def start_node(
        cls, config: EngineConfig, *, module: str = NODE_MODULE, stall_after_s: float = STALL_AFTER_S, clock: Clock | None = None
    ) -> NodeClient:
        """Starts the node and waits until it can serve. Raises its `SetupError`, or `EngineDied`."""
        client = cls(config, module=module, stall_after_s=stall_after_s, clock=clock or MonotonicClock())
        await client._begin()
        return client

    @property
    def name(self) -> str:
        return self._name

    @property
    def role(self) -> str:
        return self._role

    @property
    def card(self) -> p.NodeCard | None:
        """None while the node is not there."""
        return self._card

    @property
    def usable(self) -> bool:
        """Whether new requests should go there."""
        return self._card is not None and self.state is EngineState.READY

    @property
    def still_s(self) -> float:
        """Seconds since the node was last seen at work: it said so, or its process has computed. One that is stopped computes nothing, one
        on a busy machine takes long over a step; one that computes and completes no step stands still from `stall_after_s` on."""
        age_s, now_s = self.last_progress_age_s, self._clock.now_s()
        ticks = None if self.pid is None else cpu_ticks(self.pid)
        if ticks is None or age_s > self._stall_after_s:
            return age_s
        if ticks != self._ticks:
            self._ticks, self._computed_at_s = ticks, now_s
        return min(age_s, now_s - self._computed_at_s)

    def open(self, request_id: RequestId, message: m.Submit | p.Prefill | p.Receive, sink: Callable[[Leg, Event], None]) -> Leg:
        """Like `submit`, with the events given to `sink`, which may be called before this returns."""
        leg = Leg(self, request_id, sink)
        refused = self._cannot_take(request_id)
        if refused is not None:
            leg.put(EndedEvent(request_id, refused))
        else:
            self._streams[request_id] = leg
            self._idle.clear()
            self.send(message)
        return leg

    def stream(self, request_id: RequestId, message: m.Submit | p.Prefill | p.Receive) -> RequestStream:
        """Like `submit`, with the events for a reader."""
        stream = RequestStream(self, request_id)
        self.open(request_id, message, lambda _leg, event: stream.put(event))
        return stream

    def send(self, message: m.ToEngine) -> None:
        """Lost when the node is not there: `on_lost` has been called then, or will be."""
        if self._link is not None:
            self._link.send(message)

    # --- inside ---

    def _cannot_take(self, request_id: RequestId) -> Refused | None:
        if request_id in self._streams:
            raise ValueError("a request with this id is open; ids are made by the server and never reused")
        if self._phase in (EngineState.DRAINING, EngineState.CLOSED):
            return Refused(Draining("the server is shutting down"))
        if self._link is None or not self._link.ready.done():
            return Refused(EngineDied("the node is being restarted; try again in a moment"))
        if self._link.unsent_bytes > MAX_UNSENT_BYTES:
            return Refused(Overloaded("the node does not take requests fast enough", retry_after_s=5.0))
        return None

    async def _introduced(self, link: Link) -> None:
        await super()._introduced(link)
        if link.card is None:
            raise EngineDied("what answers is no node of several")
        self._card = link.card
        self._name, self._role = link.card.name, link.card.role

    def _connection_lost(self, link: Link) -> None:
        card, self._card = self._card, None
        self.cached.clear()
        super()._connection_lost(link)
        if card is not None and self.on_lost is not None:
            self.on_lost(self, card.incarnation)

    def _handle(self, message: m.FromEngine) -> None:
        match message:
            case p.Relay():
                if self.on_relay is not None:
                    self.on_relay(self, message)
            case p.CacheChanges(came, went):
                self.cached.difference_update(split_keys(went))
                self.cached.update(split_keys(came))
                if self.on_cache is not None:
                    self.on_cache(message)
            case _:
                super()._handle(message)
