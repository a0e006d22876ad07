"""What the tests of the cache share: a small geometry, digests that follow the tokens, and an arena whose seals obey the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvseal.core.ids import RequestId, Scope
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.ledger import PageState
from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.pool import PagePool
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE, SEAL_MAGIC

PAGE = 4
ALICE = Scope(b"alice-alice-alic")
BOB = Scope(b"bob-bob-bob-bob-")


def digests_of(scope: Scope, tokens: Sequence[int], first_page: int, end_page: int) -> list[bytes]:
    """What a deterministic model would digest: a function of all tokens up to the end of each page."""
    prefixes = (tokens[: (page + 1) * PAGE] for page in range(first_page, end_page))
    return [hashlib.blake2b(scope + repr(list(prefix)).encode(), digest_size=16).digest() for prefix in prefixes]


def compute(manager: KVManager, grant: Grant, tokens: Sequence[int], end_tokens: int) -> None:
    """One forward: room, then commit of tokens[valid:end_tokens]."""
    valid = grant.table.valid_tokens
    assert manager.grow(grant, end_tokens)
    digests = digests_of(grant.scope, tokens, valid // PAGE, end_tokens // PAGE)
    manager.commit(grant, tokens[valid:end_tokens], end_tokens, digests)


def serve(manager: KVManager, name: str, scope: Scope, tokens: Sequence[int]) -> Grant:
    """Admits a request and computes all its tokens."""
    cached = manager.probe(scope, tokens)
    grant = manager.admit(RequestId(name), scope, tokens, first_tokens=len(tokens) - cached)
    assert grant is not None
    compute(manager, grant, tokens, len(tokens))
    return grant


def seals_of(pool: PagePool) -> npt.NDArray[np.uint8]:
    """Arena memory [pages, page_bytes] in which every page bears exactly the seals that the ledger expects."""
    geometry, ledger = pool.geometry, pool.ledger
    memory = np.zeros((pool.pages, geometry.page_bytes), np.uint8)
    for page in np.flatnonzero((ledger.state == PageState.SEALED) | (ledger.state == PageState.LEASED)).tolist():
        for layer in range(geometry.layers):
            start = layer * geometry.section_bytes
            seal = memory[page, start : start + SEAL_BYTES].view(SEAL_DTYPE)[0]
            seal["magic"], seal["nonce"], seal["scope"] = SEAL_MAGIC, ledger.nonce[page], ledger.scope[page]
            seal["format"], seal["ordinal"], seal["layer"] = geometry.format, ledger.ordinal[page], layer
            seal["filled"] = ledger.filled[page]
            seal["digest"] = 7 if ledger.state[page] == PageState.SEALED else 0
    return memory


def seal_at(memory: npt.NDArray[np.uint8], geometry: KVGeometry, page: int, layer: int = 0) -> npt.NDArray[np.void]:
    """One seal as an array of one element: assigning to its fields changes the memory."""
    start = layer * geometry.section_bytes
    return memory[page, start : start + SEAL_BYTES].view(SEAL_DTYPE)


@pytest.fixture
def geometry() -> KVGeometry:
    return KVGeometry(layers=2, kv_heads=1, head_dim=8, page_tokens=PAGE)


@pytest.fixture
def pool(geometry: KVGeometry) -> PagePool:
    return PagePool(geometry, 8, secret=b"test secret")


@pytest.fixture
def make_manager(geometry: KVGeometry) -> Callable[..., KVManager]:
    def make(pages: int = 16, *, wipe: Callable[[Sequence[int]], None] | None = None) -> KVManager:
        capacity = Capacity.derive(model_context_tokens=10_000, pool_pages=pages, page_tokens=PAGE)
        return KVManager(geometry, pool_pages=pages, capacity=capacity, secret=b"test secret", wipe=wipe)

    return make


@pytest.fixture
def manager(make_manager: Callable[..., KVManager]) -> KVManager:
    return make_manager()
