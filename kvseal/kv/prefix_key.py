"""Prefix keys: a digest that two prefixes share only when everything that can change their K and V is the same (L4k).

Owns scope derivation and the chained page keys. Both are keyed BLAKE2b (RFC 7693), so a caller who knows the algorithm still cannot
make a collision or test for one; every field is preceded by its length, so ("a", "bc") and ("ab", "c") differ. A key only *finds*:
whoever finds something by it compares the tokens as well. Every tier that holds pages uses these keys.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

from kvseal.core.ids import SCOPE_BYTES, Scope

KEY_SCHEMA = b"kvseal-prefix-1"
KEY_BYTES = 32
SECRET_BYTES = 16
TOKEN_BYTES = 4


class PackedTokens:
    """Token ids as 4-byte little-endian words, packed once so that every later comparison is a memcmp. Immutable."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // TOKEN_BYTES

    def first(self, tokens: int) -> array[int]:
        """The first so many ids, typecode 'I'."""
        return array("I", self.data[: tokens * TOKEN_BYTES])


def pack_tokens(tokens: Sequence[int] | PackedTokens) -> PackedTokens:
    """Ids from 0 to 2**32 - 1. Already packed ones come back as they are, an array of typecode 'I' is copied, and anything else costs
    about 5 ns per token. Raises `OverflowError` for an id out of range."""
    if isinstance(tokens, PackedTokens):
        return tokens
    if isinstance(tokens, array) and tokens.typecode == "I":
        return PackedTokens(tokens.tobytes())
    try:
        return PackedTokens(struct.Struct(f"{len(tokens)}I").pack(*tokens))  # A third faster than array("I", tokens).
    except struct.error:
        raise OverflowError("a token id is no whole number from 0 to 2**32 - 1") from None


def scope_id(secret: bytes, tenant: str, salt: str, adapter: str, weights_digest: bytes) -> Scope:
    """Who may share prefixes: the same tenant, salt, adapter and weights. An injective encoding under a keyed digest.

    `secret` has at least 16 bytes and is the same on every node that shares a cache.
    """
    digest = hashlib.blake2b(key=_checked(secret), digest_size=SCOPE_BYTES, person=b"kvseal-scope")
    for field in (tenant.encode(), salt.encode(), adapter.encode(), weights_digest):
        _feed(digest, field)
    return Scope(digest.digest())


class PrefixKeys:
    """Keys of the full pages of a prefix, each chained over the one before it, so that a key names the whole prefix."""

    def __init__(self, secret: bytes, *, weights_digest: bytes, adapter: str, rope: bytes, format: int, page_tokens: int) -> None:
        self._secret = _checked(secret)
        self._page_tokens = page_tokens
        root = hashlib.blake2b(key=self._secret, digest_size=KEY_BYTES, person=b"kvseal-root")
        numbers = (format.to_bytes(8, "little"), page_tokens.to_bytes(4, "little"))
        for field in (KEY_SCHEMA, weights_digest, adapter.encode(), rope, *numbers):
            _feed(root, field)
        self._root = root.digest()

    def keys(self, scope: Scope, tokens: Sequence[int] | PackedTokens) -> list[bytes]:
        """One 32-byte key per *full* page of `tokens`; a tail shorter than a page has none."""
        return self.after(None, scope, pack_tokens(tokens).data)

    def after(self, key: bytes | None, scope: Scope, run: bytes) -> list[bytes]:
        """Keys of the full pages of packed tokens that follow the page with `key` (None: that begin a prefix)."""
        page_bytes = self._page_tokens * TOKEN_BYTES
        found: list[bytes] = []
        key = self._root if key is None else key
        for start in range(0, len(run) - page_bytes + 1, page_bytes):
            link = hashlib.blake2b(key=self._secret, digest_size=KEY_BYTES, person=b"kvseal-page")
            for field in (key, scope, run[start : start + page_bytes]):
                _feed(link, field)
            key = link.digest()
            found.append(key)
        return found


def _feed(digest: hashlib.blake2b, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)


def _checked(secret: bytes) -> bytes:
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"the secret has {len(secret)} bytes; it needs at least {SECRET_BYTES}")
    return hashlib.blake2b(secret, digest_size=64).digest()
