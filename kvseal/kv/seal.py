"""The seal: the 64-byte line in front of each layer's run, in the page's own memory.

Owns the layout and the names of the comparisons, once for Python; `native/seal.h` is its twin and a conformance test compares the two byte
by byte. Little endian.
Laws L3 (nonce), L4 (scope), L5 (filled), L6 (ordinal, layer), L7 (digest), L10 (format).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from kvseal.core.laws import Law

SEAL_BYTES = 64
SEAL_MAGIC = int.from_bytes(b"KVSEAL01", "little")
"""First field of every seal ever written; a line without it was never a seal of this layout."""

SEAL_DTYPE = np.dtype(
    [
        ("magic", "<u8"),
        ("nonce", "<u8"),
        ("scope", "<u8", (2,)),
        ("format", "<u8"),
        ("ordinal", "<u4"),
        ("layer", "<u2"),
        ("filled", "<u2"),
        ("digest", "<u8", (2,)),
    ]
)
"""`digest` is zero until the page is sealed. `filled` counts the slots written in this layer, 0..page_tokens."""

assert SEAL_DTYPE.itemsize == SEAL_BYTES


class SealCheck(IntEnum):
    """Which comparison failed; numbers are shared with native/seal.h and native/handoff.h. The first failing one, in this order, is
    reported."""

    CLEAN = 0
    MAGIC = 1
    NONCE = 2
    SCOPE = 3
    FORMAT = 4
    LAYER = 5
    ORDINAL = 6
    FILLED = 7
    """attend: fewer slots written than the read needs; append: the slot to write is not the next one; hand-off: not exactly so many."""
    LEDGER = 8
    """append to a fresh page: the stamp is not the pool's current hand-out of it."""
    REUSED = 9
    """append of slot 0 to a page already written in this hand-out, or to a sealed page; closing one that bears a digest."""
    TABLE = 10
    """The block table is too short for the positions, or names a page outside the arena."""
    DIGEST = 11
    """hand-off: the bytes of a layer are not those that its seal was made for."""
    FOLD = 12
    """hand-off: the page's digest is not the one that was announced."""

    @property
    def law(self) -> Law:
        return _LAWS[self]


_LAWS = {
    SealCheck.MAGIC: Law.L3,
    SealCheck.NONCE: Law.L3,
    SealCheck.SCOPE: Law.L4,
    SealCheck.FORMAT: Law.L10,
    SealCheck.LAYER: Law.L6,
    SealCheck.ORDINAL: Law.L6,
    SealCheck.FILLED: Law.L5,
    SealCheck.LEDGER: Law.L3,
    SealCheck.REUSED: Law.L7,
    SealCheck.TABLE: Law.L6,
    SealCheck.DIGEST: Law.L7,
    SealCheck.FOLD: Law.L7,
}
