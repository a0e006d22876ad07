"""Paths to the shared reference files, found next to the repository; tests that need them are skipped where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[4] / "shared"


def config_path(name: str) -> Path:
    return SHARED / "model-configs" / f"{name}.json"


@pytest.fixture(scope="session")
def shared() -> Path:
    if not (SHARED / "model-configs").is_dir():
        pytest.skip("the shared reference files are not next to this checkout")
    return SHARED
