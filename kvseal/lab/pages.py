"""Sealed pages without a model: payload made from a seed, sealed and digested as the engine would.

Owns what tests and benchmarks of the hand-off compare with. Laws L3-L7: every seal is complete and every digest is that of the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvseal.core.ids import Scope
from kvseal.exec.backends.reference_digest import page_fold, section_digests
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.ledger import scope_words
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE, SEAL_MAGIC

Memory = npt.NDArray[np.uint8]


def payload(geometry: KVGeometry, seed: bytes) -> Memory:
    """[layers, section_bytes - 64]: what a forward over such tokens would write, for tests; the same seed gives the same bytes."""
    number = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
    return np.random.default_rng(number).integers(0, 256, (geometry.layers, geometry.section_bytes - SEAL_BYTES), dtype=np.uint8)


def write_page(
    memory: Memory, geometry: KVGeometry, page: int, *, nonce: int, scope: Scope, ordinal: int, content: Memory, filled: int | None = None
) -> bytes:
    """Writes and seals one page; returns its fold (16 bytes)."""
    return write_digested(memory, geometry, page, digests_of(geometry, content), nonce, scope, ordinal, content, filled)


def digests_of(geometry: KVGeometry, content: Memory) -> npt.NDArray[np.uint64]:
    """[1, layers, 2]. Slow (the reference digest): made once for content that is written often."""
    return section_digests(np.ascontiguousarray(content).view("<u8"), geometry.format).reshape(1, geometry.layers, 2)


def write_digested(
    memory: Memory,
    geometry: KVGeometry,
    page: int,
    digests: npt.NDArray[np.uint64],
    nonce: int,
    scope: Scope,
    ordinal: int,
    content: Memory,
    filled: int | None = None,
) -> bytes:
    """`write_page` with the digests of the content at hand."""
    seals = np.zeros(geometry.layers, SEAL_DTYPE)
    seals["magic"], seals["nonce"], seals["format"], seals["ordinal"] = SEAL_MAGIC, nonce, geometry.format, ordinal
    seals["scope"] = scope_words(scope)
    seals["layer"] = np.arange(geometry.layers)
    seals["filled"] = geometry.page_tokens if filled is None else filled
    seals["digest"] = digests[0]
    sections = memory[page].reshape(geometry.layers, geometry.section_bytes)
    sections[:, :SEAL_BYTES] = seals.view(np.uint8).reshape(geometry.layers, SEAL_BYTES)
    sections[:, SEAL_BYTES:] = content
    return page_fold(digests).astype("<u8").tobytes()


def read_payload(memory: Memory, geometry: KVGeometry, page: int) -> Memory:
    found: Memory = memory[page].reshape(geometry.layers, geometry.section_bytes)[:, SEAL_BYTES:].copy()
    return found


def seed_of(tokens: Sequence[int]) -> bytes:
    """A page's content depends on every token up to its end, as K and V do."""
    return np.array(tokens, dtype="<u4").tobytes()


def compute(kv: KVManager, memory: Memory, grant: Grant, tokens: Sequence[int], end_tokens: int) -> None:
    """Stands for a forward from a page's beginning on: writes and commits the pages of `tokens` up to `end_tokens`, and seals those that
    are full. Behind the last token of one that is not lies something else."""
    geometry, size = kv.geometry, kv.geometry.page_tokens
    first = grant.table.valid_tokens // size
    folds = []
    for ordinal in range(first, -(-end_tokens // size)):
        page, nonce = grant.table.stamps[2 * ordinal], grant.table.stamps[2 * ordinal + 1]
        end = min((ordinal + 1) * size, end_tokens)
        content, filled = payload(geometry, seed_of(tokens[:end])), end - ordinal * size
        if filled == size:
            folds.append(write_page(memory, geometry, page, nonce=nonce, scope=grant.scope, ordinal=ordinal, content=content))
        else:
            unsealed = np.zeros((1, geometry.layers, 2), np.uint64)
            write_digested(memory, geometry, page, unsealed, nonce, grant.scope, ordinal, content, filled)
    if end_tokens > first * size:
        kv.commit(grant, list(tokens[first * size : end_tokens]), end_tokens, folds)


def closed(geometry: KVGeometry, content: Memory, filled: int) -> Memory:
    """`content` as `handoff.proof.close_tail` leaves it: zeros behind the first `filled` slots of every head, K and V, and their scales."""
    left = content.copy()
    heads, slots, elements = geometry.kv_heads, geometry.page_tokens, geometry.element_run_bytes
    for run in np.split(left, 2, axis=1):
        run[:, :elements].reshape(geometry.layers, heads, slots, -1)[:, :, filled:] = 0
        scales = heads * slots * geometry.kv_dtype.scale_bytes
        if scales:
            run[:, elements : elements + scales].reshape(geometry.layers, heads, slots, 4)[:, :, filled:] = 0
        run[:, elements + scales :] = 0
    return left
