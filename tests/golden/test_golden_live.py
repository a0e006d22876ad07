"""The same comparisons with transformers running beside us: proves that the stored fixtures are what transformers computes today.

Needs the `[golden]` extra: ``pytest -m golden_live tests/golden``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conformance.forward import BACKENDS, Bench, make_backend
from golden.small_models import cases, expected_logits
from golden.test_golden_families import CASES, TOLERANCE, largest_error, load_case

from kvseal.exec.loader import load_model

pytestmark = [pytest.mark.golden_live, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).resolve().parent.parent.parent / "tools" / "make_golden_fixtures.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("transformers", reason="needs the [golden] extra")
    found = importlib.util.spec_from_file_location("make_golden_fixtures", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_small_models_live(name: str, tool: ModuleType, tmp_path: Path) -> None:
    case = CASES[name]
    model = tool.small_model(case["config"], case["tensors"], case["seed"], case["dtype"])
    live = tool.logits_of(model, case["tokens"])[case["positions"]]
    assert np.abs(live - expected_logits(name)).max() <= TOLERANCE * np.abs(live).max()
    assert largest_error(BACKENDS[-1], load_case(tmp_path, case), case) <= TOLERANCE


def test_the_stored_tensors_are_the_models_own(tool: ModuleType) -> None:
    for case in cases():
        model = tool.small_model(case["config"], None, case["seed"], case["dtype"])
        assert [[name, shape] for name, shape in tool.tensor_list(model)] == case["tensors"]


def test_the_demo_model_live(tool: ModuleType, demo_model_path: Path) -> None:
    """Every position of one text: logits, and with them every greedy choice."""
    tokens = [504, 3575, 282, 4649, 314, 7042, 30, 657, 314, 260, 3575, 282, 260, 1429, 284, 253, 5180, 3122]
    live = tool.logits_of(tool.demo_model(demo_model_path), tokens)
    bench = Bench(make_backend(BACKENDS[-1], load_model(demo_model_path), page_tokens=16, pages=8))
    found = bench.backend.logits(bench.hidden(bench.sequence(tokens), [5]))
    assert np.abs(found - live).max() <= 2e-3
    assert (found.argmax(axis=1) == live.argmax(axis=1)).all()


def test_dequantised_blocks_live(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="needs the [golden] extra")
    stored = tool.FIXTURES / "quants.npz"
    monkeypatch.setattr(tool, "FIXTURES", tmp_path)
    tool.make_quants()
    with np.load(stored) as old, np.load(tmp_path / "quants.npz") as new:
        assert sorted(old) == sorted(new)
        assert all(old[name].tobytes() == new[name].tobytes() for name in old)
