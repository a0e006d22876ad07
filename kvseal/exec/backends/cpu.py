"""The native backend: packs the weights for the kernels of `kvseal._native` and hands them whole steps.

Owns the decoder and the arena; `exec.packed` packs the weights. Never decides what runs, never reads a page: appends, reads and their seal
checks (L3-L7, L10) are in the kernels. L12: a row that breaks a seal comes back flagged. L13: bits do not depend on batch, chunks, threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvseal import _native
from kvseal.core.errors import LawBroken, ModelUnsupported, PoolTooSmall
from kvseal.core.laws import Law
from kvseal.exec.backend import Float32, Int32, RowBreak, SealCheck, StepArrays, StepOutput
from kvseal.exec.backends.cpu_sampling import NativeSampler, native_sampling, point_of
from kvseal.exec.packed import pack_model, vector
from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.packed_cache import PackedCache
from kvseal.exec.weights.types import ModelWeights
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.native_layout import native_layout

MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class NativeArena:
    """Pages in one mapping: zero where never written, resident only where written."""

    native: _native.Arena

    @property
    def file(self) -> int:
        """Descriptor of a shared arena; -1 of a private one."""
        return self.native.file

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return self.native.memory

    def close(self) -> None:
        self.native.close()


def new_arena(geometry: KVGeometry, pages: int, *, shared: bool = False) -> NativeArena:
    """`shared`: a process on this host that is handed the arena's file may map it (hand-off). Raises PoolTooSmall when the machine cannot
    give that much address space."""
    try:
        return NativeArena(_native.Arena(pages, geometry.page_bytes, shared))
    except MemoryError as error:
        raise PoolTooSmall(
            f"the KV pool needs {pages * geometry.page_bytes} bytes ({pages} pages of {geometry.page_bytes}) and the machine cannot give "
            "them; ask for a smaller pool with --pool-tokens or --kv-memory"
        ) from error


class CPUBackend:
    """Implements `exec.backend.Backend` on the CPU. Not thread-safe; one call at a time."""

    def __init__(
        self,
        weights: ModelWeights,
        geometry: KVGeometry,
        *,
        pages: int,
        weight_format: str = "auto",
        threads: int = 0,
        instruction_set: str = "auto",
        packed_cache: PackedCache | None = None,
        shared_arena: bool = False,
    ) -> None:
        """Packs the weights, or maps them from where they were left packed, and reserves `pages` pages.

        Args:
            weight_format: one of `core.config.WEIGHT_FORMATS`.
            threads: 0 takes one per core that this process may use.
            instruction_set: "auto", or one to insist on ("portable", "avx2").
            packed_cache: where packed weights are kept and shared. None: in this process's memory.
            shared_arena: this worker hands pages off to processes on this host.

        Raises:
            ModelUnsupported: a head size that the kernels do not take.
            PoolTooSmall: the pool cannot be had.
        """
        spec = weights.spec
        if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
            raise ModelUnsupported(f"head_dim is {spec.head_dim}; the kernels take multiples of 8 up to {MAX_HEAD_DIM}")
        self.spec: ModelSpec = spec
        self.geometry = geometry
        self.arena = new_arena(geometry, pages, shared=shared_arena)
        threads = threads or len(os.sched_getaffinity(0))
        packed = pack_model(weights, weight_format, cache=packed_cache, threads=threads)
        embedding = weights.embedding
        self._decoder = _native.Decoder(
            numbers=_numbers(spec),
            layout=native_layout(geometry),
            arena=self.arena.native,
            layers=packed.layers,
            final_norm=vector(weights.final_norm),
            lm_head=packed.lm_head,
            embedding=embedding.raw,
            embedding_type=embedding.type,
            embedding_order=embedding.row_order,
            threads=threads,
            isa=instruction_set,
        )
        self.packed_bytes = packed.bytes
        self.packings = packed.summary
        self.packed_file = packed.file

    @property
    def instruction_set(self) -> str:
        return self._decoder.instruction_set

    @property
    def threads(self) -> int:
        return self._decoder.threads

    def forward(self, step: StepArrays) -> StepOutput:
        hidden = np.empty((int(step.hidden_counts.sum()), self.spec.hidden_size), dtype=np.float32)
        breaks = self._decoder.forward(
            tokens=step.tokens,
            row_offsets=step.row_offsets,
            start_positions=step.start_positions,
            tables=step.tables,
            scopes=step.scopes,
            hidden_counts=step.hidden_counts,
            ledger_nonces=step.ledger_nonces,
            hidden=hidden,
        )
        return StepOutput(hidden, row_breaks(breaks))

    def stepper(self) -> _native.Stepper:
        """Whole steps in which everybody decodes; never beside one of the calls here."""
        return self._decoder.stepper(self.geometry.page_tokens, native_sampling, point_of)

    def sampler(self) -> NativeSampler:
        """Draws on the decoder's threads, so never beside one of the calls here."""
        return NativeSampler(self._decoder.sampler())

    def logits(self, hidden: Float32) -> Float32:
        out = np.empty((hidden.shape[0], self.spec.vocab_size), dtype=np.float32)
        self._decoder.logits(hidden, out)
        return out

    def seal_digests(self, pages: Int32) -> npt.NDArray[np.uint8]:
        folds = np.empty((len(pages), 16), dtype=np.uint8)
        if not self._decoder.seal_digests(pages, folds):
            raise LawBroken(Law.L7, "a page was to be sealed before all its slots were written in every layer")
        return folds

    def wipe(self, pages: Int32) -> None:
        self.arena.memory[pages] = 0

    def close(self) -> None:
        self.arena.close()


def row_breaks(breaks: Sequence[tuple[int, int, int, int, int]]) -> tuple[RowBreak, ...]:
    """The kernels' tuples (row, check, page, ordinal, layer), in order of row."""
    return tuple(RowBreak(row, SealCheck(check), page, ordinal, layer) for row, check, page, ordinal, layer in sorted(breaks))


def _numbers(spec: ModelSpec) -> _native.ModelNumbers:
    numbers = _native.ModelNumbers()
    numbers.vocab_size = spec.vocab_size
    numbers.hidden_size = spec.hidden_size
    numbers.intermediate_size = spec.intermediate_size
    numbers.layers = spec.layers
    numbers.heads = spec.heads
    numbers.kv_heads = spec.kv_heads
    numbers.head_dim = spec.head_dim
    numbers.norm_eps = spec.norm_eps
    numbers.rope_magnitude = spec.rope.magnitude
    numbers.attention_scale = spec.attention_scale or spec.head_dim**-0.5
    numbers.embedding_multiplier = spec.embedding_multiplier
    numbers.residual_multiplier = spec.residual_multiplier
    numbers.logits_divisor = spec.logits_divisor
    numbers.inverse_frequencies = list(spec.rope.inverse_frequencies)
    numbers.windows = list(spec.windows)
    numbers.nope_layers = [int(nope) for nope in spec.nope_layers]
    return numbers
