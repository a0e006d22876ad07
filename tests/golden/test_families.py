"""Every family against Hugging Face transformers: small random checkpoints as real files, stored logits.

The expectations come from tools/make_golden_fixtures.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from conformance.forward import BACKENDS, Bench, make_backend
from golden.small_models import cases, expected_logits, write_folder

from kvseal.exec.loader import load_model

CASES = {str(case["name"]): case for case in cases()}
TOLERANCE = 2e-5
"""Of the largest logit: float32 sums in another order."""


def computed_logits(backend_name: str, folder: Path, case: Mapping[str, object], **options: object) -> np.ndarray:
    tokens: list[int] = case["tokens"]  # type: ignore[assignment]
    context = len(tokens) if case["name"] == "phi3-longrope-long" else None
    weights = load_model(folder, context_tokens=context)
    bench = Bench(make_backend(backend_name, weights, pages=32, **options))  # type: ignore[arg-type]
    states = bench.hidden(bench.sequence(tokens), chunks=[7, 1, 1, 16])
    return bench.backend.logits(np.ascontiguousarray(states[case["positions"]]))


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, backend_name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write_folder(tmp_path, case)
    expected = expected_logits(name)
    found = computed_logits(backend_name, tmp_path, case)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_shards_equal_one_file(tmp_path: Path) -> None:
    case = CASES["qwen3"]
    write_folder(tmp_path, case, shards=3)
    assert np.abs(computed_logits("reference", tmp_path, case) - expected_logits("qwen3")).max() <= TOLERANCE * 5
