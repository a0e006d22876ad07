"""Sizing of the pool and the start report: the numbers that must agree, and refusals that say what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvseal.core.config import EngineConfig
from kvseal.core.errors import PoolTooSmall
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.lab.oracle import oracle_geometry, oracle_spec
from kvseal.node.build import SPARE_BYTES, available_memory_bytes, pages_for_pool, token_formula

GEOMETRY = oracle_geometry(page_tokens=16)
SPEC = oracle_spec(GEOMETRY, context_tokens=1_024)
PLENTY = 10 * 2**30


def pages(available_bytes: int = PLENTY, **options: int) -> int:
    return pages_for_pool(EngineConfig(model=Path("m"), **options), GEOMETRY, SPEC, available_bytes=available_bytes)  # type: ignore[arg-type]


def test_sizes_that_were_asked_for() -> None:
    assert pages(pool_tokens=1_000) == 63
    assert pages(kv_memory_bytes=10 * GEOMETRY.page_bytes + 5) == 10


def test_default_holds_several_full_requests_but_never_most_of_memory() -> None:
    assert pages() == 8 * 64
    little = SPARE_BYTES + 2**20
    assert GEOMETRY.page_bytes * pages(little) <= 0.4 * little


def test_promised_context_may_take_more_than_the_default_share() -> None:
    # 60 pages' worth of memory beside the spare: the default share alone would be far more than that here, so shrink what is left
    assert pages(context_tokens=1_024) == 8 * 64


@pytest.mark.parametrize("options", [{"pool_tokens": 16 * 200}, {"kv_memory_bytes": 200 * GEOMETRY.page_bytes}])
def test_more_than_memory_is_refused_with_what_would_fit(options: dict[str, int]) -> None:
    with pytest.raises(PoolTooSmall, match=r"--pool-tokens 1600\b"):
        pages(SPARE_BYTES + 100 * GEOMETRY.page_bytes, **options)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(PoolTooSmall):
        pages(SPARE_BYTES // 2)


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(PoolTooSmall, match=str(GEOMETRY.page_bytes)):
        pages(kv_memory_bytes=GEOMETRY.page_bytes - 1)


@pytest.mark.parametrize(
    "kv_dtype, text",
    [
        (KVDtype.FP16, "2 (K and V) x 30 layers x 3 KV heads x 64 x 2 B"),
        (KVDtype.FP32, "2 (K and V) x 30 layers x 3 KV heads x 64 x 4 B"),
        (KVDtype.INT8, "2 (K and V) x 30 layers x 3 KV heads x (64 x 1 B + 4 B scale)"),
        (KVDtype.INT4, "2 (K and V) x 30 layers x 3 KV heads x (64 x 0.5 B + 4 B scale)"),
    ],
)
def test_formula_is_the_number(kv_dtype: KVDtype, text: str) -> None:
    geometry = KVGeometry(layers=30, kv_heads=3, head_dim=64, kv_dtype=kv_dtype)
    assert token_formula(geometry) == text
    spoken = text.replace("(K and V)", "").replace("layers", "").replace("KV heads", "").replace("B scale", "").replace("B", "")
    assert eval(spoken.replace("x", "*")) == geometry.token_bytes


def memory(tmp_path: Path, *, available_kb: int | None, limit: str | None = None, used: int = 0, inactive: int = 0) -> int:
    proc, group = tmp_path / "proc", tmp_path / "group"
    proc.mkdir()
    group.mkdir()
    if available_kb is not None:
        (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kb} kB\n")
    if limit is not None:
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return available_memory_bytes(proc, group)


def test_memory_of_the_machine(tmp_path: Path) -> None:
    assert memory(tmp_path, available_kb=1_000) == 1_024_000


def test_memory_of_the_control_group(tmp_path: Path) -> None:
    assert memory(tmp_path, available_kb=1_000, limit="900000", used=500_000, inactive=100_000) == 500_000


def test_group_without_limit(tmp_path: Path) -> None:
    assert memory(tmp_path, available_kb=1_000, limit="max") == 1_024_000


def test_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert memory(tmp_path, available_kb=None) > 0
