"""What every folder of tests shares: the demo model, and the folder of shared facts beside the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvseal.node.demo import demo_model_path as fetch_demo_model

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, fetched once."""
    return fetch_demo_model()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Published traces, configs and faults, read-only beside the project."""
    return PROJECT.parent / "shared"
