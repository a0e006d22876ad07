"""The proof that pages in our memory are what the sender announced.

Owns `Landing`: the destination of one transfer, as buffers for a transport and as checks over our own memory. It is the only code of the
hand-off that touches payload bytes, through `native/handoff.h`. A page that has landed still bears its sender's nonce, so no kernel here
reads it; `restamp` gives it the granted one, and is called only after the whole was proven. `close_tail` is the sender's part: it makes a
page that is not full fit to travel. Laws L3 (nonce), L4 (scope), L5 (filled), L6 (ordinal, layer), L7 (digest), L9, L10 (format).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvseal import _native
from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.ledger import scope_words
from kvseal.kv.native_layout import native_layout
from kvseal.kv.seal import SealCheck

Memory = npt.NDArray[np.uint8]
"""[pages, page_bytes]"""


class Move(NamedTuple):
    """One page to be fetched."""

    ordinal: int
    source_page: int
    source_nonce: int
    """What the page's seals bear in the sender's arena."""
    page: int
    """Destination, in the receiver's arena. The transport may write it until the fence."""
    fold: bytes
    """The digest that was announced, 16 bytes."""
    filled: int
    """Slots written, in every layer: all of them, or fewer of a sequence's last page."""


@dataclass(frozen=True, slots=True)
class PageFault:
    """A page in our memory is not what was announced: the first difference. For the log, no content."""

    ordinal: int
    layer: int
    check: SealCheck

    def __str__(self) -> str:
        return f"ordinal {self.ordinal}, layer {self.layer}: {self.check.name.lower()} differs (law {self.check.law})"


class Claims:
    """Moves as arrays, made once and cut into batches. `moves` and every array have the same length and order."""

    __slots__ = ("filled", "folds", "moves", "nonces", "ordinals", "pages", "source_pages")

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = moves
        ordinals, sources, nonces, pages, folds, filled = zip(*moves, strict=True) if moves else ((), (), (), (), (), ())
        self.ordinals = np.array(ordinals, dtype=np.int32)
        self.source_pages = np.array(sources, dtype=np.int32)
        self.nonces = np.array(nonces, dtype=np.uint64)
        self.pages = np.array(pages, dtype=np.int32)
        self.folds = np.frombuffer(b"".join(folds), dtype=np.uint8).reshape(len(moves), 16)
        self.filled = np.array(filled, dtype=np.uint16)

    def __len__(self) -> int:
        return len(self.moves)

    def part(self, first: int, last: int) -> Claims:
        """Those from `first` up to `last`, which may be past the end."""
        found = Claims.__new__(Claims)
        found.moves = self.moves[first:last]
        found.ordinals = self.ordinals[first:last]
        found.source_pages = self.source_pages[first:last]
        found.nonces = self.nonces[first:last]
        found.pages = self.pages[first:last]
        found.folds = self.folds[first:last]
        found.filled = self.filled[first:last]
        return found


def claims_of(moves: Sequence[Move] | Claims) -> Claims:
    """Already made ones come back as they are."""
    return moves if isinstance(moves, Claims) else Claims(moves)


class Landing:
    """The receiving side of one transfer in our arena: `memory` [pages, page_bytes], writable. Calls release the GIL and are safe on a
    transport's thread, as long as the transfer's pages are leased and ticketed."""

    def __init__(self, memory: Memory, geometry: KVGeometry, scope: Scope) -> None:
        self.memory = memory
        self.page_bytes = geometry.page_bytes
        self._layout = native_layout(geometry)
        self._scope = np.array(scope_words(scope), dtype=np.uint64)

    def provide(self, pages: Sequence[int]) -> None:
        """Has the system provide the memory of these pages now: a first write to a page that never was in memory waits for it, which takes
        longer than the copy. What stands there does not change."""
        _native.provide_pages(memory=self.memory, pages=np.array(pages, dtype=np.int32))

    def copy(self, source: Memory, moves: Sequence[Move] | Claims) -> PageFault | None:
        """From the sender's arena as it is mapped here; every digest is that of the bytes as they are put in place. None: all are what
        was announced."""
        claims = claims_of(moves)
        return self._put(source, claims.source_pages, claims)

    def place(self, staged: Memory, moves: Sequence[Move] | Claims) -> PageFault | None:
        """As `copy`, from a buffer of ours that holds these pages in their order, as a stream has brought them."""
        claims = claims_of(moves)
        return self._put(staged, np.arange(len(claims), dtype=np.int32), claims)

    def _put(self, source: Memory, source_pages: npt.NDArray[np.int32], claims: Claims) -> PageFault | None:
        found = _native.copy_pages(
            layout=self._layout,
            memory=self.memory,
            source=source,
            source_pages=source_pages,
            scope=self._scope,
            pages=claims.pages,
            nonces=claims.nonces,
            ordinals=claims.ordinals,
            filled=claims.filled,
            folds=claims.folds,
        )
        return _fault(claims, found)

    def check(self, moves: Sequence[Move] | Claims) -> PageFault | None:
        """Compares every seal with what was announced, and every digest with the bytes that stand in our memory now."""
        claims = claims_of(moves)
        found = _native.check_pages(
            layout=self._layout,
            memory=self.memory,
            scope=self._scope,
            pages=claims.pages,
            nonces=claims.nonces,
            ordinals=claims.ordinals,
            filled=claims.filled,
            folds=claims.folds,
            recompute=True,
        )
        return _fault(claims, found)

    def restamp(self, moves: Sequence[Move] | Claims, nonces: Sequence[int]) -> None:
        """Gives proven pages the nonces that were granted; one that is not full has no digest from then on, and is its holder's to go on
        with. Raises `LawBroken` (L3) when a seal has changed since it was proven."""
        claims = claims_of(moves)
        found = _native.restamp_pages(
            layout=self._layout,
            memory=self.memory,
            scope=self._scope,
            pages=claims.pages,
            nonces=claims.nonces,
            ordinals=claims.ordinals,
            filled=claims.filled,
            folds=claims.folds,
            fresh_nonces=np.array(nonces, dtype=np.uint64),
        )
        fault = _fault(claims, found)
        if fault is not None:
            raise LawBroken(Law.L3, f"a page changed after it was proven: {fault}")


def close_tail(memory: Memory, geometry: KVGeometry, scope: Scope, page: int, nonce: int, ordinal: int, filled: int) -> bytes | PageFault:
    """For the holder of a page of which `filled` slots are written, not all, and nobody will write another: zeros behind them, so that
    nothing of whoever had the page before travels along, and a digest in every seal. Returns the page's digest, 16 bytes; or what a seal
    has that it should not, and nothing has changed."""
    fold = np.zeros(16, dtype=np.uint8)
    found = _native.close_tail(
        layout=native_layout(geometry),
        memory=memory,
        page=page,
        nonce=nonce,
        ordinal=ordinal,
        filled=filled,
        scope=np.array(scope_words(scope), dtype=np.uint64),
        fold=fold,
    )
    return fold.tobytes() if found is None else PageFault(ordinal, found[1], SealCheck(found[2]))


def _fault(claims: Claims, found: tuple[int, int, int] | None) -> PageFault | None:
    if found is None:
        return None
    index, layer, check = found
    return PageFault(claims.moves[index].ordinal, layer, SealCheck(check))


def seal_nonces(memory: Memory, pages: Sequence[int]) -> list[int]:
    """What the first seal of each of these pages of the arena bears now."""
    found: list[int] = np.ascontiguousarray(memory[np.array(pages, dtype=np.int64), 8:16]).view("<u8")[:, 0].tolist()
    return found
