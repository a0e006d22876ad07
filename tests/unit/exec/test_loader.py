"""A path becomes a model, or an error that says what is wrong with the path, the file or the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golden.small_gguf import case_metadata, case_tensors, gguf_bytes, write_gguf
from golden.small_models import cases, random_tensor, rounded, write_folder, write_safetensors

from kvseal.core.errors import ModelCorrupt, ModelError, ModelNotFound, ModelUnsupported
from kvseal.exec.loader import load_model, spec_of_config

CASES = {str(case["name"]): case for case in cases()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "m", CASES["llama-tied"])
    return tmp_path / "m"


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, tuple[str, tuple[int, ...], bytes]]], object]) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:size])
    header.pop("__metadata__", None)
    tensors = {
        name: (x["dtype"], tuple(x["shape"]), raw[size + x["data_offsets"][0] : size + x["data_offsets"][1]]) for name, x in header.items()
    }
    edit(tensors)
    write_safetensors(path, tensors)


def test_a_folder(folder: Path) -> None:
    model = load_model(folder)
    assert model.lm_head is None
    assert model.embedding.shape == (96, 64)
    assert len(model.layers) == 3
    assert model.layers[2].down.shape == (64, 96)
    assert model.layers[0].q_bias is None
    assert (
        model.bytes
        == (folder / "model.safetensors").stat().st_size - int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little") - 8
    )


def test_generation_config_counts(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_model(folder).spec.eos_tokens == (7, 8, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 800]}')
    with pytest.raises(ModelCorrupt, match="special token 800 is outside the vocabulary of 96"):
        load_model(folder)


def test_fused_tensors_are_cut_in_place(tmp_path: Path) -> None:
    write_folder(tmp_path, CASES["phi4"])
    layer = load_model(tmp_path).layers[1]
    assert [x.shape for x in (layer.q, layer.k, layer.v, layer.gate, layer.up)] == [(64, 64), (16, 64), (16, 64), (96, 64), (96, 64)]
    assert not layer.v.raw.flags.owndata
    stored = rounded(random_tensor(int(str(CASES["phi4"]["seed"])), "model.layers.1.self_attn.qkv_proj.weight", (96, 64)), "bf16")
    assert np.array_equal(np.concatenate([x.to_float32() for x in (layer.q, layer.k, layer.v)]), stored)


def missing(name: str) -> Callable[[dict[str, object]], object]:
    return lambda tensors: tensors.pop(name)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, missing("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelCorrupt, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight of shape \[96, 64\] is missing"):
        load_model(folder)


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=95)
    with pytest.raises(ModelCorrupt, match=r"gate_proj\.weight has shape \[96, 64\]; the configuration asks for \[95, 64\]"):
        load_model(folder)


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": ("F32", (8,), bytes(32))}))
    with pytest.raises(ModelUnsupported, match=r"model\.layers\.0\.self_attn\.sinks"):
        load_model(folder)


def test_old_frequencies_are_known_and_ignored(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (4,), bytes(16))}))
    load_model(folder)


def test_a_bias_that_the_configuration_does_not_know(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": ("F32", (64,), bytes(256))}))
    with pytest.raises(ModelUnsupported, match=r"q_proj\.bias"):
        load_model(folder)


def test_tied_and_untied(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(ModelCorrupt, match=r"tensor lm_head\.weight of shape \[96, 64\] is missing"):
        load_model(folder)
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert load_model(folder).lm_head is None
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": ("BF16", (96, 64), bytes(96 * 128))}))
    with pytest.raises(ModelUnsupported, match="tie_word_embeddings"):
        load_model(folder)


def test_a_norm_that_is_not_finite(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": ("F32", (64,), np.full(64, np.nan, "<f4").tobytes())}))
    with pytest.raises(ModelCorrupt, match=r"model\.norm\.weight holds values that are not finite"):
        load_model(folder)


def test_an_eight_bit_checkpoint_is_refused_by_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (96, 64), bytes(96 * 64))}))
    with pytest.raises(ModelUnsupported, match=r"up_proj\.weight is stored as F8_E4M3"):
        load_model(folder)


def test_paths(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match="empty"):
        load_model(tmp_path / "empty")
    with pytest.raises(ModelUnsupported, match=r"holds config\.json"):
        load_model(folder / "model.safetensors")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "README.md").write_text("hello")
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_model(tmp_path / "text")
    (tmp_path / "text" / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"name the file itself, e\.g\. .*a\.gguf"):
        load_model(tmp_path / "text")
    with pytest.raises(ModelCorrupt):
        load_model(tmp_path / "text" / "README.md")


def test_a_configuration_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelCorrupt, match="a configuration without weights"):
        load_model(folder)


def test_both_kinds_of_weights(folder: Path) -> None:
    (folder / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnsupported, match=r"both safetensors and x\.gguf"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1, "a": 2}', "\ufeff{}"])
def test_a_broken_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        load_model(folder)


def test_the_digest_names_content_and_numbers(folder: Path, tmp_path: Path) -> None:
    digest = load_model(folder).digest
    assert len(digest) == 32
    write_folder(tmp_path / "again", CASES["llama-tied"])
    assert load_model(tmp_path / "again").digest == digest
    edit_config(folder, rope_theta=1.0)
    assert load_model(folder).digest != digest
    write_folder(folder, CASES["llama-tied"])
    assert load_model(folder).digest == digest
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    assert load_model(folder).digest != digest


def gguf(tmp_path: Path, case: str = "llama-tied", architecture: str = "llama", drop: tuple[str, ...] = (), **changes: object) -> Path:
    metadata = case_metadata(CASES[case], architecture) | changes
    tensors = case_tensors(CASES[case], permuted=architecture == "llama")
    return write_gguf(
        tmp_path / "m.gguf",
        {key: value for key, value in metadata.items() if value is not None},
        {k: v for k, v in tensors.items() if k not in drop},
    )


def test_a_gguf_file(tmp_path: Path) -> None:
    model = load_model(gguf(tmp_path, **{"tokenizer.ggml.eot_token_id": 5}))
    assert (model.spec.tied_embeddings, model.spec.bos_token, model.spec.eos_tokens) == (True, 1, (2, 5))
    assert model.layers[0].q.row_order is not None
    assert model.layers[0].q.row_order[:8].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert model.layers[0].v.row_order is None


GGUF_ERRORS: dict[str, tuple[dict[str, object], tuple[str, ...], type[ModelError], str]] = {
    "another architecture": ({"general.architecture": "gemma3"}, (), ModelUnsupported, "'gemma3'"),
    "no architecture": ({"general.architecture": None}, (), ModelCorrupt, "general.architecture is missing"),
    "no layers": ({"llama.block_count": None}, (), ModelCorrupt, r"llama\.block_count is missing"),
    "no context": ({"llama.context_length": None}, (), ModelCorrupt, r"llama\.context_length is missing"),
    "no tensor": ({}, ("blk.1.ffn_up.weight",), ModelCorrupt, r"blk\.1\.ffn_up\.weight of shape \[96, 64\] is missing"),
    "one layer fewer": ({"llama.block_count": 2}, (), ModelUnsupported, r"blk\.2\.attn_k"),
    "another width": ({"llama.feed_forward_length": 97}, (), ModelCorrupt, r"ffn_.* has shape"),
    "experts": ({"llama.expert_count": 8}, (), ModelUnsupported, "expert_count"),
    "growing frequencies": ({"llama.rope.scaling.type": "longrope"}, (), ModelUnsupported, "longrope"),
    "part of a head": ({"llama.rope.dimension_count": 4}, (), ModelUnsupported, "dimension_count"),
    "odd grouping": ({"llama.attention.head_count_kv": 3}, (), ModelCorrupt, "head_count_kv"),
    "absurdly deep": ({"llama.block_count": 2**31 - 1}, (), ModelCorrupt, "block_count"),
    "absurdly wide heads": ({"llama.attention.key_length": 2**30}, (), ModelCorrupt, "key_length"),
    "heads by layer": ({"llama.attention.head_count_kv": [4, 4, 2]}, (), ModelUnsupported, "differs by layer"),
    "a string": ({"llama.block_count": "3"}, (), ModelCorrupt, "block_count is '3'"),
    "an adapter": ({"general.type": "adapter"}, (), ModelUnsupported, "general.type"),
}


@pytest.mark.parametrize("what", GGUF_ERRORS)
def test_gguf_errors_name_the_key(what: str, tmp_path: Path) -> None:
    changes, drop, kind, message = GGUF_ERRORS[what]
    with pytest.raises(kind, match=message):
        load_model(gguf(tmp_path, drop=drop, **changes))


def test_damaged_metadata_is_a_model_error_or_a_model(tmp_path: Path) -> None:
    """A few bytes of the header changed, many times: never another exception."""
    source = np.random.RandomState(1)
    metadata = case_metadata(CASES["qwen3"], "qwen3") | {"tokenizer.ggml.tokens": ["a", "b"]}
    raw = gguf_bytes(metadata, case_tensors(CASES["qwen3"], permuted=False))
    header_bytes, refused = raw.index(b"output_norm.weight") + 64, 0
    for _ in range(400):
        damaged = bytearray(raw)
        for at in source.randint(4, header_bytes, size=source.choice([1, 2, 5])):
            damaged[at] = source.choice([0, 1, 255, source.randint(256)])
        (tmp_path / "m.gguf").write_bytes(damaged)
        try:
            load_model(tmp_path / "m.gguf")
        except ModelError:
            refused += 1
    assert refused > 200


STRANGE = [None, 0, -1, 1.5, "x", [], {}, True, float("inf"), float("nan"), 2**70, [1], {"a": 1}]


@pytest.mark.parametrize("name", ["qwen3-layer-types", "phi3-longrope-short", "granite", "smollm3", "llama3", "llama-yarn-new-keys"])
def test_any_value_of_any_key_is_a_model_error_or_a_model(name: str) -> None:
    config: dict[str, object] = CASES[name]["config"]  # type: ignore[assignment]
    extra = ("rope_scaling", "rope_parameters", "layer_types", "no_rope_layers", "sliding_window", "partial_rotary_factor", "head_dim")
    changed = [config | {key: value} for key in (*config, *extra) for value in STRANGE]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(inner := config.get(key), dict):
            names = (*inner, "attention_factor", "mscale", "mscale_all_dim", "truncate", "beta_fast")
            changed += [config | {key: inner | {part: value}} for part in names for value in STRANGE]
    refused = 0
    for candidate in changed:
        try:
            spec_of_config(candidate)
        except ModelError:
            refused += 1
    assert refused > len(changed) // 4
