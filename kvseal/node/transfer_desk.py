"""Hand-offs that somebody else arranges: a front that sends a prompt to one worker, and its answer's ``kv_transfer_params`` to another.

Owns what the two workers tell each other through the front, and the link over which the second fetches from the first. What comes from a
front is a claim: it must bear a proof under the secret that the workers share, so that no caller can make a worker connect anywhere else
(and the pages prove themselves, as always: L9). A source that is gone, stands still or has evicted the prefix costs a recomputation.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvseal.core.config import TLSFiles
from kvseal.core.errors import Forbidden, InvalidRequest, SetupError
from kvseal.core.request import Request
from kvseal.node import messages as m
from kvseal.node import peer_messages as p
from kvseal.node.fleet import FROZEN_AFTER_S, LOOK_EVERY_S
from kvseal.node.link_server import RECENT_S, LinkServer
from kvseal.node.node_client import NodeClient
from kvseal.node.remote import RemoteNode
from kvseal.node.stream import RequestStream

FETCH_TIMEOUT_S = 30.0
"""For pages that are there already; the source may be in the middle of a long step."""
FIELD = "kv_transfer_params"
_PROOF = "kvseal_proof"


@dataclass(frozen=True, slots=True)
class Source:
    """The worker that holds the prompt's pages."""

    host: str
    port: int
    incarnation: str


class TransferDesk:
    """One worker's. `host` is where other workers reach its links."""

    def __init__(self, node: NodeClient, links: LinkServer, *, secret: bytes, host: str, tls: TLSFiles | None) -> None:
        self._node = node
        self._links = links
        self._secret = secret
        self._host = host
        self._tls = tls
        self._remotes: dict[tuple[str, int], RemoteNode] = {}
        self._connecting: dict[tuple[str, int], asyncio.Task[RemoteNode]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what fronts send and get ---

    def read(self, fields: dict[str, Any]) -> Source | None:
        """Takes the field out of a request body. None: the prompt is to be computed here. Raises `InvalidRequest` or `Forbidden`."""
        value = fields.pop(FIELD, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InvalidRequest(f"{FIELD} must be an object", param=FIELD)
        if not value.get("do_remote_prefill"):
            return None
        host, port, incarnation = value.get("remote_host"), value.get("remote_port"), value.get("remote_engine_id")
        if not isinstance(host, str) or type(port) is not int or not isinstance(incarnation, str):
            raise InvalidRequest(f"{FIELD} needs remote_host, remote_port and remote_engine_id, as the other worker gave them", param=FIELD)
        source = Source(host, port, incarnation)
        proof = value.get(_PROOF)
        if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), self._proof(source).encode()):
            raise Forbidden(f"{FIELD} does not come from a worker that shares this worker's secret", param=FIELD)
        return source

    def offer(self, asked: object) -> Mapping[str, Any] | None:
        """What goes into the answer of a request with ``do_remote_decode``: where its pages are."""
        card = self._node.card
        if not isinstance(asked, dict) or not asked.get("do_remote_decode") or card is None:
            return None
        source = Source(self._host, self._links.port, card.incarnation)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": source.incarnation,
            "remote_host": source.host,
            "remote_port": source.port,
            "remote_block_ids": [],
            _PROOF: self._proof(source),
        }

    def _proof(self, source: Source) -> str:
        said = f"{source.host}|{source.port}|{source.incarnation}".encode()
        return hmac.new(self._secret, b"transfer|" + said, hashlib.sha256).hexdigest()

    # --- fetching ---

    def submit(self, request: Request, source: Source) -> RequestStream:
        """The answer to a request whose prompt the source has computed."""
        card = self._node.card
        page_tokens = self._node.report.page_tokens
        if card is None or card.incarnation == source.incarnation or len(request.prompt_tokens) <= page_tokens:
            return self._node.submit(request)
        handoff = f"t-{secrets.token_hex(8)}"
        stream = self._node.stream(request.request_id, p.Receive(request, handoff, source.incarnation, FETCH_TIMEOUT_S))
        if not stream.ended:
            task = asyncio.create_task(self._fetch(request, stream, handoff, source, card.incarnation))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    async def _fetch(self, request: Request, stream: RequestStream, handoff: str, source: Source, incarnation: str) -> None:
        try:
            remote = await self._remote(source)
        except SetupError:
            self._node.send(p.HandoffLost(request.request_id))
            return
        if remote.card is None or remote.card.incarnation != source.incarnation:
            self._node.send(p.HandoffLost(request.request_id))
            return
        self._links.carry(handoff, _Carrier(remote, incarnation))
        remote.send(p.Give(handoff, request.scope, request.prompt_tokens, incarnation, FETCH_TIMEOUT_S))
        await self._watch(remote, stream)

    async def _watch(self, remote: RemoteNode, stream: RequestStream) -> None:
        """A source that freezes is not waited for, as a router would not. Time is counted in looks of ours, so that nobody is blamed for a
        pause of this process; what has arrived already is not lost by this."""
        still = 0
        for _ in range(round(FETCH_TIMEOUT_S / LOOK_EVERY_S)):
            await asyncio.sleep(LOOK_EVERY_S)
            if stream.ended:
                return
            still = still + 1 if remote.still_s > RECENT_S else 0
            if still * LOOK_EVERY_S >= FROZEN_AFTER_S - RECENT_S:
                self._node.send(p.HandoffLost(stream.request_id))
                return

    async def _remote(self, source: Source) -> RemoteNode:
        """The link to a source, opened once. Raises `SetupError`."""
        place = (source.host, source.port)
        if place in self._remotes:
            return self._remotes[place]
        if place not in self._connecting:
            connecting = RemoteNode.connect(*place, secret=self._secret, tls=self._tls)
            self._connecting[place] = asyncio.create_task(connecting)
        try:
            remote = await asyncio.shield(self._connecting[place])
        finally:
            if place in self._connecting and self._connecting[place].done():
                del self._connecting[place]
        if place not in self._remotes:
            remote.on_relay, remote.on_lost = self._relayed, self._lost
            self._remotes[place] = remote
        return remote

    def _relayed(self, remote: NodeClient, message: p.Relay) -> None:
        if remote.card is not None:
            self._node.send(p.Relay(message.handoff, remote.card.incarnation, message.body))

    def _lost(self, remote: NodeClient, incarnation: str) -> None:
        self._node.send(p.PeerGone(incarnation))

    async def close(self) -> None:
        for task in (*self._tasks, *self._connecting.values()):
            task.cancel()
        await asyncio.gather(*(remote.close() for remote in self._remotes.values()), return_exceptions=True)


class _Carrier:
    """Where the link server sends what our node says about a hand-off of ours."""

    def __init__(self, remote: RemoteNode, incarnation: str) -> None:
        self._remote = remote
        self._incarnation = incarnation

    @property
    def closed(self) -> bool:
        return self._remote.card is None

    def send(self, message: m.FromEngine) -> None:
        if isinstance(message, p.Relay):
            self._remote.send(p.Relay(message.handoff, self._incarnation, message.body))
