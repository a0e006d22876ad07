"""Exact equality with the layer reference, the planner goldens and the seeds. Nothing here is tuned: the rules are general."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvseal.plan import Ask, KVFormat, Parallel, Settings, answer, footprint, read_shape
from kvseal.plan.engines import vllm
from kvseal.plan.shape import Attention, Compressed, Index, Kind, Latent, ModelShape, State


def shape_of(shared: Path, name: str) -> ModelShape:
    return read_shape(json.loads((shared / "model-configs" / f"{name}.json").read_text()), name)


def as_reference(shape: ModelShape) -> list[dict[str, Any]]:
    """Our groups in the reference's words."""
    if shape.is_compressed:
        caches = [cache for layer in shape.layers for cache in layer if isinstance(cache, Compressed)]
        ratios = [cache.ratio for cache in caches]
        window = caches[0].window_tokens
        return [
            {"kind": "dsv4", "swa_layers": len(caches), "c4_layers": ratios.count(4), "c128_layers": ratios.count(128), "window": window}
        ]
    rows = []
    for group in shape.groups:
        cache = group.cache
        row: dict[str, Any] = {"kind": cache.kind.value, "layers": group.layers}
        if isinstance(cache, Attention):
            row |= {"kv_heads": cache.kv_heads, "k_dim": cache.k_dim, "v_dim": cache.v_dim}
            if cache.window_tokens is not None:
                row["chunk" if cache.kind is Kind.CHUNKED else "window"] = cache.window_tokens
        elif isinstance(cache, Latent):
            row |= {"latent": cache.latent_dim, "rope": cache.rope_dim}
        elif isinstance(cache, Index):
            row |= {"index_dim": cache.index_dim}
        elif isinstance(cache, State):
            row |= {"conv_elems": cache.conv_elements, "recurrent_elems": cache.recurrent_elements}
            row |= {"conv_bytes": cache.conv_bytes, "recurrent_bytes": cache.recurrent_bytes}
        rows.append(row)
    return rows


def sorted_rows(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps({key: value for key, value in row.items() if key != "note"}, sort_keys=True) for row in rows)


def test_every_layer_group_of_the_reference(shared: Path) -> None:
    reference = json.loads((shared / "kv-layer-reference.json").read_text())
    assert len(reference) >= 53
    for name, want in reference.items():
        shape = shape_of(shared, name)
        assert sorted_rows(as_reference(shape)) == sorted_rows(want["layer_groups"]), name


def test_every_byte_figure_of_the_reference(shared: Path) -> None:
    reference = json.loads((shared / "kv-layer-reference.json").read_text())
    for name, want in reference.items():
        if want["growing_bytes_per_token_bf16_tp1"] is None:
            continue
        shape = shape_of(shared, name)
        sized = footprint(shape, KVFormat("bf16"))
        windows = [{"bytes_per_token": g.windowed_per_token, "window": g.window_tokens} for g in sized.groups if g.window_tokens]
        assert sized.growing_per_token == want["growing_bytes_per_token_bf16_tp1"], name
        assert sized.constant_per_sequence == want["state_bytes_per_sequence_tp1"], name
        assert windows == want["windowed_bytes_per_token_bf16_tp1"], name
        for key, layout in (("growing_bytes_per_token_fp8_656", "fp8_ds_mla"), ("growing_bytes_per_token_fp8_raw576", "fp8_raw")):
            if want[key] is not None:
                assert footprint(shape, KVFormat(layout)).growing_per_token == want[key], (name, layout)


def golden_plan(shared: Path, row: dict[str, Any]) -> Any:
    settings = Settings(
        kv_format=KVFormat(row["kv_dtype"]),
        parallel=Parallel(tp=row["tp"]),
        context_tokens=row["max_model_len"],
        kv_bytes=row["kv_cache_bytes_per_gpu"],
        max_batched_tokens=row["max_num_batched_tokens"],
        in_flight_batches=row["in_flight_batches"],
        prefix_caching=row["prefix_caching"],
        layout=row["layout"],
    )
    return vllm.plan(shape_of(shared, row["config"]), settings)


def test_every_row_of_the_planner_goldens(shared: Path) -> None:
    rows = [json.loads(line) for line in (shared / "vllm-planner-goldens.jsonl").read_text().splitlines()]
    assert len(rows) >= 168
    for row in rows:
        plan = golden_plan(shared, row)
        got = {
            "attention_block_size": plan.groups[0].block_tokens,
            "kv_groups": len(plan.groups),
            "bytes_per_block": plan.bytes_per_block,
            "num_blocks": plan.pool.blocks,
            "blocks_per_max_len_request": plan.blocks_per_request,
            "max_concurrency": round(plan.pool.concurrency, 4),
            "reported_tokens": plan.pool.tokens,
            "starts": plan.starts,
        }
        assert got == {key: row[key] for key in got}, (row["config"], row["tp"], row["kv_dtype"])
        groups = sorted((g.kind, g.layers, g.block_tokens, g.blocks_per_request) for g in plan.groups)
        assert groups == sorted((g["kind"], g["layers"], g["block_size"], g["blocks_per_request"]) for g in row["groups"])


@pytest.mark.parametrize(
    ("name", "kib_per_token"),
    [("Qwen__Qwen2.5-7B", 56), ("mistralai__Mistral-7B-Instruct-v0.3", 128), ("Qwen__Qwen3-8B", 144), ("Qwen__Qwen2.5-72B", 320)],
)
def test_the_seeds_bytes_per_token(shared: Path, name: str, kib_per_token: int) -> None:
    assert footprint(shape_of(shared, name), KVFormat("bf16")).growing_per_token == kib_per_token * 1024


def test_the_seeds_gib(shared: Path) -> None:
    small = answer(shape_of(shared, "Qwen__Qwen2.5-7B"), Ask(context_tokens=32768))
    large = answer(shape_of(shared, "Qwen__Qwen2.5-72B"), Ask(context_tokens=32768, users=8))
    assert small.sequence_bytes == int(1.75 * 2**30)
    assert large.sequence_bytes == 10 * 2**30
    assert large.all_users_bytes == 80 * 2**30


def test_compressed_attention_reserves_far_more_than_it_grows(shared: Path) -> None:
    shape = shape_of(shared, "deepseek-ai__DeepSeek-V4-Flash")
    plan = vllm.plan(shape, Settings(kv_format=KVFormat("fp8"), context_tokens=1048576))
    assert (plan.bytes_per_block, plan.blocks_per_request) == (1_002_240, 10_778)
    old = Settings(kv_format=KVFormat("fp8"), context_tokens=30000, version=(0, 22, 0), kv_bytes=int(5.44 * 2**30))
    refused = vllm.plan(shape, old)
    assert (refused.bytes_per_block, refused.blocks_per_request, refused.starts) == (1_051_776, 6_800, False)


def test_block_outermost_layout_pads_latent_rows(shared: Path) -> None:
    plan = vllm.plan(shape_of(shared, "zai-org__GLM-5.3"), Settings(kv_format=KVFormat("fp8"), layout="BLHNC"))
    assert plan.bytes_per_block == 3_484_672
