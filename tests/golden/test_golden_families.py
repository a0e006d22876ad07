"""Every family against Hugging Face transformers: small random checkpoints as real files, stored logits.

The expectations come from tools/make_golden_fixtures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conformance.forward import BACKENDS, Bench, make_backend
from golden.small_models import cases, expected_logits, write_folder

from kvseal.exec.families.rope import plain_frequencies, spec_of
from kvseal.exec.loader import load_model
from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.types import LayerWeights, ModelWeights

CASES = {str(case["name"]): case for case in cases()}
TOLERANCE = 2e-5
"""Of the largest logit: float32 sums in another order."""


def load_case(folder: Path, case: Mapping[str, object]) -> ModelWeights:
    tokens: list[int] = case["tokens"]  # type: ignore[assignment]
    write_folder(folder, case)
    return load_model(folder, context_tokens=len(tokens) if case["name"] == "phi3-longrope-long" else None)


def largest_error(backend_name: str, weights: ModelWeights, case: Mapping[str, object]) -> float:
    """As a share of the largest logit. The prompt is computed in uneven chunks."""
    bench = Bench(make_backend(backend_name, weights, pages=32))
    states = bench.hidden(bench.sequence(case["tokens"]), chunks=[7, 1, 1, 16])  # type: ignore[arg-type]
    expected = expected_logits(str(case["name"]))
    return float(np.abs(bench.backend.logits(np.ascontiguousarray(states[case["positions"]])) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, backend_name: str, tmp_path: Path) -> None:
    assert largest_error(backend_name, load_case(tmp_path, CASES[name]), CASES[name]) <= TOLERANCE


def test_shards_equal_one_file(tmp_path: Path) -> None:
    write_folder(tmp_path, CASES["qwen3"], shards=3)
    assert largest_error("reference", load_model(tmp_path), CASES["qwen3"]) <= TOLERANCE


def plain_rope(spec: ModelSpec) -> ModelSpec:
    return replace(spec, rope=spec_of(plain_frequencies(500.0 if spec.family == "llama" else 1000.0, spec.rope.rotary_dims)))


# What each case is there for, taken away: the comparison must notice.
WITHOUT: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "llama3 scaling": ("llama3", plain_rope),
    "linear scaling": ("llama-linear", lambda spec: replace(spec, rope=spec_of(plain_frequencies(10_000.0, 8)))),
    "yarn's frequencies": ("qwen2-yarn", lambda spec: replace(spec, rope=replace(plain_rope(spec).rope, magnitude=spec.rope.magnitude))),
    "yarn's magnitude": ("llama-yarn-new-keys", lambda spec: replace(spec, rope=replace(spec.rope, magnitude=1.0))),
    "longrope's magnitude": ("phi3-longrope-short", lambda spec: replace(spec, rope=replace(spec.rope, magnitude=1.0))),
    "windows": ("mistral-v0.1", lambda spec: replace(spec, windows=())),
    "one token of a window": ("mistral-v0.1", lambda spec: replace(spec, windows=tuple(w + 1 for w in spec.windows))),
    "the layer without a window": ("qwen2-windows", lambda spec: replace(spec, windows=(12, 12, 12))),
    "layer types": ("qwen3-layer-types", lambda spec: replace(spec, windows=(*spec.windows[::-1][1:], 0))),
    "phi's window": ("phi3-window", lambda spec: replace(spec, windows=())),
    "layers without rotation": ("smollm3", lambda spec: replace(spec, nope_layers=())),
    "the embedding multiplier": ("granite", lambda spec: replace(spec, embedding_multiplier=1.0)),
    "the attention multiplier": ("granite", lambda spec: replace(spec, attention_scale=8**-0.5)),
    "the residual multiplier": ("granite", lambda spec: replace(spec, residual_multiplier=1.0)),
    "the logits divisor": ("granite", lambda spec: replace(spec, logits_divisor=1.0)),
    "epsilon": ("phi4", lambda spec: replace(spec, norm_eps=1e-3)),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_every_feature_is_exercised(what: str, tmp_path: Path) -> None:
    name, without = WITHOUT[what]
    weights = load_case(tmp_path, CASES[name])
    assert largest_error("reference", replace(weights, spec=without(weights.spec)), CASES[name]) > 5 * TOLERANCE


WITHOUT_VECTOR: dict[str, tuple[str, Callable[[LayerWeights], LayerWeights]]] = {
    "q norm": ("qwen3", lambda layer: replace(layer, q_norm=np.ones(16, dtype=np.float32))),
    "k norm": ("qwen3", lambda layer: replace(layer, k_norm=np.ones(16, dtype=np.float32))),
    "MLP norm": ("llama2", lambda layer: replace(layer, mlp_norm=np.ones(64, dtype=np.float32))),
    "k bias": ("qwen2", lambda layer: replace(layer, k_bias=None)),
    "v bias": ("qwen2", lambda layer: replace(layer, v_bias=None)),
    "o bias": ("llama-biases", lambda layer: replace(layer, o_bias=None)),
    "down bias": ("llama-biases", lambda layer: replace(layer, down_bias=None)),
}


@pytest.mark.parametrize("what", WITHOUT_VECTOR)
def test_every_vector_is_exercised(what: str, tmp_path: Path) -> None:
    name, without = WITHOUT_VECTOR[what]
    weights = load_case(tmp_path, CASES[name])
    changed = replace(weights, layers=tuple(without(layer) for layer in weights.layers))
    assert largest_error("reference", changed, CASES[name]) > 5 * TOLERANCE
