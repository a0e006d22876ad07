"""What a node's prefix cache holds, told to whoever chooses the node: keys that came and keys that went.

Owns the key of every cached page (`prefix_key.PrefixKeys`, the key of every tier) and the changes since they were last taken. A key is a
hint of where to look, never a right to read: the node itself compares scope and tokens (L4, L4k). Only a node that a router feeds on
keeps one.
"""

from __future__ import annotations

from array import array

from kvseal.core.ids import Scope
from kvseal.kv.prefix_key import PrefixKeys

FEED_KEY_BYTES = 16
"""Of a page's 32-byte key; enough for a hint, and half the traffic."""


class CacheFeed:
    """Keys by page, and the changes that nobody has taken yet: at most one of each page, whatever happens between two takings."""

    def __init__(self, keys: PrefixKeys, pages: int) -> None:
        self._keys = keys
        self._key_of: list[bytes | None] = [None] * pages
        self._changes: dict[bytes, bool] = {}

    def published(self, scope: Scope, parent_page: int | None, run: bytes, stamps: array[int]) -> None:
        """`stamps` are the cached pages of `run` behind `parent_page`, old ones and new ones."""
        parent = None if parent_page is None else self._key_of[parent_page]
        if parent_page is not None and parent is None:
            return
        for page, key in zip(stamps[::2], self._keys.after(parent, scope, run), strict=True):
            if self._key_of[page] is None:
                self._key_of[page] = key
                self._change(key, True)

    def left(self, stamps: array[int]) -> None:
        """These pages are not cached any more."""
        for page in stamps[::2]:
            key, self._key_of[page] = self._key_of[page], None
            if key is not None:
                self._change(key, False)

    def take(self) -> tuple[bytes, bytes]:
        """Keys that came and keys that went since the last call, each a multiple of `FEED_KEY_BYTES`."""
        changes, self._changes = self._changes, {}
        came = b"".join(key for key, there in changes.items() if there)
        return came, b"".join(key for key, there in changes.items() if not there)

    def _change(self, key: bytes, there: bool) -> None:
        short = key[:FEED_KEY_BYTES]
        if self._changes.pop(short, there) is there:  # What came and went, or went and came, has not changed.
            self._changes[short] = there


def split_keys(joined: bytes) -> list[bytes]:
    return [joined[at : at + FEED_KEY_BYTES] for at in range(0, len(joined), FEED_KEY_BYTES)]
