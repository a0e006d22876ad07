"""The longest request a model takes, windows that never close within it, and older names of the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from kvseal.core.errors import ModelCorrupt
from kvseal.plan import KVFormat, footprint, read_shape

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


def figures(config: dict[str, Any]) -> tuple[int, int, int]:
    one = footprint(read_shape(config, "test"), KVFormat("bf16"))
    return one.growing_per_token, one.windowed_per_token, one.constant_per_sequence


def test_old_names_of_hidden_size_and_architectures_that_are_their_model_type() -> None:
    bloom = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 30, "num_attention_heads": 32, "n_embed": 4096}
    assert figures(bloom) == (2 * 30 * 4096 * 2, 0, 0)
    moe = {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "num_hidden_layers": 28, "num_attention_heads": 16}
    assert figures(moe | {"num_key_value_heads": 16, "hidden_size": 2048}) == (2 * 28 * 2048 * 2, 0, 0)
    grok = {"architectures": ["Grok1ModelForCausalLM"], "model_type": "grok-1", "num_hidden_layers": 64, "num_attention_heads": 48}
    assert figures(grok | {"num_key_value_heads": 8, "hidden_size": 6144}) == (2 * 64 * 8 * 128 * 2, 0, 0)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}, 32768),
        ({"type": "linear", "factor": 4}, 131072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"type": "yarn", "factor": "4"}, 32768),
        ({"type": "yarn", "factor": float("nan")}, 32768),
    ],
)
def test_rope_scaling_stretches_the_limit(rope: dict[str, Any] | None, limit: int) -> None:
    assert read_shape(BASE | {"max_position_embeddings": 32768, "rope_scaling": rope}, "test").max_context_tokens == limit


def test_a_window_as_long_as_the_limit_grows() -> None:
    phi = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_hidden_layers": 32, "num_attention_heads": 32}
    phi |= {"num_key_value_heads": 32, "hidden_size": 3072, "sliding_window": 262144, "max_position_embeddings": 131072}
    assert figures(phi) == (2 * 32 * 32 * 96 * 2, 0, 0)
    assert figures(phi | {"sliding_window": 131071}) == (0, 2 * 32 * 32 * 96 * 2, 0)


@pytest.mark.parametrize("key", ["intermediate_size", "num_local_experts", "q_lora_rank", "n_routed_experts", "num_key_value_heads"])
def test_no_size_is_negative_whether_it_is_used_or_not(key: str) -> None:
    with pytest.raises(ModelCorrupt, match=key):
        read_shape(BASE | {key: -8}, "test")
    assert figures(BASE | {"sliding_window_size": -1, "pad_token_id": -1}) == figures(BASE)
