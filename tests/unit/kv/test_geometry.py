"""Geometry and seal: sizes by hand for a real model, alignment, and a format that changes with everything that matters (L10)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvseal.kv.geometry import ALIGNMENT_BYTES, KVDtype, KVGeometry
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE, SEAL_MAGIC

SMOL = KVGeometry(layers=30, kv_heads=3, head_dim=64)


def test_sizes_of_a_real_model() -> None:
    assert SMOL.token_bytes == 2 * 30 * 3 * 64 * 2 == 23_040
    assert SMOL.run_bytes == 3 * 16 * 64 * 2
    assert SMOL.section_bytes == 64 + 2 * 6144
    assert SMOL.page_bytes == 30 * 12_352


@pytest.mark.parametrize(("dtype", "bits", "scale"), [("fp32", 32, 0), ("fp16", 16, 0), ("int8", 8, 4), ("int4", 4, 4)])
def test_sizes_of_every_dtype(dtype: str, bits: int, scale: int) -> None:
    geometry = replace(SMOL, kv_dtype=KVDtype(dtype))
    assert geometry.kv_dtype.element_bits == bits
    assert geometry.token_bytes == 2 * 30 * 3 * (64 * bits // 8 + scale)
    assert geometry.element_run_bytes == 3 * 16 * 64 * bits // 8
    assert geometry.run_bytes % ALIGNMENT_BYTES == 0
    assert 0 <= geometry.run_bytes - geometry.element_run_bytes - 3 * 16 * scale < ALIGNMENT_BYTES


def test_runs_are_padded_to_cache_lines() -> None:
    odd = KVGeometry(layers=1, kv_heads=1, head_dim=5, kv_dtype=KVDtype.INT8, page_tokens=3)
    assert odd.run_bytes == 64
    assert odd.section_bytes % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (8192, 512)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert SMOL.pages_for(tokens) == pages


def test_the_format_names_everything_that_would_change_the_meaning() -> None:
    variants = [
        SMOL,
        replace(SMOL, layers=3, kv_heads=30),
        replace(SMOL, head_dim=128),
        replace(SMOL, kv_dtype=KVDtype.INT8),
        replace(SMOL, page_tokens=32),
        replace(SMOL, weights_digest=b"other"),
    ]
    for one, other in itertools.combinations(variants, 2):
        assert one.format != other.format
    assert all(0 < variant.format < 2**64 for variant in variants)
    assert SMOL.format == replace(SMOL).format


def test_the_seal_is_one_cache_line_with_its_fields_in_place() -> None:
    assert SEAL_DTYPE.itemsize == SEAL_BYTES == ALIGNMENT_BYTES
    offsets = {name: SEAL_DTYPE.fields[name][1] for name in SEAL_DTYPE.names or ()} if SEAL_DTYPE.fields else {}
    assert offsets == {"magic": 0, "nonce": 8, "scope": 16, "format": 32, "ordinal": 40, "layer": 44, "filled": 46, "digest": 48}
    assert SEAL_MAGIC.to_bytes(8, "little") == b"KVSEAL01"
