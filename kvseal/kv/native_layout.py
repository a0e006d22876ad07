"""The geometry in the form in which native code takes it.

Owns `native_layout`, for kernels and hand-off alike: sizes and places of the arena are computed once, in `kv.geometry` (L10).
"""

from __future__ import annotations

from kvseal import _native
from kvseal.kv.geometry import KVGeometry


def native_layout(geometry: KVGeometry) -> _native.Layout:
    """The geometry's sizes as the kernels take them."""
    return _native.Layout(
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        page_tokens=geometry.page_tokens,
        kv_dtype=geometry.kv_dtype.value,
        run_bytes=geometry.run_bytes,
        element_run_bytes=geometry.element_run_bytes,
        section_bytes=geometry.section_bytes,
        page_bytes=geometry.page_bytes,
        format=geometry.format,
    )
