"""Engines against published logs: tokens from GiB, GiB from tokens, memory identities, intervals, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvseal.core.errors import ConfigError
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.plan import KVFormat, Parallel, Settings, parse_format, read_shape
from kvseal.plan.dtype import FormatMissing
from kvseal.plan.engines import kvseal, llamacpp, sglang, vllm
from kvseal.plan.engines.base import parse_version
from kvseal.plan.shape import ModelShape

GIB = 2**30


def load(shared: Path, name: str) -> ModelShape:
    return read_shape(json.loads((shared / "model-configs" / f"{name}.json").read_text()), name)


def settings(**given: Any) -> Settings:
    version = given.pop("version", "0.33.0")
    return Settings(**({"kv_format": KVFormat("bf16"), "version": parse_version(version), "version_text": version} | given))


GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size": 5376,
        "sliding_window": 1024,
    },
}
QWEN_14B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 13824,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("name", "given", "gib", "tokens"),
    [
        ("MiniMaxAI__MiniMax-M2.5", {"version": "0.15"}, 12.57, 53136),
        ("meta-llama__Meta-Llama-3.1-8B", {"version": "0.6.4", "context_tokens": 20000}, 3.81, 31232),
        ("meta-llama__Meta-Llama-3.1-8B", {"version": "0.6.4", "context_tokens": 29000}, 2.89, 23648),
        (
            "Qwen__Qwen3.5-27B",
            {"version": "0.26", "context_tokens": 131072, "kv_format": KVFormat("fp8"), "parallel": Parallel(tp=2)},
            4.99,
            302921,
        ),
    ],
)
def test_vllm_tokens_from_logged_gib(shared: Path, name: str, given: dict[str, Any], gib: float, tokens: int) -> None:
    plan = vllm.plan(load(shared, name), settings(kv_bytes=int(gib * GIB), **given))
    assert plan.pool is not None
    assert plan.pool.tokens == pytest.approx(tokens, rel=0.005)


def test_vllm_reporting_rule_of_0_20_and_before() -> None:
    shape = read_shape(GEMMA4_31B, "gemma-4-31B")
    given = {"kv_bytes": int(24.54 * GIB), "context_tokens": 131072, "max_batched_tokens": 2048}
    old, new = (vllm.plan(shape, settings(version=version, **given)) for version in ("0.20", "0.33"))
    assert old.pool is not None and new.pool is not None
    assert (old.pool.tokens, new.pool.tokens) == (26800, 231083)


def test_draft_layers_and_state_slots_of_speculation(shared: Path) -> None:
    """Published: NVFP4 cache, two draft tokens, 264,640 tokens at 1.01x of 262,144."""
    given = settings(version="0.27.1", kv_format=KVFormat("nvfp4"), context_tokens=262144, speculative_tokens=2, drafts=True)
    plan = vllm.plan(load(shared, "Qwen__Qwen3.5-27B"), given)
    pool = vllm.plan(load(shared, "Qwen__Qwen3.5-27B"), replace(given, kv_bytes=106 * plan.bytes_per_block)).pool
    assert pool is not None
    assert (plan.blocks_per_request, pool.tokens) == (105, 264640)


@pytest.mark.parametrize(
    ("util", "weights", "activation", "other", "kv"),
    [(0.90, 13.47, 7.38, 0.13, 50.28), (0.95, 64.38, 7.38, 0.13, 3.33), (0.90, 33.88, 4.84, 0.55, 32.00), (0.90, 1.12, 5.56, 0.13, 64.45)],
)
def test_memory_identity_of_vllm_0_11(util: float, weights: float, activation: float, other: float, kv: float) -> None:
    shape = read_shape(QWEN_14B, "any")
    budget = vllm.plan(
        shape,
        settings(
            version="0.11.0", gpu="H100-80G", memory_fraction=util, weights_bytes=int(weights * GIB),
            activation_bytes=int(activation * GIB), non_torch_bytes=int(other * GIB), context_tokens=16000,
        ),
    ).budget  # fmt: skip
    assert budget is not None
    assert budget.kv / GIB == pytest.approx(kv, abs=0.015)
    assert budget.kv_low <= kv * GIB <= budget.kv_high


@pytest.mark.parametrize(
    ("name", "given", "logged_gib"),
    [
        ("meta-llama__Meta-Llama-3.1-8B", {"version": "0.6.4", "gpu": "RTX3090", "context_tokens": 20000, "memory_fraction": 0.9}, 3.81),
        ("meta-llama__Meta-Llama-3.1-8B", {"version": "0.6.4", "gpu": "RTX3090", "context_tokens": 29000, "memory_fraction": 0.9}, 2.89),
        ("openai__gpt-oss-120b", {"version": "0.11", "gpu": "H100", "memory_fraction": 0.95, "max_batched_tokens": 1024}, 1.71),
        ("openai__gpt-oss-20b", {"version": "0.11", "gpu": "H100", "memory_fraction": 0.9}, 50.28),
        ("Qwen__Qwen3-32B", {"version": "0.11", "gpu": "H100", "memory_fraction": 0.9}, 4.45),
        ("Qwen__Qwen3-32B", {"version": "0.11", "gpu": "H100", "memory_fraction": 0.9, "parallel": Parallel(tp=2)}, 34.49),
    ],
)
def test_the_interval_holds_the_log_when_inputs_are_unknown(shared: Path, name: str, given: dict[str, Any], logged_gib: float) -> None:
    budget = vllm.plan(load(shared, name), settings(**given)).budget
    assert budget is not None
    assert budget.kv_low <= logged_gib * GIB <= budget.kv_high


KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
}


def test_a_log_that_nothing_was_tuned_on() -> None:
    """vllm#28228, TP 2, November 2025: 2.30 GiB, 1 padding layer, 75,840 tokens, 2.48x of 120,000."""
    given = settings(version="0.11.1", parallel=Parallel(tp=2), context_tokens=120000, kv_bytes=int(2.295 * GIB))
    plan = vllm.plan(read_shape(KIMI_LINEAR, "kimi-linear"), given)
    assert plan.pool is not None
    assert (plan.groups[0].block_tokens, plan.pool.tokens, round(plan.pool.concurrency, 2)) == (960, 75840, 2.48)
    assert any("1 padding layers" in note for note in plan.notes)


def test_a_second_one_with_draft_layers(shared: Path) -> None:
    """vllm#49011: NVFP4 cache, draft layers, 3 padding layers, 1,823,372 tokens, 1.74x of 1,048,576."""
    given = settings(version="0.25", kv_format=KVFormat("nvfp4"), context_tokens=1048576, speculative_tokens=2, drafts=True)
    plan = vllm.plan(load(shared, "Qwen__Qwen3.5-27B"), given)
    pool = vllm.plan(load(shared, "Qwen__Qwen3.5-27B"), replace(given, kv_bytes=666 * plan.bytes_per_block)).pool
    assert pool is not None
    assert (pool.tokens, round(pool.concurrency, 2)) == (1823372, 1.74)
    assert any("3 padding layers" in note for note in plan.notes)


QWEN_35B_A3B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
    },
}


@pytest.mark.parametrize(("gib", "tokens", "concurrency"), [(5.98, 567978, 4.33), (6.01, 569878, 4.35)])
def test_two_more_hybrids(gib: float, tokens: int, concurrency: float) -> None:
    """club-3090#612 and #652: Qwen3.6-35B-A3B, vLLM 0.24.0, fp8 cache, 131,072 tokens."""
    given = settings(version="0.24.0", kv_format=KVFormat("fp8"), context_tokens=131072, kv_bytes=int(gib * GIB))
    pool = vllm.plan(read_shape(QWEN_35B_A3B, "qwen-35b-a3b"), given).pool
    assert pool is not None
    assert (pool.tokens, round(pool.concurrency, 2)) == (tokens, concurrency)


def test_an_old_hybrid_with_one_state_per_request(shared: Path) -> None:
    """vllm#40691: Qwen3.5-27B, vLLM 0.19.0, 290,864 tokens although 33.04 requests of 32,768 fit."""
    given = settings(version="0.19.0", context_tokens=32768)
    plan = vllm.plan(load(shared, "Qwen__Qwen3.5-27B"), given)
    pool = vllm.plan(load(shared, "Qwen__Qwen3.5-27B"), replace(given, kv_bytes=1487 * plan.bytes_per_block)).pool
    assert pool is not None
    assert (pool.tokens, round(pool.concurrency, 2)) == (290864, 33.04)


def test_two_batches_in_flight_cost_a_window_more_than_it_holds(shared: Path) -> None:
    shape = load(shared, "openai__gpt-oss-20b")
    two = vllm.plan(shape, settings(context_tokens=131072, max_batched_tokens=8192, in_flight_batches=2))
    one = vllm.plan(shape, settings(context_tokens=131072, max_batched_tokens=8192, in_flight_batches=1))
    assert two.blocks_per_request - one.blocks_per_request == 8192 // 16


def test_hybrid_manager_off_pays_the_full_length(shared: Path) -> None:
    plan = vllm.plan(load(shared, "openai__gpt-oss-20b"), settings(context_tokens=131072, hybrid_manager=False))
    assert (len(plan.groups), plan.request_bytes) == (1, 131072 * 24 * 8 * 128 * 2)


def test_pipeline_stages_are_not_charged_for_all_layers(shared: Path) -> None:
    shape = load(shared, "Qwen__Qwen3-8B")
    assert vllm.plan(shape, settings(parallel=Parallel(pp=2))).bytes_per_block * 2 == vllm.plan(shape, settings()).bytes_per_block


def test_groups_span_the_stages_and_memory_is_paid_per_stage(shared: Path) -> None:
    shape = load(shared, "Qwen__Qwen3.5-27B")
    one, two = (vllm.plan(shape, settings(parallel=Parallel(pp=pp), context_tokens=131072)) for pp in (1, 2))
    assert (one.blocks_per_request, two.blocks_per_request) == (174, 174)
    assert one.bytes_per_block == 2 * two.bytes_per_block == 16 * 784 * 4096


def test_decode_context_parallel_shards_positions(shared: Path) -> None:
    shape = load(shared, "deepseek-ai__DeepSeek-V3")
    plan = vllm.plan(shape, settings(context_tokens=131072, parallel=Parallel(tp=8, dcp=8)))
    assert plan.blocks_per_request == 131072 // 8 // 64
    with pytest.raises(ConfigError, match="tp / KV heads"):
        vllm.plan(load(shared, "Qwen__Qwen3-8B"), settings(parallel=Parallel(tp=8, dcp=2)))
    wide = vllm.plan(load(shared, "Qwen__Qwen3-30B-A3B"), settings(context_tokens=32768, parallel=Parallel(tp=8, dcp=2)))
    assert wide.blocks_per_request == 1024
    rows = {"parallel": Parallel(tp=8, dcp=8), "kv_bytes": 8 * GIB, "engine": "sglang"}
    pool = sglang.plan(shape, settings(version="0.5.23", **rows)).pool
    assert pool is not None and pool.tokens == 8 * (8 * GIB // 70272)


def test_largest_context_is_the_largest(shared: Path) -> None:
    shape, given = load(shared, "Qwen__Qwen3.5-27B"), settings(kv_bytes=10 * GIB)
    plan = vllm.plan(shape, given)
    assert plan.pool is not None
    longest = plan.pool.largest_context_tokens
    assert vllm.plan(shape, replace(given, context_tokens=longest)).starts is True
    assert vllm.plan(shape, replace(given, context_tokens=longest + 1)).starts is False


def test_sglang_raw_rows_and_unelided_indexer(shared: Path) -> None:
    given = settings(engine="sglang", version="0.5.1x", kv_format=KVFormat("fp8_raw"), parallel=Parallel(tp=8), kv_bytes=int(23.91 * GIB))
    plan = sglang.plan(load(shared, "zai-org__GLM-5.2"), given)
    assert plan.pool is not None and plan.pool.tokens == pytest.approx(464768, rel=0.001)


def test_sglang_plain_pool_with_its_spare_page(shared: Path) -> None:
    """vllm#21348: 367,404 tokens are K 8.23 and V 8.23."""
    given = settings(engine="sglang", version="0.4.9", parallel=Parallel(tp=4), pool_tokens=367404)
    plan = sglang.plan(load(shared, "Qwen__Qwen3-235B-A22B-FP8"), given)
    assert plan.log_line == "KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB"


def test_sglang_sliding_sub_pool(shared: Path) -> None:
    given = settings(engine="sglang", version="0.5.8", parallel=Parallel(tp=4), pool_tokens=375360, block_tokens=64)
    pool = sglang.plan(load(shared, "XiaomiMiMo__MiMo-V2-Flash"), given).pool
    assert pool is not None
    name, tokens, size = pool.sub_pools[1]
    assert (name, tokens) == ("sliding", 300288)
    assert size / GIB == pytest.approx(13.97, abs=0.01)


def test_sglang_starts_although_the_context_does_not_fit(shared: Path) -> None:
    given = settings(engine="sglang", version="0.4.3", pool_tokens=59868, context_tokens=163840)
    plan = sglang.plan(load(shared, "deepseek-ai__DeepSeek-V3"), given)
    assert plan.starts is True
    assert "59,862" in plan.outcome and "DANGEROUS" in plan.outcome


def test_sglang_state_slots_come_first(shared: Path) -> None:
    plan = sglang.plan(load(shared, "Qwen__Qwen3-Next-80B-A3B-Thinking"), settings(engine="sglang", version="0.5.23", kv_bytes=40 * GIB))
    assert plan.pool is not None
    slots = {name: (count, size) for name, count, size in plan.pool.sub_pools}["state slots"]
    state = 36 * (24576 * 2 + 524288 * 4)
    assert slots[0] == (int(40 * GIB * 0.9 / 1.9) - state) // state
    assert plan.pool.tokens == (40 * GIB - slots[1]) // 24576


FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}


def test_llamacpp_buffers_of_a_hybrid() -> None:
    plan = llamacpp.plan(read_shape(FALCON_H1, "falcon-h1"), settings(engine="llama.cpp", context_tokens=32768))
    assert "size = 768.00 MiB (32768 cells, 1 seqs)" in plan.log_line
    assert "size = 72.98 MiB, R (f32): 0.98 MiB, S (f32): 72.00 MiB" in plan.log_line


def test_llamacpp_pads_and_splits_by_sequence(shared: Path) -> None:
    shape = load(shared, "Qwen__Qwen2.5-7B")
    assert llamacpp.plan(shape, settings(engine="llama.cpp", context_tokens=2048)).request_bytes == 112 * 2**20
    assert llamacpp.plan(shape, settings(engine="llama.cpp", context_tokens=2049)).request_bytes == 57344 * 2304
    four = llamacpp.plan(shape, settings(engine="llama.cpp", context_tokens=8192, users=4))
    assert "-c 32768 -np 4" in four.notes[0]
    with pytest.raises(ConfigError, match="q8_0"):
        llamacpp.plan(shape, settings(engine="llama.cpp", kv_format=KVFormat("fp8")))


@pytest.mark.parametrize("page_tokens", [8, 16, 32, 64])
@pytest.mark.parametrize(("kv", "name"), [(KVDtype.FP16, "fp16"), (KVDtype.INT8, "int8"), (KVDtype.INT4, "int4"), (KVDtype.FP32, "fp32")])
def test_our_own_pages_equal_the_geometry(page_tokens: int, kv: KVDtype, name: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 5,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    geometry = KVGeometry(layers=5, kv_heads=3, head_dim=64, kv_dtype=kv, page_tokens=page_tokens)
    plan = kvseal.plan(read_shape(config, "ours"), settings(engine="kvseal", kv_format=parse_format(name), block_tokens=page_tokens))
    assert plan.bytes_per_block == geometry.page_bytes


def test_we_never_promise_more_than_the_pool(shared: Path) -> None:
    plan = kvseal.plan(load(shared, "Qwen__Qwen3-8B"), settings(engine="kvseal", kv_bytes=GIB, context_tokens=40960))
    assert plan.pool is not None
    assert plan.starts is False and f"{plan.pool.largest_context_tokens:,}" in plan.outcome
    with pytest.raises(ConfigError, match="one kind"):
        kvseal.plan(load(shared, "openai__gpt-oss-20b"), settings(engine="kvseal"))


FORMAT_BYTES = {
    "bf16": 512,
    "fp8": 256,
    "fp8_per_token_head": 264,
    "int8": 264,
    "int4": 136,
    "nvfp4": 144,
    "turboquant_k8v4": 196,
    "turboquant_4bit_nc": 134,
    "ultraquant_4bit": 136,
    "mxfp8": 264,
    "q8_0": 272,
    "q4_0": 144,
}


@pytest.mark.parametrize("name", FORMAT_BYTES)
def test_bytes_of_one_head_of_128(name: str) -> None:
    assert parse_format(name).head_bytes(128, 128) == FORMAT_BYTES[name]


def test_latent_rows() -> None:
    rows = {name: KVFormat(name).latent_bytes(512, 64) for name in ("bf16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla", "int8_per_token_head")}
    assert rows == {"bf16": 1152, "fp8": 576, "fp8_ds_mla": 656, "nvfp4_ds_mla": 352, "int8_per_token_head": None}
    assert KVFormat("fp8_ds_mla").latent_bytes(256, 32) is None
    with pytest.raises(FormatMissing):
        KVFormat("fp8_ds_mla").head_bytes(128, 128)


@pytest.mark.parametrize("name", ["kvarn", "kvarn_4bit", "octave_k3v4", "float3", ""])
def test_formats_that_nobody_ships_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_format(name)


@pytest.mark.parametrize(
    ("text", "version"), [("v0.11.0", (0, 11, 0)), ("~0.27 (Aug)", (0, 27, 0)), ("0.5.1x", (0, 5, 15)), ("b4567", (4567, 0, 0))]
)
def test_versions(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version
