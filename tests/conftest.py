"""What every folder of tests shares: the demo model, and the folder of shared facts beside the project."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvseal.node.demo import demo_model_path as fetch_demo_model

# How long an example takes says something about the machine and its other work, never about what is tested.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, fetched once."""
    return fetch_demo_model()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Published traces and configs, a folder of facts beside the project. A clone alone skips what needs them."""
    folder = PROJECT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the published traces and configs in {folder.name}/ beside the project")
    return folder
