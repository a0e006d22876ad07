"""What a router has its nodes do beside requests: prove at the start that hand-offs work, bring answers back to where prompts are computed.

Owns both. Neither is needed for any request to be right: an errand that fails costs a recomputation later, or is a reason not to start.
"""

from __future__ import annotations

import secrets

from kvseal.core.errors import EngineDied
from kvseal.core.events import Event
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Completed
from kvseal.core.request import Request, SamplingParams
from kvseal.node import peer_messages as p
from kvseal.node.fleet import Fleet
from kvseal.node.node_client import Leg, NodeClient
from kvseal.node.split_request import SplitRequest
from kvseal.node.stream import RequestStream

PROOF_PAGES = 2
PROOF_TIMEOUT_S = 60.0
PROOF_ATTEMPTS = 3
"""On a machine that is busy while everything starts, a peer may be silent for longer than a hand-off bears."""
RETURN_TIMEOUT_S = 10.0


async def prove_pair(prefill: NodeClient, decode: NodeClient, scope: Scope) -> None:
    """One small hand-off from one node to the other. Raises `EngineDied` unless one of `PROOF_ATTEMPTS` arrives."""
    for _ in range(PROOF_ATTEMPTS):
        if await _arrives(prefill, decode, scope):
            return
    raise EngineDied(f"no page goes from node {prefill.name} to node {decode.name}: their logs say why")


async def _arrives(prefill: NodeClient, decode: NodeClient, scope: Scope) -> bool:
    sender, receiver = prefill.card, decode.card
    if sender is None or receiver is None:
        raise EngineDied("a node died before it could be proven")
    name = secrets.token_hex(8)
    first = int(name[:4], 16)  # another prompt each time: what is cached already would not be sent
    vocab, tokens = decode.report.vocab_size, PROOF_PAGES * decode.report.page_tokens + 1
    request = Request(
        request_id=RequestId(f"proof-{name}"),
        prompt_tokens=tuple((7919 * at + first) % vocab for at in range(tokens)),
        max_output_tokens=2,
        scope=scope,
        sampling=SamplingParams(temperature=0.0),
    )
    before = (await decode.stats()).handoff["received"]
    answer = decode.stream(request.request_id, p.Receive(request, f"p-{name}", sender.incarnation, PROOF_TIMEOUT_S))
    prefill.open(request.request_id, p.Prefill(request, f"p-{name}", receiver.incarnation, PROOF_TIMEOUT_S), _ignored)
    outcome = await _outcome(answer)
    return isinstance(outcome, Completed) and (await decode.stats()).handoff["received"] > before


async def prove(fleet: Fleet, scope: Scope) -> None:
    """Every node takes part in a hand-off. Raises `EngineDied` when one fails."""
    prefills = [node for node in fleet.nodes if node.role == "prefill"]
    decodes = [node for node in fleet.nodes if node.role == "decode"]
    for number in range(max(len(prefills), len(decodes))):
        await prove_pair(prefills[number % len(prefills)], decodes[number % len(decodes)], scope)


def bring_back(fleet: Fleet, one: SplitRequest, page_tokens: int) -> bool:
    """The pages of a completed answer go to the node that will be asked for the next turn's prompt. False: there is nothing to bring."""
    decode, prefill = one.decode_node, one.prefill_node
    prompt = one.request.prompt_tokens
    tokens = (*prompt, *one.output)
    if decode is None or prefill is None or (len(tokens) - 1) // page_tokens <= len(prompt) // page_tokens:
        return False
    sender, receiver = decode.card, prefill.card
    if sender is None or receiver is None or not (fleet.usable(decode) and fleet.usable(prefill)):
        return False
    handoff = f"b-{secrets.token_hex(8)}"
    prefill.send(p.Take(handoff, one.request.scope, tokens, sender.incarnation, RETURN_TIMEOUT_S))
    decode.send(p.Give(handoff, one.request.scope, tokens, receiver.incarnation, RETURN_TIMEOUT_S))
    return True


def _ignored(_leg: Leg, _event: Event) -> None:
    """The other node's answer is the one that counts."""


async def _outcome(stream: RequestStream) -> object:
    outcome: object = None
    async for event in stream:
        outcome = None if isinstance(event, tuple) else event.outcome
    return outcome
