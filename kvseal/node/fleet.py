"""The nodes of a router, as a whole: who is there, how much each has to do, what each has cached, and what all of them can serve.

Owns the sums. Never sends anything. Law L1: the served context is the smallest of all nodes', so that no request is taken that a node it
may be sent to could never hold.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvseal.core.errors import ConfigError, EngineDied, Unavailable
from kvseal.node.client import EngineState
from kvseal.node.node_client import NodeClient
from kvseal.node.placement import Candidate
from kvseal.node.report import EngineStats, FleetStats, NodeStats, StartReport
from kvseal.node.split_request import SplitRequest

STATS_TIMEOUT_S = 3.0
LOOK_EVERY_S = 0.25
FROZEN_AFTER_S = 5.0
"""A node that makes no progress for so long is not waited for."""
OWN_PAUSE_S = 0.75
ANSWER_S = 3.0
"""For a node to be asked and to answer, after this process has stood still."""
GROWTH_TOKENS = 64
"""Room that is kept for each answer to grow into; what grows further makes the node's scheduler choose who waits."""
SMALLEST_NODE = "what the smallest node holds"


class _Work:
    """What one node has to do."""

    def __init__(self) -> None:
        self.outstanding_tokens = 0
        self.answers: set[SplitRequest] = set()
        """Requests that are answered there."""
        self.promised: Counter[bytes] = Counter()
        """Keys that it will hold when what it is computing is done."""


class Fleet:
    """Raises `ConfigError` when nodes of different models or layouts are put together, or none of a role."""

    def __init__(self, nodes: Sequence[NodeClient], *, frozen_after_s: float, recomputes: bool) -> None:
        self.nodes = tuple(nodes)
        self._frozen_after_s = frozen_after_s
        self._recomputes = recomputes
        self._work = {node: _Work() for node in self.nodes}
        self._cost: dict[SplitRequest, tuple[int, int]] = {}
        """Outstanding tokens of an open request: at the node that computes the prompt, at the one that answers."""
        self._frozen: set[NodeClient] = set()
        self._looked_at_s: float | None = None
        self._blind_until_s = 0.0
        self._reports: tuple[StartReport, ...] = ()
        self._report: StartReport | None = None
        if len({node.name for node in self.nodes}) != len(self.nodes):
            names = ", ".join(sorted(node.name for node in self.nodes))
            raise ConfigError(f"nodes need different names, and these are called {names}: give each worker a --name of its own")
        transports = sorted({node.card.transport for node in self.nodes if node.card is not None})
        if len(transports) > 1:
            raise ConfigError(f"the workers move pages in different ways ({', '.join(transports)}); give all the same --transport")
        for role in ("prefill", "decode"):
            if not any(node.role == role for node in self.nodes):
                raise ConfigError(f"there is no {role} node; a hand-off needs at least one of each role")

    @property
    def report(self) -> StartReport:
        """Limits that hold on every node; sizes of the nodes that answer. Raises `ConfigError` when they cannot work together."""
        reports = tuple(node.report for node in self.nodes)
        if self._report is None or any(new is not old for new, old in zip(reports, self._reports, strict=True)):
            self._reports, self._report = reports, combined(reports, [node.role for node in self.nodes])
        return self._report

    @property
    def state(self) -> EngineState:
        """Ready when a request can be answered."""
        if self.some("decode") and (self._recomputes or self.some("prefill")):
            return EngineState.READY
        states = {node.state for node in self.nodes}
        return EngineState.STALLED if EngineState.STALLED in states else EngineState.DEAD

    @property
    def last_progress_age_s(self) -> float:
        """Of the decode node that moved last."""
        return min(node.last_progress_age_s for node in self.nodes if node.role == "decode")

    def named(self, name: str | None) -> NodeClient | None:
        return next((node for node in self.nodes if node.name == name), None)

    def by_incarnation(self, incarnation: str) -> NodeClient | None:
        return next((node for node in self.nodes if node.card is not None and node.card.incarnation == incarnation), None)

    def usable(self, node: NodeClient) -> bool:
        return node.usable and node not in self._frozen

    def look(self, now_s: float) -> list[NodeClient]:
        """To be called every `LOOK_EVERY_S`: nodes that have stopped making progress since the last call. When this process itself has
        stood still, nobody else is blamed for it until all have had the time to answer."""
        if self._looked_at_s is not None and now_s - self._looked_at_s > LOOK_EVERY_S + OWN_PAUSE_S:
            self._blind_until_s = now_s + ANSWER_S
        self._looked_at_s = now_s
        if now_s < self._blind_until_s:
            return []
        frozen = {node for node in self.nodes if node.card is not None and node.still_s > self._frozen_after_s}
        fresh = [node for node in self.nodes if node in frozen and node not in self._frozen]
        self._frozen = frozen
        return fresh

    def candidates(self, one: SplitRequest) -> tuple[list[Candidate], list[Candidate]]:
        """Usable nodes of the two roles, with what they hold of its prompt; of those that answer, the ones with room if there are any."""
        page_tokens = self.report.page_tokens
        found: dict[str, list[Candidate]] = {"prefill": [], "decode": []}
        roomy = [node for node in self.nodes if node.role == "decode" and self.usable(node) and self._has_room(node, one)]
        for node in self.nodes:
            if self.usable(node) and (node.role == "prefill" or not roomy or node in roomy):
                work = self._work[node]
                cached = held_pages(one.keys, node.cached, {})
                coming = held_pages(one.keys, node.cached, work.promised)
                candidate = Candidate(node.name, work.outstanding_tokens, cached * page_tokens, coming * page_tokens)
                found[node.role].append(candidate)
        return found["prefill"], found["decode"]

    def has_room(self, one: SplitRequest) -> bool:
        """Whether it can be placed now. Where nobody is usable it can: it is refused then, not kept waiting."""
        decodes = [node for node in self.nodes if node.role == "decode" and self.usable(node)]
        return not decodes or one.request.max_output_tokens == 1 or any(self._has_room(node, one) for node in decodes)

    def _has_room(self, node: NodeClient, one: SplitRequest) -> bool:
        """For the prompt and some of the answer, beside what is open there. An empty node has room: the request fits it alone (L1)."""
        there = self._work[node].answers
        if not there:
            return True
        held = sum(len(other.request.prompt_tokens) + len(other.output) + GROWTH_TOKENS for other in there)
        report = node.report
        return len(there) < report.max_running and held + len(one.request.prompt_tokens) + GROWTH_TOKENS <= report.pool_tokens

    # --- work ---

    def took(self, one: SplitRequest) -> None:
        """Its nodes have this much more to do."""
        prompt, output = len(one.request.prompt_tokens), one.request.max_output_tokens
        decode = prompt + min(output, prompt + GROWTH_TOKENS)
        prefill = prompt if one.prefill_node is not None else 0
        self._cost[one] = (prefill, decode)
        self._add(one.prefill_node, prefill, one.keys, 1)
        self._add(one.decode_node, decode, one.keys, 1)
        if one.decode_node is not None:
            self._work[one.decode_node].answers.add(one)

    def prefilled(self, one: SplitRequest) -> None:
        """Its prompt is computed, or will not be."""
        prefill, decode = self._cost.get(one, (0, 0))
        if prefill:
            self._add(one.prefill_node, prefill, one.keys, -1)
            self._cost[one] = (0, decode)

    def left(self, one: SplitRequest) -> None:
        """Its nodes have nothing more to do for it. Safe to call twice."""
        self.prefilled(one)
        _, decode = self._cost.pop(one, (0, 0))
        if one.decode_node is not None:
            self._work[one.decode_node].answers.discard(one)
        if decode:
            self._add(one.decode_node, decode, one.keys, -1)

    def _add(self, node: NodeClient | None, tokens: int, keys: Iterable[bytes], sign: int) -> None:
        if node is None:
            return
        work = self._work[node]
        work.outstanding_tokens += sign * tokens
        for key in keys:
            work.promised[key] += sign
            if not work.promised[key]:
                del work.promised[key]

    # --- sums ---

    async def stats(self) -> FleetStats:
        """Of the nodes that answer in time, together and each. Raises `EngineDied` when none does."""
        answers = await asyncio.gather(*map(_asked, self.nodes), return_exceptions=True)
        found = [answer for answer in answers if isinstance(answer, EngineStats)]
        unexpected = [answer for answer in answers if not isinstance(answer, EngineStats | Unavailable | TimeoutError)]
        if unexpected:
            raise unexpected[0]
        if not found:
            raise EngineDied("no node answers")
        return summed(found, tuple(map(self._told, self.nodes, answers)))

    def _told(self, node: NodeClient, answer: object) -> NodeStats:
        stats = answer if isinstance(answer, EngineStats) else None
        return NodeStats(name=node.name, role=node.role, ready=self.usable(node), restarts=node.restarts, stats=stats)

    def some(self, role: str) -> bool:
        """Whether a node of this role can take requests now."""
        return any(self.usable(node) for node in self.nodes if node.role == role)


async def _asked(node: NodeClient) -> EngineStats:
    async with asyncio.timeout(STATS_TIMEOUT_S):
        return await node.stats()


def held_pages(keys: Sequence[bytes], cached: set[bytes], promised: Mapping[bytes, int]) -> int:
    """How many of a prompt's first pages a node holds or will hold. A prefix is evicted from its end, so what is held is a beginning."""
    return bisect_left(keys, True, key=lambda key: key not in cached and key not in promised)


def combined(reports: Sequence[StartReport], roles: Sequence[str]) -> StartReport:
    """Raises `ConfigError` unless all nodes compute the same model into the same kind of pages."""
    first = reports[0]
    for report in reports[1:]:
        for name, ours, theirs in (
            ("KV format (weights, KV dtype or layout)", first.kv_format, report.kv_format),
            ("page size", first.page_tokens, report.page_tokens),
            ("vocabulary", first.vocab_size, report.vocab_size),
        ):
            if ours != theirs:
                raise ConfigError(f"the nodes differ in their {name} ({ours} and {theirs}): they must serve the same model the same way")
    smallest = min(reports, key=lambda report: report.served_context_tokens)
    decodes = [report for report, role in zip(reports, roles, strict=True) if role == "decode"]
    reason = smallest.context_reason if len({report.served_context_tokens for report in reports}) == 1 else SMALLEST_NODE
    return replace(
        decodes[0],
        served_context_tokens=smallest.served_context_tokens,
        context_reason=reason,
        pool_pages=sum(report.pool_pages for report in decodes),
        pool_tokens=sum(report.pool_tokens for report in decodes),
        pool_bytes=sum(report.pool_bytes for report in decodes),
        full_length_requests=sum(report.pool_tokens // smallest.served_context_tokens for report in decodes),
        max_running=sum(report.max_running for report in decodes),
        max_queued=sum(report.max_queued for report in decodes),
    )


def summed(stats: Sequence[EngineStats], nodes: tuple[NodeStats, ...] = ()) -> FleetStats:
    """Counts add up; the age of the last step is the youngest."""
    broken, outcomes, handoff = Counter[str](), Counter[str](), Counter[str]()
    for one in stats:
        broken.update(one.broken_seals)
        outcomes.update(one.outcomes)
        handoff.update(one.handoff)
    ages = [one.last_step_age_s for one in stats if one.last_step_age_s is not None]
    return FleetStats(
        pages_total=sum(one.pages_total for one in stats),
        pages_free=sum(one.pages_free for one in stats),
        pages_leased=sum(one.pages_leased for one in stats),
        pages_sealed=sum(one.pages_sealed for one in stats),
        pages_draining=sum(one.pages_draining for one in stats),
        pages_quarantined=sum(one.pages_quarantined for one in stats),
        running=sum(one.running for one in stats),
        waiting=sum(one.waiting for one in stats),
        steps=sum(one.steps for one in stats),
        last_step_age_s=min(ages) if ages else None,
        prompt_tokens=sum(one.prompt_tokens for one in stats),
        output_tokens=sum(one.output_tokens for one in stats),
        cached_tokens=sum(one.cached_tokens for one in stats),
        queried_tokens=sum(one.queried_tokens for one in stats),
        preemptions=sum(one.preemptions for one in stats),
        recomputed_tokens=sum(one.recomputed_tokens for one in stats),
        evicted_pages=sum(one.evicted_pages for one in stats),
        broken_seals=broken,
        outcomes=outcomes,
        handoff=handoff,
        nodes=nodes,
    )
