"""Identities: who asks, which page, which hand-out of it, who may share.

Owns the types that keep numbers of different meaning apart. Laws L3 (nonce) and L4 (scope) rest on them.
Never derives an identity from content that a caller controls without a key.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""Made by the server, never by a caller (a caller's own id is only echoed)."""

PageId = NewType("PageId", int)
"""Index of a page in its arena. Meaningless without the nonce: only `kv.pool` handles it bare."""

Nonce = NewType("Nonce", int)
"""Unsigned 64-bit, unpredictable, one per hand-out of a page, never reused in a process. Never 0."""

Scope = NewType("Scope", bytes)
"""16 bytes: keyed digest of tenant, salt, adapter and weights. Who may share prefixes."""

SCOPE_BYTES = 16


class Stamp(NamedTuple):
    """What a holder knows of a page: which one, and which hand-out of it."""

    page: PageId
    nonce: Nonce
