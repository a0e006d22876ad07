"""What a scrape says, with and without an engine to ask."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvseal.node.report import EngineStats
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


def test_without_an_engine_its_numbers_are_absent() -> None:
    values = _values(Metrics().render(start_report(), None, ready=False, restarts=0))
    assert values["kvseal_engine_ready"] == 0
    assert "kvseal_requests_running" not in values
    assert values["kvseal_kv_pool_bytes"] == 16384
