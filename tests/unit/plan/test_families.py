"""Families without a published file at hand: numbers from class defaults and public threads, and every trap of key names."""

from __future__ import annotations

from typing import Any

import pytest

from kvseal.core.errors import KVSealError, ModelCorrupt, ModelUnsupported
from kvseal.plan import Footprint, Kind, KVFormat, Parallel, footprint, read_shape
from kvseal.plan.shape import Attention, State

BF16 = KVFormat("bf16")


def sized(config: dict[str, Any], tp: int = 1, kv: str = "bf16") -> Footprint:
    return footprint(read_shape(config, "test"), KVFormat(kv), Parallel(tp=tp))


def figures(config: dict[str, Any]) -> tuple[int, int, int]:
    one = sized(config)
    return one.growing_per_token, one.windowed_per_token, one.constant_per_sequence


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
KNOWN: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "Mistral-7B-v0.1, window on all layers": (
        {
            "architectures": ["MistralForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        (0, 131072, 0),
    ),
    "Mistral, window null": (
        {
            "architectures": ["MistralForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
        },
        (131072, 0, 0),
    ),
    "Gemma-3-4b: head counts, window and layer list absent or nested": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
        },
        (5 * 4 * 512 * 2, 29 * 4 * 512 * 2, 0),
    ),
    "Gemma-3n-E4B: the last 15 of 35 layers share": (
        {"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"},
        (4 * 2 * 512 * 2, 16 * 2 * 512 * 2, 0),
    ),
    "Jamba": ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, (4 * 8 * 256 * 2, 0, 28 * (3 + 16) * 8192 * 2)),
    "Falcon-H1-1.5B: attention and state in each layer": (
        {
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
        },
        (24576, 0, 24 * (3 * 3584 * 2 + 48 * 64 * 256 * 2)),
    ),
    "Zamba2-7B: head size 2 x hidden / heads": (
        {
            "architectures": ["Zamba2ForCausalLM"],
            "num_hidden_layers": 4,
            "hidden_size": 3584,
            "num_attention_heads": 32,
            "mamba_d_state": 64,
            "mamba_ngroups": 2,
            "n_mamba_heads": 112,
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
        },
        (32 * 448 * 2, 0, 4 * (3 * (7168 + 2 * 2 * 64) * 2 + 7168 * 64 * 2)),
    ),
    "Command-R": (
        {
            "architectures": ["CohereForCausalLM"],
            "num_hidden_layers": 40,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
        },
        (1310720, 0, 0),
    ),
    "Cohere2: three local, one global": (
        {
            "architectures": ["Cohere2ForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window_pattern": 4,
        },
        (8 * 8 * 256 * 2, 24 * 8 * 256 * 2, 0),
    ),
    "Phi-3-mini-4k": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 3072,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "sliding_window": 2047,
        },
        (0, 393216, 0),
    ),
    "SmolLM2-135M": (
        LLAMA | {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
        (23040, 0, 0),
    ),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "num_hidden_layers": 36,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        (73728, 0, 0),
    ),
    "MiniMax-Text-01: attn_type_list, 1 is softmax": (
        {
            "architectures": ["MiniMaxText01ForCausalLM"],
            "num_hidden_layers": 80,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attn_type_list": ([0] * 7 + [1]) * 10,
        },
        (10 * 8 * 256 * 2, 0, 70 * 64 * 128 * 128 * 2),
    ),
    "mamba-130m: no bytes per token": (
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "num_hidden_layers": 24,
            "hidden_size": 768,
            "intermediate_size": 1536,
            "state_size": 16,
        },
        (0, 0, 24 * (3 + 16) * 1536 * 2),
    ),
    "Kimi-Linear: lists count from 1": (
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "linear_attn_config": {
                "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        },
        (1152, 0, 3 * (3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4)),
    ),
    "ChatGLM: multi_query_group_num and kv_channels": (
        {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 128,
        },
        (28 * 2 * 256 * 2, 0, 0),
    ),
    "StarCoder: multi_query": (
        {"architectures": ["GPTBigCodeForCausalLM"], "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True},
        (40 * 256 * 2, 0, 0),
    ),
    "per-layer KV heads": (
        {
            "architectures": ["OpenELMForCausalLM"],
            "num_transformer_layers": 3,
            "model_dim": 1280,
            "head_dim": 64,
            "num_query_heads": [12, 12, 16],
            "num_kv_heads": [3, 3, 4],
        },
        (10 * 128 * 2, 0, 0),
    ),
    "Llama-4: chunk size null means full everywhere": (
        {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": None},
        (48 * 8 * 256 * 2, 0, 0),
    ),
    "Llama-4: no_rope_layers": (
        {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
        (8 * 256 * 2, 3 * 8 * 256 * 2, 0),
    ),
    "LongCat: two latent caches per layer": (
        {"architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash"},
        (56 * 1152, 0, 0),
    ),
    "T5: decoder grows, encoder tokens do not": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
        (6 * 8 * 128 * 2, 0, 0),
    ),
    "DBRX: nested attn_config": (
        {
            "architectures": ["DbrxForCausalLM"],
            "model_type": "dbrx",
            "n_layers": 40,
            "n_heads": 48,
            "d_model": 6144,
            "attn_config": {"kv_n_heads": 8},
        },
        (40 * 8 * 256 * 2, 0, 0),
    ),
    "RecurrentGemma": (
        {"architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma", "num_key_value_heads": 1},
        (0, 8 * 512 * 2, 18 * (3 * 2560 * 2 + 2560 * 4)),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_figures(name: str) -> None:
    config, want = KNOWN[name]
    assert figures(config) == want


BASE = LLAMA | {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
SLIDES = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
}


@pytest.mark.parametrize(
    ("extra", "sliding"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, 2),
        ({"layer_types": ["local_attention"] * 3 + ["global_attention", "full_attention"]}, 3),
        ({"sliding_window_pattern": 2}, 2),
        ({"sliding_window_pattern": "LLLG"}, 3),
        ({"sliding_window_pattern": [True, False]}, 2),
        ({"hybrid_layer_pattern": [0, 1, 1, 1]}, 3),
        ({"global_attn_every_n_layers": 4}, 3),
        ({"sliding_window": [512, None, 512, 0], "layer_types": ["sliding_attention"] * 4}, 2),
        ({"sliding_window": [512, None], "layer_types": ["sliding_attention"] * 4}, 2),
        ({"sliding_window": None, "layer_types": None, "head_dim": 256, "sliding_window_pattern": None}, 0),
    ],
)
def test_every_way_to_say_window(extra: dict[str, Any], sliding: int) -> None:
    shape = read_shape(SLIDES | extra, "test")
    kinds = [cache.kind for layer in shape.layers for cache in layer]
    assert (len(kinds), kinds.count(Kind.SLIDING)) == (4, sliding)


def test_sliding_layers_with_their_own_heads() -> None:
    step = SLIDES | {"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_attention_heads": 8, "num_attention_groups": 2}
    del step["num_key_value_heads"]
    step |= {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "attention_other_setting": {"num_attention_groups": 4, "head_dim": 128},
    }
    assert figures(step) == (2 * 2 * 512 * 2, 2 * 4 * 256 * 2, 0)


def test_a_window_that_never_closes_is_pointed_out() -> None:
    phi = {
        "architectures": ["Phi3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "sliding_window": 9999,
    }
    assert any("never closes" in note for note in read_shape(phi | {"max_position_embeddings": 4096}, "test").notes)
    assert not read_shape(phi | {"max_position_embeddings": 40960}, "test").notes


def test_key_order_does_not_matter() -> None:
    assert figures(dict(reversed(list(BASE.items())))) == figures(BASE)


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_nested_text_part(key: str) -> None:
    nested = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", key: BASE}
    assert figures(nested) == figures(BASE)


def test_thinker_holds_the_text_part() -> None:
    omni = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": {"text_config": BASE}}
    assert figures(omni) == figures(BASE)


def test_null_kv_heads_are_refused_except_where_published_files_write_them() -> None:
    phi = BASE | {"architectures": ["PhiForCausalLM"], "model_type": "phi", "num_key_value_heads": None}
    assert figures(phi)[0] == 4 * 8 * 128 * 2
    for kind, name in (("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("mistral", "MistralForCausalLM")):
        with pytest.raises(ModelCorrupt, match="num_key_value_heads is null"):
            figures(BASE | {"architectures": [name], "model_type": kind, "num_key_value_heads": None})


def test_absent_kv_heads_mean_the_class_default_and_are_listed() -> None:
    config = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    mistral = config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    shape = read_shape(mistral, "test")
    assert "num_key_value_heads = 8" in shape.defaults
    assert isinstance(shape.layers[0][0], Attention) and shape.layers[0][0].kv_heads == 8


def test_head_dim_in_mla_files_is_a_decoy() -> None:
    mla = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    assert figures(mla | {"head_dim": 192}) == figures(mla | {"head_dim": None}) == figures(mla) == (2304, 0, 0)


def test_latent_attention_is_never_divided() -> None:
    mla = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    assert sized(mla, tp=8).growing_per_token == sized(mla).growing_per_token


def test_kv_heads_are_copied_beyond_their_number() -> None:
    assert sized(BASE, tp=2).growing_per_token == sized(BASE, tp=4).growing_per_token == sized(BASE).growing_per_token // 2


@pytest.mark.parametrize("tp", [3, 5, 6, 16])
def test_impossible_splits_are_refused(tp: int) -> None:
    with pytest.raises(KVSealError, match="divide"):
        sized(BASE, tp=tp)


def test_ten_kv_heads_over_four_ranks_are_refused() -> None:
    with pytest.raises(KVSealError, match="10 KV heads"):
        sized(BASE | {"num_attention_heads": 40, "hidden_size": 5120, "num_key_value_heads": 10}, tp=4)


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"architectures": ["NovelForCausalLM"]}, ModelUnsupported),
        ({"kv_lora_rank": 512}, ModelUnsupported),
        ({"linear_attn_config": {"num_heads": 4}}, ModelUnsupported),
        ({"num_attention_heads": None}, ModelCorrupt),
        ({"num_key_value_heads": 3}, ModelCorrupt),
        ({"num_key_value_heads": [2, 2]}, ModelCorrupt),
        ({"layer_types": ["full_attention"]}, ModelCorrupt),
        ({"layer_types": ["full_attention", "telepathy", "full_attention", "full_attention"]}, ModelUnsupported),
        ({"head_dim": -64}, ModelCorrupt),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, ModelCorrupt),
    ],
)
def test_refusals_name_what_is_wrong(extra: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        read_shape(BASE | extra, "test")
    assert len(str(caught.value)) > 20


def test_unknown_architecture_only_on_request() -> None:
    novel = BASE | {"architectures": ["NovelForCausalLM"], "model_type": "novel"}
    with pytest.raises(ModelUnsupported, match=r"NovelForCausalLM.*--assume-gqa"):
        read_shape(novel, "test")
    shape = read_shape(novel, "test", assume_gqa=True)
    assert footprint(shape, BF16).growing_per_token == figures(BASE)[0]
    assert any("you said so" in note for note in shape.notes)


def test_fp8_weights_do_not_make_the_cache_fp8() -> None:
    assert read_shape(BASE | {"quantization_config": {"quant_method": "fp8"}}, "test").kv_dtype_hint is None
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert read_shape(BASE | {"quantization_config": {"quant_method": "compressed-tensors"} | scheme}, "test").kv_dtype_hint == "fp8"


def test_speculation_widens_the_convolution_and_groups_are_copied() -> None:
    from kvseal.plan.families.states import elements_at

    state = State(kind=Kind.MAMBA2, conv_columns=3, conv_channels=4096, groups=1, group_channels=256, heads=64, recurrent_per_head=8192)
    assert elements_at(state, 1) == (3 * 4352, 64 * 8192)
    assert elements_at(state, 1, 2) == (5 * 4352, 64 * 8192)
    assert elements_at(state, 4) == (3 * (4096 + 4 * 256) // 4, 16 * 8192)
