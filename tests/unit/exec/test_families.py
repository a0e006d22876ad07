"""What configurations mean, key by key, and that what is not understood is refused by name.

Whether it is computed right is for tests/golden.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden.small_models import cases

from kvseal.core.errors import ModelCorrupt, ModelError, ModelUnsupported
from kvseal.exec.families.fields import Fields
from kvseal.exec.families.huggingface import spec_from_config
from kvseal.exec.loader import spec_of_config
from kvseal.exec.spec import ModelSpec

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def spec(**changes: object) -> ModelSpec:
    config = LLAMA | changes
    return spec_of_config({key: value for key, value in config.items() if value != "absent"})


def of(architecture: str, **changes: object) -> ModelSpec:
    return spec(**{"architectures": [architecture], "num_key_value_heads": 4} | changes)


def test_class_defaults() -> None:
    found = spec()
    assert (found.kv_heads, found.head_dim, found.norm_eps, found.tied_embeddings) == (8, 8, 1e-6, False)
    assert (found.rope.inverse_frequencies[0], found.rope.rotary_dims, found.context_tokens) == (1.0, 8, 512)
    assert found.rope.inverse_frequencies[1] == pytest.approx(10_000 ** (-2 / 8))
    assert of("MistralForCausalLM", num_key_value_heads="absent").kv_heads == 8
    assert of("Qwen3ForCausalLM").head_dim == 128
    assert of("SmolLM3ForCausalLM").tied_embeddings
    assert of("SmolLM3ForCausalLM").rope.inverse_frequencies[1] == pytest.approx(2_000_000 ** (-2 / 8))
    assert of("Phi3ForCausalLM").norm_eps == 1e-5


def test_the_model_type_stands_in_for_architectures() -> None:
    assert spec(architectures="absent", model_type="qwen2", num_key_value_heads=4).family == "qwen2"
    with pytest.raises(ModelUnsupported, match="model_type is 'gpt2'"):
        spec(architectures="absent", model_type="gpt2")
    with pytest.raises(ModelCorrupt, match="architectures is missing"):
        spec(architectures="absent")


def test_biases() -> None:
    def biases(found: ModelSpec) -> tuple[bool, bool, bool]:
        return found.q_k_v_bias, found.o_bias, found.mlp_bias

    assert biases(spec(attention_bias=True)) == (True, True, False)
    assert biases(spec(mlp_bias=True)) == (False, False, True)
    assert biases(of("Qwen2ForCausalLM")) == (True, False, False)
    assert biases(of("MistralForCausalLM", attention_bias=True)) == (False, False, False)
    assert biases(of("Qwen3ForCausalLM", attention_bias=True)) == (True, True, False)


def test_windows() -> None:
    assert of("MistralForCausalLM").windows == ()  # the class default of 4096 covers the whole context of 512
    assert of("MistralForCausalLM", max_position_embeddings=9000).windows == (4096,) * 4
    assert of("MistralForCausalLM", max_position_embeddings=9000, sliding_window=None).windows == ()
    assert of("MistralForCausalLM", sliding_window=100).windows == (100,) * 4
    assert of("Phi3ForCausalLM").windows == ()
    assert of("Phi3ForCausalLM", sliding_window=100).windows == (100,) * 4
    assert of("Qwen2ForCausalLM", sliding_window=100).windows == ()
    assert of("Qwen2ForCausalLM", sliding_window=100, use_sliding_window=True, max_window_layers=3).windows == (0, 0, 0, 100)
    assert of("Qwen2ForCausalLM", sliding_window=None, use_sliding_window=True, max_window_layers=3).windows == ()
    kinds = ["full_attention", "sliding_attention"] * 2
    assert of("Qwen3ForCausalLM", sliding_window=64, use_sliding_window=True, layer_types=kinds).windows == (0, 64, 0, 64)
    assert of("SmolLM3ForCausalLM", sliding_window=64, use_sliding_window=True).windows == (0, 0, 0, 64)
    assert of("SmolLM3ForCausalLM", use_sliding_window=True).windows == ()
    with pytest.raises(ModelUnsupported, match="chunked_attention"):
        of("Qwen3ForCausalLM", layer_types=["chunked_attention"] * 4)
    with pytest.raises(ModelCorrupt, match="layer_types"):
        of("Qwen3ForCausalLM", layer_types=kinds[:3])


def test_layers_without_rotation() -> None:
    assert of("SmolLM3ForCausalLM").nope_layers == (False, False, False, True)
    assert of("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0, 1]).nope_layers == (True, False, False, True)
    assert spec(no_rope_layers=[0, 0, 0, 0]).nope_layers == ()
    for bad in ([1, 1], "1111", [1, 1, 1, 2]):
        with pytest.raises(ModelCorrupt, match="no_rope_layers"):
            of("SmolLM3ForCausalLM", no_rope_layers=bad)


def test_granite_multipliers_are_granites_alone() -> None:
    multipliers = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    found = of("GraniteForCausalLM", **multipliers)
    assert (found.embedding_multiplier, found.attention_scale, found.residual_multiplier, found.logits_divisor) == (12.0, 0.015, 0.22, 8.0)
    assert spec(**multipliers).attention_scale == 8**-0.5
    assert of("GraniteForCausalLM").attention_scale == 1.0


def test_special_tokens_of_both_files() -> None:
    generation = Fields({"eos_token_id": [7, 9]}, "generation_config.json")
    found = spec_from_config(Fields(LLAMA | {"eos_token_id": 5, "bos_token_id": 1}, "config.json"), generation)
    assert (found.bos_token, found.eos_tokens) == (1, (7, 9, 5))
    assert spec(eos_token_id=[3, 4, 3]).eos_tokens == (3, 4)
    for bad in ("2", -1, [2, None], 1.5, True):
        with pytest.raises(ModelCorrupt, match="eos_token_id"):
            spec(eos_token_id=bad)


ROPES = [
    ({"type": "linear", "factor": 2.0}, "linear 2", 512),
    (
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64},
        "llama3 8",
        512,
    ),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, "yarn 4", 1024),
    ({"rope_type": "yarn", "factor": 4.0}, "yarn 4", 2048),
    ({"rope_type": "default"}, "none", 512),
]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("scaling", "name", "context"), ROPES)
def test_rope_scaling(key: str, scaling: dict[str, object], name: str, context: int) -> None:
    found = spec(**{key: scaling | {"rope_theta": 500.0}})
    assert (found.rope.scaling, found.context_tokens) == (name, context)
    assert found.rope.inverse_frequencies[0] == pytest.approx({"linear 2": 0.5}.get(name, 1.0))


def test_the_older_key_wins_as_in_transformers() -> None:
    both = spec(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "linear", "factor": 3.0})
    assert both.rope.scaling == "linear 2"
    assert spec(rope_scaling={}, rope_parameters={"rope_type": "linear", "factor": 3.0}).rope.scaling == "linear 3"


def test_rope_theta_of_both_generations_of_keys() -> None:
    old, new = spec(rope_theta=500.0), spec(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert old.rope == new.rope
    assert old.rope.inverse_frequencies[1] == pytest.approx(500 ** (-2 / 8))


PHI = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0]},
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
}


def test_longrope_is_fixed_by_the_served_context() -> None:
    values = LLAMA | {"architectures": ["Phi3ForCausalLM"]} | PHI
    config = Fields(values, "config.json")
    default, asked, long = (spec_from_config(config, context_tokens=tokens) for tokens in (None, 128, 129))
    assert default == asked
    assert (default.context_tokens, default.rope.scaling, default.rope.rotary_dims) == (128, "longrope short", 6)
    assert (long.context_tokens, long.rope.scaling) == (512, "longrope long")
    assert default.rope.inverse_frequencies[0] == 1.0
    assert long.rope.inverse_frequencies[0] == 0.25
    unsaid = Fields({key: value for key, value in values.items() if key != "original_max_position_embeddings"}, "config.json")
    assert spec_from_config(unsaid, context_tokens=512).rope.scaling == "longrope short"  # below the class default of 4096
    assert default.rope.magnitude == long.rope.magnitude == pytest.approx((1 + 2 / 7) ** 0.5)  # factor 4 = 2^2 over 128 = 2^7


UNSUPPORTED: dict[str, tuple[dict[str, object], str]] = {
    "another architecture": ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "quantised weights": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "experts": ({"num_local_experts": 8}, "num_local_experts"),
    "vision": ({"vision_config": {"depth": 3}}, "vision_config"),
    "soft caps": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "growing frequencies": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "longrope elsewhere": ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "frequencies by layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "kind of layer"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_computed_is_refused(what: str) -> None:
    changes, message = UNSUPPORTED[what]
    with pytest.raises(ModelUnsupported, match=message):
        spec(**changes)


CORRUPT: dict[str, tuple[dict[str, object], str]] = {
    **{f"no {key}": ({key: "absent"}, f"{key} is missing") for key in LLAMA if key != "architectures"},
    **{f"{key} 0": ({key: 0}, f"{key} is 0") for key in LLAMA if key != "architectures"},
    "a string": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "a boolean": ({"vocab_size": True}, "vocab_size is True"),
    "a fraction": ({"vocab_size": 10.5}, "vocab_size is 10.5"),
    "absurd": ({"vocab_size": 2**40}, "vocab_size"),
    "absurdly deep": ({"num_hidden_layers": 10_001, "architectures": ["MistralForCausalLM"]}, "num_hidden_layers is 10001"),
    "absurdly wide heads": ({"head_dim": 2**30}, "head_dim"),
    "odd grouping": ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    "odd heads": ({"hidden_size": 65}, "hidden_size is 65"),
    "an epsilon of NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "a negative theta": ({"rope_theta": -1}, "rope_theta"),
    "a theta of text": ({"rope_theta": "1e4"}, "rope_theta"),
    "scaling of text": ({"rope_scaling": "linear"}, "rope_scaling"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "factor 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    "crossed factors": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "high_freq_factor",
    ),
    "a flag of text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    "phi factors": ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
}


@pytest.mark.parametrize("what", CORRUPT)
def test_what_makes_no_sense_is_refused(what: str) -> None:
    changes, message = CORRUPT[what]
    with pytest.raises(ModelCorrupt, match=message):
        spec(**changes)


def test_every_stored_case_is_understood() -> None:
    families = {spec_of_config(case["config"]).family for case in cases()}  # type: ignore[arg-type]
    assert families == {"llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3"}


def test_real_configurations_are_served_or_refused_by_name(shared: Path) -> None:
    """53 published configurations: the dense text models of our families are read, all others refused naming a key."""
    folder = shared / "model-configs"
    if not folder.is_dir():
        pytest.skip("the published configurations are not beside the project")
    served = {}
    for path in sorted(folder.glob("*.json")):
        try:
            served[path.stem] = spec_of_config(json.loads(path.read_text()), path.name)
        except ModelError as error:
            assert path.name in str(error)
    assert set(served) == {
        "Qwen__Qwen2.5-72B",
        "Qwen__Qwen2.5-7B",
        "Qwen__Qwen2.5-7B-Instruct",
        "Qwen__Qwen3-32B",
        "Qwen__Qwen3-8B",
        "meta-llama__Llama-2-70b-hf",
        "meta-llama__Llama-2-7b-hf",
        "meta-llama__Llama-3.3-70B-Instruct",
        "meta-llama__Meta-Llama-3.1-405B",
        "meta-llama__Meta-Llama-3.1-70B",
        "meta-llama__Meta-Llama-3.1-8B",
        "microsoft__phi-4",
        "mistralai__Mistral-7B-Instruct-v0.3",
    }
    assert served["meta-llama__Meta-Llama-3.1-8B"].context_tokens == 131072
