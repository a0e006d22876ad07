"""Every native kernel alone, against plain NumPy: all weight formats, all shapes, every instruction set of this machine.

Tolerances are stated where they are used. L13: what a kernel computes for a row never depends on its neighbours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvseal.exec.packed import packing
from kvseal.exec.weights.quants import BLOCK_SHAPES, dequantize

_native = pytest.importorskip("kvseal._native", reason="the native part is not built")

Float32 = npt.NDArray[np.float32]


def instruction_sets() -> list[str]:
    return _native.instruction_sets()


every_isa = pytest.mark.parametrize("isa", instruction_sets())
KINDS = sorted(BLOCK_SHAPES)
PACKINGS = ["fp32", "bf16", "q8", "q8m", "q4m"]


def stored(kind: str, rows: int, columns: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    """Random bytes of a stored type whose scales are sane numbers."""
    random = np.random.default_rng(seed)
    if kind == "F32":
        return random.standard_normal((rows, columns), dtype=np.float32).view(np.uint8).reshape(-1)
    if kind == "F16":
        return random.standard_normal((rows, columns)).astype(np.float16).view(np.uint8).reshape(-1)
    if kind == "BF16":
        wide = random.standard_normal((rows, columns), dtype=np.float32).view(np.uint32)
        return (wide >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    elements, size = BLOCK_SHAPES[kind]
    blocks = random.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for place in places:
        halves = (random.standard_normal(len(blocks)) * 0.02).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def packed(raw: npt.NDArray[np.uint8], kind: str, rows: int, columns: int, packing_name: str, order: npt.NDArray[np.int32] | None = None):
    slab = _native.WeightSlab(_native.packed_bytes(packing_name, rows, columns))
    return slab.pack(raw, kind, rows, columns, packing_name, order)


def random_linear(name: str, rows: int, columns: int, seed: int = 1):
    """Packed from float32, and the exact matrix."""
    raw = stored("F32", rows, columns, seed)
    return packed(raw, "F32", rows, columns, name), raw.view(np.float32).reshape(rows, columns)


def apply(weights: object, x: Float32, rows: int, isa: str, bias: Float32 | None = None) -> Float32:
    out = np.full((len(x), rows), np.nan, dtype=np.float32)
    _native.linear(weights, x, out, bias, isa)
    return out


def in_eighths(x: Float32) -> Float32:
    """x rounded to 8-bit groups of 32 along the columns, as inputs of grouped weights are; padded groups included. The largest of a group
    stands apart, exactly, when it is an outlier of the row."""
    columns = x.shape[1]
    wide = np.zeros((len(x), -(-columns // 32) * 32), dtype=np.float32)
    wide[:, :columns] = x
    groups = wide.reshape(len(x), -1, 32)
    size = np.abs(groups)
    outlier = size.max(axis=2, keepdims=True) > 4.0 * np.sqrt((x.astype(np.float64) ** 2).mean(axis=1))[:, None, None]
    apart = outlier & (np.arange(32) == size.argmax(axis=2, keepdims=True))
    return np.where(apart, groups, rounded(np.where(apart, np.float32(0), groups))).reshape(len(x), -1)[:, :columns].astype(np.float32)


def rounded(groups: Float32) -> Float32:
    top = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(groups * inverse) * (top / np.float32(127))


def inputs(tokens: int, columns: int, seed: int = 2) -> Float32:
    return np.random.default_rng(seed).standard_normal((tokens, columns), dtype=np.float32)


@every_isa
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_an_outlier_does_not_cost_its_group_the_precision(kind: str, isa: str) -> None:
    raw = stored(kind, 24, 96)
    weights = packed(raw, kind, 24, 96, packing("auto", kind))
    x = inputs(5, 96)
    x[1, 40] = x[3, 7] = 90.0
    exact = x.astype(np.float64) @ dequantize(raw, kind).reshape(24, 96).T.astype(np.float64)
    error = np.abs(apply(weights, x, 24, isa) - exact)
    assert error[[1, 3]].max() < 2 * error[[0, 2, 4]].max()  # without the second rounding it is 10 times larger and more


@pytest.mark.parametrize("kind", KINDS)
def test_stored_rows_become_the_same_floats_as_in_python(kind: str) -> None:
    raw = stored(kind, 3, 512)
    out = np.empty((3, 512), dtype=np.float32)
    _native.dequantise(raw, kind, out)
    np.testing.assert_array_equal(out, dequantize(raw, kind).reshape(3, 512))


@every_isa
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["auto", "fp32", "bf16", "q8", "q4"])
def test_linear_of_every_stored_type(kind: str, option: str, isa: str) -> None:
    rows, columns, tokens = 40, 512, 5
    raw = stored(kind, rows, columns)
    exact = dequantize(raw, kind).reshape(rows, columns).astype(np.float64)
    name = packing(option, kind)
    x = inputs(tokens, columns)
    rounded = x if name in ("fp32", "bf16") else in_eighths(x)
    expected = rounded.astype(np.float64) @ exact.T
    found = apply(packed(raw, kind, rows, columns, name), x, rows, isa)
    # What the packing itself loses, as a share of a row's typical size: nothing where groups are kept, else half a step.
    wide_enough = option in ("auto", "q8") or kind in ("Q4_0", "Q4_1")
    lossless = name == "fp32" or (option != "bf16" and wide_enough and kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
    loss = 1e-6 if lossless or (name == "bf16" and kind == "BF16") else {"bf16": 5e-3, "q8": 1e-2, "q8m": 1e-3, "q4m": 0.15}[name]
    assert np.abs(found - expected).max() <= loss * np.abs(expected).max() + 1e-5


@pytest.mark.parametrize("columns", [256, 80])
def test_four_bits_fit_better_than_from_the_lowest_to_the_highest(columns: int) -> None:
    """Group by group the search loses nothing against the plain range, and on the whole it gains; padding takes no part."""
    random = np.random.default_rng(7)
    exact = (random.standard_normal((64, columns)) * random.uniform(0.01, 3, (64, 1)) + 0.1).astype(np.float32)
    exact[5, :32], exact[6, :32] = 0.25, 0.0
    weights = packed(exact.view(np.uint8).reshape(-1), "F32", 64, columns, "q4m")
    found = apply(weights, np.eye(columns, dtype=np.float32), 64, "portable").T
    fitted, plain = [], []
    for start in range(0, columns, 32):
        group, low = exact[:, start : start + 32], exact[:, start : start + 32].min(axis=1, keepdims=True)
        step = np.maximum((group.max(axis=1, keepdims=True) - low) / 15, 1e-12)
        plain.append(((low + step * np.rint((group - low) / step) - group) ** 2).sum(axis=1))
        fitted.append(((found[:, start : start + 32] - group) ** 2).sum(axis=1))
    assert (np.array(fitted) <= 1.01 * np.array(plain) + 1e-6).all()
    assert np.sum(fitted) < 0.85 * np.sum(plain)


@every_isa
@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize(("rows", "columns"), [(8, 32), (1, 32), (9, 64), (23, 96), (64, 48), (12, 8), (100, 33), (16, 1)])
def test_odd_sizes_are_padded_and_nothing_is_written_past_them(name: str, rows: int, columns: int, isa: str) -> None:
    weights, exact = random_linear(name, rows, columns)
    x = inputs(6, columns)
    around = np.full((8, rows), 7.0, dtype=np.float32)
    _native.linear(weights, x, around[1:7], None, isa)
    assert (around[[0, 7]] == 7.0).all()
    expected = x.astype(np.float64) @ exact.T.astype(np.float64)
    allowed = {"fp32": 1e-5, "bf16": 1e-2, "q8": 3e-2, "q8m": 5e-2, "q4m": 0.25}[name]
    assert np.abs(around[1:7] - expected).max() <= allowed * np.abs(expected).max() + allowed


@every_isa
@pytest.mark.parametrize("name", [*PACKINGS, "q4"])
def test_a_row_is_the_same_alone_and_among_any_others(name: str, isa: str) -> None:
    rows, columns = 72, 160
    weights = packed(stored("Q4_0", rows, columns), "Q4_0", rows, columns, name)
    x = inputs(40, columns)
    x[::3, 5] = x[1::5, 100] = 40.0  # outliers in some tokens of a tile and not in others
    bias = np.random.default_rng(4).standard_normal(rows).astype(np.float32)
    alone = np.concatenate([apply(weights, x[i : i + 1], rows, isa, bias) for i in range(40)])
    for tokens in range(1, 41):
        np.testing.assert_array_equal(apply(weights, x[:tokens], rows, isa, bias), alone[:tokens])
    for start in (1, 2, 3, 7):
        np.testing.assert_array_equal(apply(weights, x[start:], rows, isa, bias), alone[start:])


@pytest.mark.parametrize("name", [*PACKINGS, "q4"])
def test_instruction_sets_agree_closely(name: str) -> None:
    rows, columns = 64, 320
    weights = packed(stored("Q4_0", rows, columns), "Q4_0", rows, columns, name)
    x = inputs(9, columns)
    results = [apply(weights, x, rows, isa) for isa in instruction_sets()]
    for other in results[1:]:
        assert np.abs(other - results[0]).max() <= 2e-6 * np.abs(results[0]).max()


@every_isa
def test_extreme_quants_do_not_overflow(isa: str) -> None:
    """All weights and inputs at their largest: the 16-bit sums hold what the largest group gives."""
    raw = np.tile(np.frombuffer(np.float16(1).tobytes() + b"\x00\x00" + b"\xff" * 16, dtype=np.uint8), 8 * 2)
    x = np.full((3, 64), 127.0, dtype=np.float32)
    found = apply(packed(raw, "Q4_1", 8, 64, "q4m"), x, 8, isa)
    np.testing.assert_array_equal(found, np.full((3, 8), 64 * 127.0 * 15.0, dtype=np.float32))
    low = np.tile(np.frombuffer(np.float16(1).tobytes() + b"\x80" * 32, dtype=np.uint8), 8 * 2)
    np.testing.assert_array_equal(
        apply(packed(low, "Q8_0", 8, 64, "q8"), x, 8, isa), np.full((3, 8), -64 * 127.0 * 128.0, dtype=np.float32)
    )


def test_rows_are_gathered_in_the_tensor_s_own_order() -> None:
    raw = stored("Q4_1", 16, 64)
    order = np.random.default_rng(5).permutation(16).astype(np.int32)
    x = inputs(2, 64)
    plain = apply(packed(raw, "Q4_1", 16, 64, "q4m"), x, 16, "auto")
    np.testing.assert_array_equal(apply(packed(raw, "Q4_1", 16, 64, "q4m", order), x, 16, "auto"), plain[:, order])


def test_wrong_sizes_are_errors() -> None:
    raw = stored("F32", 8, 32)
    slab = _native.WeightSlab(_native.packed_bytes("fp32", 8, 32))
    with pytest.raises(ValueError, match="do not match"):
        slab.pack(raw[:-4], "F32", 8, 32, "fp32")
    with pytest.raises(ValueError, match="row_order"):
        slab.pack(raw, "F32", 8, 32, "fp32", np.full(8, 8, dtype=np.int32))
    with pytest.raises(ValueError, match="whole blocks"):
        slab.pack(raw, "Q4_K", 8, 33, "q4m")
    with pytest.raises(ValueError, match="unknown"):
        slab.pack(raw, "Q2_K", 8, 32, "q4m")
    weights = slab.pack(raw, "F32", 8, 32, "fp32")
    with pytest.raises(ValueError, match="full"):
        slab.pack(raw, "F32", 8, 32, "fp32")
    with pytest.raises(ValueError, match="shape"):
        _native.linear(weights, inputs(2, 31), np.empty((2, 8), dtype=np.float32))
    with pytest.raises(TypeError):
        _native.linear(weights, inputs(2, 32), np.empty((2, 8), dtype=np.float64))
    with pytest.raises(ValueError, match="not available"):
        _native.instruction_set("sse9")


@every_isa
@pytest.mark.parametrize("width", [8, 15, 64, 576, 1000])
def test_rms_norm(width: int, isa: str) -> None:
    x, weight = inputs(7, width) * np.float32(30), inputs(1, width, 6)[0]
    out = np.empty_like(x)
    _native.rms_norm(x, weight, 1e-5, out, isa)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6)


@every_isa
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 32), (96, 96), (128, 20), (256, 256), (8, 6), (64, 0)])
def test_rope_turns_pairs_and_leaves_the_rest(head_dim: int, rotary: int, isa: str) -> None:
    x = np.random.default_rng(7).standard_normal((5, 3, head_dim), dtype=np.float32)
    angles = np.random.default_rng(8).uniform(0, 100, (5, rotary // 2))
    cosines, sines = (np.ascontiguousarray(f(angles), dtype=np.float32) for f in (np.cos, np.sin))
    found = x.copy()
    _native.rope(found, cosines, sines, isa)
    first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    c, s = cosines[:, None], sines[:, None]
    np.testing.assert_allclose(found[..., : rotary // 2], first * c - second * s, atol=1e-6)
    np.testing.assert_allclose(found[..., rotary // 2 : rotary], second * c + first * s, atol=1e-6)
    np.testing.assert_array_equal(found[..., rotary:], x[..., rotary:])


@every_isa
def test_exponential_is_good_to_two_units_in_the_last_place(isa: str) -> None:
    x = np.concatenate([np.linspace(-87.2, 88.2, 40001), np.linspace(-1, 1, 20001), [0.0]]).astype(np.float32)
    out = np.empty_like(x)
    _native.exponential(x, out, isa)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(exact.astype(np.float32))).max() <= 2.0
    assert out[-1] == 1.0
    edges = np.array([-1e30, -np.inf, -88.0], dtype=np.float32)
    zeros = np.empty_like(edges)
    _native.exponential(edges, zeros, isa)
    assert (zeros == 0).all()


@every_isa
@pytest.mark.parametrize("width", [1, 7, 8, 33, 96])
def test_silu_multiply(width: int, isa: str) -> None:
    gate, up = inputs(1, width, 9)[0] * np.float32(8), inputs(1, width, 10)[0]
    out = np.empty_like(gate)
    _native.silu_multiply(gate, up, out, isa)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate.astype(np.float64))) * up, rtol=1e-6, atol=1e-7)


def test_a_digest_depends_on_every_byte_and_its_place() -> None:
    data = np.random.default_rng(11).integers(0, 256, 4096, dtype=np.uint8)
    seen = {_native.digest(data, 1), _native.digest(data, 2), _native.digest(data[:-64].copy(), 1), _native.digest(np.zeros_like(data), 1)}
    for place in range(0, 4096, 37):
        changed = data.copy()
        changed[place] ^= 1 << place % 8
        seen.add(_native.digest(changed, 1))
    swapped = data.copy()
    swapped[:64], swapped[64:128] = data[64:128], data[:64]
    seen.add(_native.digest(swapped, 1))
    assert len(seen) == 4 + len(range(0, 4096, 37)) + 1
    with pytest.raises(ValueError, match="64-byte"):
        _native.digest(data[:65].copy(), 1)
