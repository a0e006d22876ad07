"""What a scrape says, with and without an engine to ask."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from kvseal.node.fleet import summed
from kvseal.node.report import EngineStats, NodeStats
from kvseal.serve.metrics import Metrics

from .tiny_model import start_report

STATS = EngineStats(
    pages_total=16,
    pages_free=9,
    pages_leased=4,
    pages_sealed=2,
    pages_draining=0,
    pages_quarantined=1,
    running=3,
    waiting=2,
    steps=10,
    last_step_age_s=0.5,
    prompt_tokens=100,
    output_tokens=50,
    cached_tokens=32,
    queried_tokens=100,
    preemptions=1,
    recomputed_tokens=7,
    evicted_pages=2,
    broken_seals={"L3": 1},
    outcomes={"completed": 5},
)


def _values(text: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_scrape() -> None:
    metrics = Metrics()
    metrics.http_requests.labels("/v1/models", "200").inc()
    metrics.first_token_s.observe(0.3)
    values = _values(metrics.render(start_report(), STATS, ready=True, restarts=2))
    assert values["kvseal_kv_pool_tokens"] == 256
    assert values["kvseal_max_servable_tokens"] == 128
    assert sum(value for name, value in values.items() if name.startswith("kvseal_kv_pages")) == 16
    assert values["kvseal_broken_seals_total[L3]"] == 1
    assert values["kvseal_broken_seals_total[L5]"] == 0, "laws that were never broken are there, at zero"
    assert values["kvseal_prefix_hit_tokens_total"] == 32
    assert values["kvseal_requests_waiting"] == 2
    assert values["kvseal_engine_restarts_total"] == 2
    assert values["kvseal_time_to_first_token_seconds_count"] == 1


def test_every_node_by_itself() -> None:
    here = replace(
        STATS,
        handoff={
            "sent": 0,
            "received": 7,
            "pages": 90,
            "bytes": 9_000,
            "recomputed": 2,
            "fences": 9,
            "fence_waits": 1,
            "failed_seal": 3,
            "received_failed_seal": 2,
            "sent_failed_seal": 1,
        },
        handoff_seconds=((0.1, 4), (1.0, 2), (float("inf"), 1)),
        handoff_seconds_sum=3.5,
        fence_s=0.25,
    )
    nodes = (
        NodeStats(name="decode-0", role="decode", ready=True, restarts=1, stats=here),
        NodeStats(name="prefill-0", role="prefill", ready=False, restarts=0, stats=None),
    )
    values = _values(Metrics().render(start_report(), summed([here], nodes), ready=True, restarts=0))
    of = "[decode-0][decode]"
    assert values[f"kvseal_node_up{of}"] == 1 and values["kvseal_node_up[prefill-0][prefill]"] == 0
    assert values[f"kvseal_node_restarts_total{of}"] == 1
    pages = {state: values[f"kvseal_node_kv_pages{of}[{state}]"] for state in ("free", "leased", "sealed", "draining", "quarantined")}
    assert pages == {"free": 9, "leased": 4, "sealed": 2, "draining": 0, "quarantined": 1}
    assert values[f"kvseal_node_requests{of}[running]"] == 3 and values[f"kvseal_node_requests{of}[waiting]"] == 2
    ended = {
        (direction, outcome): values.get(f"kvseal_node_handoffs_total[{direction}][decode-0][{outcome}][decode]")
        for direction, outcome in (("received", "delivered"), ("received", "seal"), ("sent", "delivered"), ("sent", "seal"))
    }
    assert list(ended.values()) == [7, 2, 0, 1]
    assert values["kvseal_handoff_failed_total[seal]"] == 3
    assert values[f"kvseal_node_handoff_bytes_total{of}"] == 9_000 and values[f"kvseal_node_handoff_fence_waits_total{of}"] == 1
    assert values[f"kvseal_node_handoff_fence_seconds_total{of}"] == 0.25
    assert values[f"kvseal_node_handoff_seconds_sum{of}"] == 3.5 and values[f"kvseal_node_handoff_seconds_count{of}"] == 7
    assert {name for name in values if name.startswith("kvseal_node") and "prefill-0" in name} == {
        "kvseal_node_up[prefill-0][prefill]",
        "kvseal_node_restarts_total[prefill-0][prefill]",
    }, "what is not known is absent, not zero"


def test_without_an_engine_its_numbers_are_absent() -> None:
    values = _values(Metrics().render(start_report(), None, ready=False, restarts=0))
    assert values["kvseal_engine_ready"] == 0
    assert "kvseal_requests_running" not in values
    assert values["kvseal_kv_pool_bytes"] == 16384
