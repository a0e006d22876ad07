"""What is done to the ledger for many pages at once.

Owns operations on whole columns, each the same as a loop over its pages. Only the pool and the ledger call them, and say what follows
from a check that fails.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvseal.kv.ledger import Ledger

FEW_PAGES = 8
"""Up to so many, a loop that checks page after page is faster."""

Pages = npt.NDArray[np.intp]

_SCOPE = Struct("=QQ")


def pages_of(stamps: array[int]) -> Pages:
    """[pages], of page, nonce, page, nonce, ..."""
    return np.frombuffer(stamps, np.intp)[::2].copy() if stamps else np.empty(0, np.intp)


def are_current(ledger: Ledger, stamps: array[int]) -> bool:
    """Whether every page is handed out under the nonce that stands beside it."""
    nonces = np.frombuffer(stamps, np.uint64)[1::2]
    try:
        current = ledger.nonce.take(pages_of(stamps))
    except IndexError:
        return False
    return current.tobytes() == nonces.tobytes() and np.count_nonzero(current) == len(current)


def are_sealed(ledger: Ledger, pages: array[int], sealed: int, scope_words: tuple[int, int], first_ordinal: int) -> bool:
    """Whether all are in that state, of this scope, with consecutive ordinals."""
    at, count = np.frombuffer(pages, np.intp), len(pages)
    ordinals = np.arange(first_ordinal, first_ordinal + count, dtype=np.uint32)
    return (
        ledger.state.take(at).tobytes().count(sealed) == count
        and ledger.scope.take(at, axis=0).tobytes() == _SCOPE.pack(*scope_words) * count
        and ledger.ordinal.take(at).tobytes() == ordinals.tobytes()
    )


def hand_out(
    ledger: Ledger, pages: Pages, nonces: Sequence[int], state: int, holder: int, first_ordinal: int, scope_words: tuple[int, int]
) -> array[int]:
    """Free pages to one holder, with consecutive ordinals; returns their stamps."""
    stamps = np.empty((len(pages), 2), np.uint64)
    stamps[:, 0] = pages
    stamps[:, 1] = nonces
    ledger.state[pages] = state
    ledger.nonce[pages] = stamps[:, 1]
    ledger.holder[pages] = holder
    ledger.filled[pages] = 0
    ledger.ordinal[pages] = np.arange(first_ordinal, first_ordinal + len(pages))
    ledger.scope[pages] = scope_words
    return array("Q", stamps.tobytes())


def seal(ledger: Ledger, pages: Pages, digests: Sequence[bytes], state: int, page_tokens: int) -> None:
    """Full pages, whose holder becomes their one reader."""
    ledger.state[pages] = state
    ledger.filled[pages] = page_tokens
    ledger.holder[pages] = 0
    ledger.pins[pages] = 1
    ledger.digest[pages] = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def enter_cache(ledger: Ledger, pages: Pages) -> bool:
    """False, and nothing has changed, where one of them is cached already or read by nobody."""
    if np.count_nonzero(ledger.cached.take(pages)) or np.count_nonzero(ledger.pins.take(pages)) < len(pages):
        return False
    ledger.cached[pages] = 1
    return True
