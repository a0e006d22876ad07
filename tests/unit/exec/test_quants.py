"""Every stored number format against the values that the `gguf` package gives for the same blocks."""

from __future__ import annotations

import numpy as np
import pytest
from golden.small_models import FIXTURES

from kvseal.exec.weights.quants import BLOCK_SHAPES, dequantize

FLOATS = ("F32", "F16", "BF16")


@pytest.mark.parametrize("name", [name for name in BLOCK_SHAPES if name not in FLOATS])
def test_blocks_equal_the_gguf_package(name: str) -> None:
    with np.load(FIXTURES / "quants.npz") as stored:
        found = dequantize(stored[f"{name}_raw"], name)
        assert found.dtype == np.float32
        assert found.tobytes() == stored[f"{name}_values"].tobytes()


def test_floats() -> None:
    values = np.array([0.0, -1.5, 3.25, 65504.0], dtype=np.float32)
    assert dequantize(values.view(np.uint8), "F32").tolist() == values.tolist()
    assert dequantize(values.astype("<f2").view(np.uint8), "F16").tolist() == values.tolist()
    assert dequantize((values.view("<u4") >> 16).astype("<u2").view(np.uint8), "BF16").tolist() == [0.0, -1.5, 3.25, 65280.0]


def test_the_result_is_a_copy() -> None:
    values = np.array([1.0], dtype=np.float32)
    dequantize(values.view(np.uint8), "F32")[0] = 5
    assert values[0] == 1


@pytest.mark.parametrize("name", BLOCK_SHAPES)
def test_a_broken_block_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="whole"):
        dequantize(np.zeros(BLOCK_SHAPES[name][1] + 1, dtype=np.uint8), name)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="IQ2_XS"):
        dequantize(np.zeros(4, dtype=np.uint8), "IQ2_XS")
