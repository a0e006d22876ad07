"""What the server counts, for Prometheus.

Owns every metric's name. A scrape costs time in proportion to the number of metrics, never of requests or pages: what the engine counts
comes as one snapshot. Labels are bounded: routes are templates, tenants and models are not labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvseal.core.laws import Law
from kvseal.node.report import EngineStats, FleetStats, NodeStats, StartReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)
_SLOW_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_OUTCOMES = ("completed", "refused", "cancelled", "failed")


class Metrics:
    """One registry of its own, so that two servers in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self.http_requests = Counter(
            "kvseal_http_requests", "HTTP requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.http_outcomes = Counter(
            "kvseal_http_outcomes", "Generation requests by how they ended for the client.", ["outcome"], registry=self.registry
        )
        for outcome in _OUTCOMES:
            self.http_outcomes.labels(outcome)
        self.first_token_s = Buckets("kvseal_time_to_first_token_seconds", "From request to first token.", _SLOW_S)
        self.inter_token_s = Buckets("kvseal_inter_token_seconds", "Between two tokens of one answer.", _FAST_S)
        self.end_to_end_s = Buckets("kvseal_request_seconds", "From request to the end of a completed answer.", _SLOW_S)
        for histogram in (self.first_token_s, self.inter_token_s, self.end_to_end_s):
            self.registry.register(histogram)

    def render(self, report: StartReport, stats: EngineStats | None, *, ready: bool, restarts: int) -> bytes:
        """The exposition text. `stats` is None when there is no engine to ask: its gauges are then absent, not zero."""
        self._engine.look(report, stats, ready=ready, restarts=restarts)
        return generate_latest(self.registry)


class Buckets(Collector):
    """A histogram for one thread: observing costs a fraction of the library's own, and one observation is made for every token."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        pairs = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=pairs, sum_value=self._sum)


class _EngineCollector(Collector):
    """Turns the last snapshot into metrics, each time anew."""

    def __init__(self) -> None:
        self._report: StartReport | None = None
        self._stats: EngineStats | None = None
        self._ready = False
        self._restarts = 0

    def look(self, report: StartReport, stats: EngineStats | None, *, ready: bool, restarts: int) -> None:
        self._report, self._stats, self._ready, self._restarts = report, stats, ready, restarts

    def collect(self) -> Iterator[Metric]:
        if self._report is not None:
            yield from _sizes(self._report)
            yield GaugeMetricFamily("kvseal_engine_ready", "1 when the engine makes progress.", value=float(self._ready))
            yield CounterMetricFamily("kvseal_engine_restarts", "Times that the engine had to be started again.", value=self._restarts)
        if self._stats is not None:
            yield from _snapshot(self._stats)


def _sizes(report: StartReport) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvseal_kv_pool_tokens", "Tokens that the KV pool holds.", value=report.pool_tokens)
    yield GaugeMetricFamily("kvseal_kv_pool_bytes", "Bytes of the KV pool.", value=report.pool_bytes)
    yield GaugeMetricFamily("kvseal_kv_token_bytes", "Bytes of K and V of one token.", value=report.kv_token_bytes)
    yield GaugeMetricFamily("kvseal_max_servable_tokens", "Prompt and output of one request, at most.", value=report.served_context_tokens)


def _pages(stats: EngineStats) -> tuple[tuple[str, int], ...]:
    return (
        ("free", stats.pages_free),
        ("leased", stats.pages_leased),
        ("sealed", stats.pages_sealed),
        ("draining", stats.pages_draining),
        ("quarantined", stats.pages_quarantined),
    )


def _snapshot(stats: EngineStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily("kvseal_kv_pages", "Pages of the KV pool by state; they add up to the pool.", labels=["state"])
    for state, count in _pages(stats):
        pages.add_metric([state], count)
    yield pages
    yield GaugeMetricFamily("kvseal_requests_running", "Requests that hold pages.", value=stats.running)
    yield GaugeMetricFamily("kvseal_requests_waiting", "Requests in the waiting line.", value=stats.waiting)
    if stats.last_step_age_s is not None:
        yield GaugeMetricFamily("kvseal_last_step_age_seconds", "Since the engine's last step.", value=stats.last_step_age_s)
    for name, text, value in (
        ("kvseal_engine_steps", "Steps of the engine.", stats.steps),
        ("kvseal_prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
        ("kvseal_output_tokens", "Tokens generated.", stats.output_tokens),
        ("kvseal_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache.", stats.queried_tokens),
        ("kvseal_prefix_hit_tokens", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
        ("kvseal_preemptions", "Requests that gave up their pages to others for a while.", stats.preemptions),
        ("kvseal_recomputed_tokens", "Tokens computed again after a preemption.", stats.recomputed_tokens),
        ("kvseal_evicted_pages", "Cached pages given up for new ones.", stats.evicted_pages),
    ):
        yield CounterMetricFamily(name, text, value=value)
    broken = CounterMetricFamily("kvseal_broken_seals", "Reads and writes that did not match a seal, by law.", labels=["law"])
    for law in Law:
        broken.add_metric([law.value], stats.broken_seals.get(law.value, 0))
    yield broken
    if stats.handoff:
        yield from _handoffs(stats.handoff)
    if isinstance(stats, FleetStats):
        yield from _nodes(stats.nodes)
    outcomes = CounterMetricFamily("kvseal_engine_outcomes", "Sequences by how they ended in the engine.", labels=["outcome"])
    for outcome in _OUTCOMES:
        outcomes.add_metric([outcome], stats.outcomes.get(outcome, 0))
    yield outcomes


def _handoffs(counts: Mapping[str, int]) -> Iterator[Metric]:
    """Of all nodes together. Both ends of a hand-off count it, so `sent` and `received` are equal when all is well."""
    for name, text in (
        ("received", "Hand-offs whose pages were all verified by the receiver and committed."),
        ("sent", "Hand-offs whose receipt the sender has found equal."),
        ("recomputed", "Prompts computed on the decode node because their hand-off failed."),
        ("pages", "Pages that arrived and were checked."),
        ("bytes", "Bytes of these pages."),
        ("ignored_messages", "Messages of hand-offs or processes that are no more."),
        ("readmitted_pages", "Pages that left the quarantine of hand-offs on proof."),
        ("resets", "Times that a transport was torn down to get proof: an alarm."),
        ("split", "Requests placed on two nodes."),
        ("direct", "Requests placed on their decode node alone."),
        ("placed_again", "Requests placed again because a node died, froze or refused, before any token of theirs was emitted."),
        ("lost", "Hand-offs given up by the router because the prefill node died or froze."),
        ("brought_back", "Answers whose pages were sent back to the node that computes prompts."),
        ("differed", "Requests stopped because two nodes computed different tokens (law L13)."),
    ):
        yield CounterMetricFamily(f"kvseal_handoff_{name}", text, value=counts.get(name, 0))
    quarantined = counts.get("quarantined_pages", 0)
    yield GaugeMetricFamily("kvseal_handoff_quarantined_pages", "Pages out of use because of hand-offs, now.", value=quarantined)
    failed = CounterMetricFamily("kvseal_handoff_failed", "Hand-offs that ended without a receipt, by reason.", labels=["reason"])
    for name, count in sorted(counts.items()):
        if name.startswith("failed_"):
            failed.add_metric([name.removeprefix("failed_")], count)
    yield failed


_NODE = ("node", "role")
_NODE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("steps", "Steps of the node's engine.", lambda stats: stats.steps),
    ("output_tokens", "Tokens generated there.", lambda stats: stats.output_tokens),
    ("preemptions", "Requests that gave up their pages there for a while.", lambda stats: stats.preemptions),
    ("handoff_pages", "Pages that arrived there and were checked.", lambda stats: stats.handoff.get("pages", 0)),
    ("handoff_bytes", "Bytes of these pages.", lambda stats: stats.handoff.get("bytes", 0)),
    ("handoff_recomputed", "Prompts computed there because their hand-off failed.", lambda stats: stats.handoff.get("recomputed", 0)),
    ("handoff_fences", "Times that the node's transport was asked whether it is quiet.", lambda stats: stats.handoff.get("fences", 0)),
    ("handoff_fence_waits", "Times that it could not say so.", lambda stats: stats.handoff.get("fence_waits", 0)),
    ("handoff_fence_seconds", "What the asking has taken.", lambda stats: stats.fence_s),
)


def _nodes(nodes: Sequence[NodeStats]) -> Iterator[Metric]:
    """Of each node by itself. One that does not answer is down, and its numbers are absent, not zero."""
    up = GaugeMetricFamily("kvseal_node_up", "1 when requests may go there.", labels=_NODE)
    restarts = CounterMetricFamily("kvseal_node_restarts", "Times that the node had to be started or connected again.", labels=_NODE)
    for node in nodes:
        up.add_metric([node.name, node.role], float(node.ready))
        restarts.add_metric([node.name, node.role], node.restarts)
    yield up
    yield restarts
    there = [([node.name, node.role], node.stats) for node in nodes if node.stats is not None]
    pages = GaugeMetricFamily("kvseal_node_kv_pages", "Pages of the node's pool by state; they add up to it.", labels=[*_NODE, "state"])
    requests = GaugeMetricFamily("kvseal_node_requests", "Requests of the node: running, waiting.", labels=[*_NODE, "state"])
    handoffs = CounterMetricFamily(
        "kvseal_node_handoffs", "Hand-offs by direction and how they ended.", labels=[*_NODE, "direction", "outcome"]
    )
    seconds = HistogramMetricFamily(
        "kvseal_node_handoff_seconds", "Received hand-offs, from Intent to receipt; the prompt is computed meanwhile.", labels=_NODE
    )
    for labels, stats in there:
        for state, count in _pages(stats):
            pages.add_metric([*labels, state], count)
        requests.add_metric([*labels, "running"], stats.running)
        requests.add_metric([*labels, "waiting"], stats.waiting)
        for direction, outcome, count in _ended(stats.handoff):
            handoffs.add_metric([*labels, direction, outcome], count)
        bounds = list(map(floatToGoString, (bound for bound, _ in stats.handoff_seconds)))
        counts = accumulate(count for _, count in stats.handoff_seconds)
        if bounds:
            seconds.add_metric(labels, buckets=list(zip(bounds, map(float, counts), strict=True)), sum_value=stats.handoff_seconds_sum)
    yield from (pages, requests, handoffs, seconds)
    for name, text, read in _NODE_COUNTERS:
        counter = CounterMetricFamily(f"kvseal_node_{name}", text, labels=_NODE)
        for labels, stats in there:
            counter.add_metric(labels, read(stats))
        yield counter


def _ended(counts: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """Direction, outcome, how many."""
    for direction in ("sent", "received"):
        yield direction, "delivered", counts.get(direction, 0)
        for name, count in sorted(counts.items()):
            if name.startswith(f"{direction}_failed_"):
                yield direction, name.removeprefix(f"{direction}_failed_"), count
