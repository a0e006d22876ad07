"""Small models for the forward-level suite, written once per session as real files."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden.small_models import cases, write_folder

from kvseal.exec.loader import load_model
from kvseal.exec.weights.types import ModelWeights


def _load(name: str, folder: Path) -> ModelWeights:
    write_folder(folder, next(case for case in cases() if case["name"] == name))
    return load_model(folder)


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    """Three layers, 8 query and 4 KV heads of 8, biases everywhere."""
    return _load("llama-biases", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def window_weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    """As above without biases, a window of 16 tokens on every layer."""
    return _load("mistral-v0.1", tmp_path_factory.mktemp("window"))
