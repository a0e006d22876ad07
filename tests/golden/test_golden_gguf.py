"""The same checkpoints as GGUF files: metadata keys, the order of q and k rows, fused tensors, rotary factors, multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from conformance.forward import BACKENDS, Bench, make_backend
from golden.small_gguf import TYPE_IDS, case_metadata, case_tensors, write_gguf
from golden.small_models import cases, expected_logits

from kvseal.exec.loader import load_model

CASES = {str(case["name"]): case for case in cases()}
TOLERANCE = 2e-5


def llama3_factors(case: Mapping[str, object]) -> np.ndarray:
    """What converters write into rope_freqs.weight: the divisor of each frequency, by Meta's piecewise rule."""
    config: dict = case["config"]  # type: ignore[type-arg, assignment]
    scaling, dims = config["rope_scaling"], config["hidden_size"] // config["num_attention_heads"]
    out = []
    for i in range(dims // 2):
        wave = 2 * np.pi * config["rope_theta"] ** (2 * i / dims)
        low, high = (scaling["original_max_position_embeddings"] / scaling[key] for key in ("low_freq_factor", "high_freq_factor"))
        if wave < high:
            out.append(1.0)
        elif wave > low:
            out.append(scaling["factor"])
        else:
            smooth = (scaling["original_max_position_embeddings"] / wave - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            out.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(out, dtype=np.float32)


# case -> (architecture, interleaved rows, further metadata)
FILES: dict[str, tuple[str, bool, dict[str, object]]] = {
    "llama2-gqa": ("llama", True, {}),
    "llama3": ("llama", True, {}),
    "llama-tied": ("llama", True, {}),
    "llama-biases": ("llama", True, {}),
    "llama-linear": ("llama", True, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    "smollm2": ("llama", True, {}),
    "mistral-v0.1": ("llama", True, {"llama.attention.sliding_window": 16}),
    "qwen2": ("qwen2", False, {}),
    "qwen2-yarn": (
        "qwen2",
        False,
        {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0, "qwen2.rope.scaling.original_context_length": 32},
    ),
    "qwen3": ("qwen3", False, {}),
    "granite": (
        "granite",
        True,
        {"granite.embedding_scale": 6.0, "granite.attention.scale": 0.2, "granite.residual_scale": 0.35, "granite.logit_scale": 3.0},
    ),
    "smollm3": ("smollm3", True, {"smollm3.rope.freq_base": 2e6}),
    "phi3-window": ("phi3", False, {"phi3.attention.sliding_window": 15}),
    "phi4": ("phi3", False, {}),
    "phi3-longrope-short": ("phi3", False, {"phi3.rope.dimension_count": 6, "phi3.rope.scaling.original_context_length": 48}),
    "phi3-longrope-long": ("phi3", False, {"phi3.rope.dimension_count": 6, "phi3.rope.scaling.original_context_length": 48}),
}


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(name: str, backend_name: str, tmp_path: Path) -> None:
    case = CASES[name]
    architecture, permuted, further = FILES[name]
    tensors = case_tensors(case, permuted=permuted)
    if name == "llama3":
        factors = llama3_factors(case)
        tensors["rope_freqs.weight"] = (TYPE_IDS["F32"], factors.shape, factors.tobytes())
    if "longrope" in name:
        scaling = case["config"]["rope_scaling"]  # type: ignore[index]
        for part in ("short", "long"):
            factors = np.array(scaling[f"{part}_factor"], dtype=np.float32)
            tensors[f"rope_factors_{part}.weight"] = (TYPE_IDS["F32"], factors.shape, factors.tobytes())
    path = write_gguf(tmp_path / "model.gguf", case_metadata(case, architecture) | further, tensors)
    tokens: list[int] = case["tokens"]  # type: ignore[assignment]
    weights = load_model(path, context_tokens=len(tokens) if name == "phi3-longrope-long" else None)
    bench = Bench(make_backend(backend_name, weights, pages=32))
    states = bench.hidden(bench.sequence(tokens), [9, 1])
    found = bench.backend.logits(np.ascontiguousarray(states[case["positions"]]))
    expected = expected_logits(name)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_quantised_rows_are_gathered_too(tmp_path: Path) -> None:
    """q and k as Q8_0 in interleaved order: near the float32 logits, which a wrong order would miss by far."""
    case = CASES["llama2-gqa"]
    path = write_gguf(tmp_path / "model.gguf", case_metadata(case, "llama"), case_tensors(case, permuted=True, matrix_type="Q8_0"))
    bench = Bench(make_backend("reference", load_model(path), pages=32))
    tokens: list[int] = case["tokens"]  # type: ignore[assignment]
    states = bench.hidden(bench.sequence(tokens), [])
    found, expected = bench.backend.logits(np.ascontiguousarray(states[case["positions"]])), expected_logits("llama2-gqa")
    assert np.abs(found - expected).max() <= 0.1 * np.abs(expected).max()
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.999
