"""The seal: the 64-byte line in front of each layer's run, in the page's own memory.

Owns the layout, once for Python; `native/seal.h` is its twin and a conformance test compares the two byte by byte. Little endian.
Laws L3 (nonce), L4 (scope), L5 (filled), L6 (ordinal, layer), L7 (digest), L10 (format).
"""

from __future__ import annotations

import numpy as np

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
