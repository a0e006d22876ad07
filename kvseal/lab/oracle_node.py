"""A node of several whose model is the oracle: real down to the bytes of its pages, without weights.

Owns `oracle_node` and the oracle with the digests of the native kernels, which the receiving end recomputes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvseal.core.clock import Clock
from kvseal.core.config import EngineConfig, NodeConfig
from kvseal.exec.backend import Int32
from kvseal.exec.backends.cpu import NativeArena, new_arena
from kvseal.exec.backends.reference_digest import page_fold, section_digests
from kvseal.exec.runner import Runner
from kvseal.exec.spec import ModelSpec
from kvseal.handoff.proof import Memory
from kvseal.handoff.prover import Prover
from kvseal.handoff.transport import Transport
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import KVManager
from kvseal.kv.seal import SEAL_BYTES
from kvseal.lab.oracle import OracleBackend, oracle_geometry, oracle_spec
from kvseal.node.build import start_report
from kvseal.node.build_node import assemble_node
from kvseal.node.node_engine import NodeEngine
from kvseal.sched.receiving import HandoffScheduler


class SealingOracle(OracleBackend):
    """The oracle with the digests that the native kernels compute, in an arena that other processes may map."""

    def __init__(self, spec: ModelSpec, geometry: KVGeometry, pages: int) -> None:
        super().__init__(spec, geometry, pages)
        self.arena: NativeArena = new_arena(geometry, pages, shared=True)
        self.look_at(self.arena.memory)

    def seal_digests(self, pages: Int32) -> npt.NDArray[np.uint8]:
        geometry = self.geometry
        sections = self.arena.memory[pages].reshape(len(pages), geometry.layers, geometry.section_bytes)
        words = np.ascontiguousarray(sections[:, :, SEAL_BYTES:]).view("<u8").reshape(len(pages) * geometry.layers, -1)
        digests = section_digests(words, geometry.format).reshape(len(pages), geometry.layers, 2)
        for layer in range(geometry.layers):
            self._seals[layer]["digest"][pages] = digests[:, layer]
        return page_fold(digests).view(np.uint8).reshape(len(pages), 16)


def oracle_node(
    node: NodeConfig,
    transport: Callable[[Memory, int], Transport] | None,
    *,
    clock: Clock,
    secret: bytes,
    pages: int = 64,
    page_tokens: int = 8,
    chunk_tokens: int = 512,
    max_running: int = 64,
    max_queued: int = 1024,
    context_tokens: int | None = None,
    backend_class: type[SealingOracle] = SealingOracle,
    prover: Prover | None = None,
) -> NodeEngine:
    """`transport` makes one from the arena and its file; None: as the server would. `secret`: of the nonces, one of its own for each."""
    geometry = oracle_geometry(layers=2, page_tokens=page_tokens)
    spec = oracle_spec(geometry, context_tokens=context_tokens or pages * page_tokens)
    config = EngineConfig(
        model=Path("oracle"), backend="reference", chunk_tokens=chunk_tokens, max_running=max_running, max_queued=max_queued, node=node
    )
    capacity = Capacity.derive(model_context_tokens=spec.context_tokens, pool_pages=pages, page_tokens=page_tokens)
    backend = backend_class(spec, geometry, pages)
    report = start_report(config, spec, geometry, capacity, weights_format="none", weights_bytes=0, threads=1, instruction_set="none")
    kv = KVManager(geometry, pool_pages=pages, capacity=capacity, secret=secret)
    scheduler = HandoffScheduler(
        kv, clock, chunk_tokens=chunk_tokens, max_running=max_running, max_queued=max_queued, page_tokens=page_tokens
    )
    made = None if transport is None else transport(backend.arena.memory, backend.arena.file)
    return assemble_node(node, scheduler, kv, report, Runner(backend), backend, clock, transport=made, prover=prover)
