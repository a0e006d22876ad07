"""The seal has one layout: kvseal/kv/seal.py and native/seal.h agree field by field and byte by byte."""

from __future__ import annotations

import numpy as np
import pytest

from kvseal.exec.backend import SealCheck
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE, SEAL_MAGIC

_native = pytest.importorskip("kvseal._native", reason="the native part is not built")


def test_fields_lie_at_the_same_places() -> None:
    fields = SEAL_DTYPE.fields
    assert fields is not None
    assert _native.seal_layout() == {name: (entry[1], entry[0].itemsize) for name, entry in fields.items()}
    assert sum(size for _, size in _native.seal_layout().values()) == SEAL_BYTES == SEAL_DTYPE.itemsize
    assert _native.SEAL_MAGIC == SEAL_MAGIC


def test_a_native_seal_is_the_same_64_bytes() -> None:
    seal = np.zeros((), SEAL_DTYPE)
    seal["magic"], seal["nonce"], seal["format"] = SEAL_MAGIC, 0x0102030405060708, 0x1112131415161718
    seal["scope"] = (0x2122232425262728, 0x3132333435363738)
    seal["ordinal"], seal["layer"], seal["filled"] = 0x41424344, 0x5152, 0x6162
    native = _native.seal_bytes(
        nonce=0x0102030405060708,
        scope_low=0x2122232425262728,
        scope_high=0x3132333435363738,
        format=0x1112131415161718,
        ordinal=0x41424344,
        layer=0x5152,
        filled=0x6162,
    )
    assert native == seal.tobytes()


def test_every_check_has_a_law() -> None:
    """The numbers are shared with native/seal.h and native/handoff.h; each but CLEAN quotes a law."""
    assert [check.value for check in SealCheck] == list(range(13))
    assert all(check.law.statement for check in SealCheck if check is not SealCheck.CLEAN)
