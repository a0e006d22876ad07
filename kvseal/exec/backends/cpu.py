"""The native backend: packs the weights for the kernels of `kvseal._native` and hands them whole steps.

Owns the packed weights, the arena and the choice of packing. Never decides what runs, never reads a page: appends, reads and their seal
checks (L3-L7, L10) are in the kernels. L12: a row that breaks a seal comes back flagged. L13: bits do not depend on batch, chunks, threads.

Which packing `--weights` gives (groups are 32 columns; inputs of grouped weights are rounded to 8 bits per
group of 32, and groups with an outlier twice):

====== ==========================================================================================================================
auto   as close to the file as a kernel allows: Q4_0, Q4_1 exactly as stored, Q4_K with its scales rounded to fp16, in 4-bit groups;
       Q8_0, Q5_0, Q5_1 exactly, Q5_K with rounded scales, Q6_K requantised, in 8-bit groups; BF16 as bf16; F16 and F32 as fp32
fp32   everything dequantised exactly to float32
bf16   everything rounded to bfloat16, float32 inputs and sums
q8     8-bit groups: stored 8- and 5-bit types as in auto, everything else requantised (largest magnitude / 127)
q4     4-bit groups: stored 4-bit types as in auto, everything else requantised (scale and minimum over 15 steps)
====== ==========================================================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvseal import _native
from kvseal.core.errors import ConfigError, LawBroken, ModelUnsupported, PoolTooSmall
from kvseal.core.laws import Law
from kvseal.exec.backend import Float32, Int32, RowBreak, SealCheck, StepArrays, StepOutput
from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.types import LayerWeights, ModelWeights, TensorSource
from kvseal.kv.geometry import KVGeometry

_AS_STORED = {"F32": "fp32", "F16": "fp32", "BF16": "bf16", "Q4_0": "q4", "Q4_1": "q4m", "Q4_K": "q4m", "Q5_0": "q8", "Q5_1": "q8m",
              "Q5_K": "q8m", "Q6_K": "q8", "Q8_0": "q8"}  # fmt: skip
MAX_HEAD_DIM = 512


def packing(weight_format: str, stored_type: str) -> str:
    """The kernel format for a stored tensor type under `--weights`. Raises ConfigError for an unknown option."""
    stored = _AS_STORED[stored_type]
    if weight_format == "auto":
        return stored
    if weight_format in ("fp32", "bf16"):
        return weight_format
    if weight_format == "q8":
        return stored if stored.startswith("q8") else "q8"
    if weight_format == "q4":
        return stored if stored.startswith("q4") else "q4m"
    raise ConfigError(f"--weights is {weight_format!r}; choose from auto, fp32, bf16, q8, q4")


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


def native_layout(geometry: KVGeometry) -> _native.Layout:
    """The geometry's sizes as the kernels take them."""
    return _native.Layout(
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        page_tokens=geometry.page_tokens,
        kv_dtype=geometry.kv_dtype.value,
        run_bytes=geometry.run_bytes,
        element_run_bytes=geometry.element_run_bytes,
        section_bytes=geometry.section_bytes,
        page_bytes=geometry.page_bytes,
        format=geometry.format,
    )


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
        shared_arena: bool = False,
    ) -> None:
        """Packs the weights and reserves `pages` pages.

        Args:
            weight_format: one of `core.config.WEIGHT_FORMATS`.
            threads: 0 takes one per core that this process may use.
            instruction_set: "auto", or one to insist on ("portable", "avx2").
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
        packer = _Packer(weights, weight_format)
        layers = [packer.layer(layer) for layer in weights.layers]
        embedding = weights.embedding
        self._decoder = _native.Decoder(
            numbers=_numbers(spec),
            layout=native_layout(geometry),
            arena=self.arena.native,
            layers=layers,
            final_norm=_vector(weights.final_norm),
            lm_head=packer.pack(weights.lm_head or embedding),
            embedding=embedding.raw,
            embedding_type=embedding.type,
            embedding_order=embedding.row_order,
            threads=threads or len(os.sched_getaffinity(0)),
            isa=instruction_set,
        )
        self.packed_bytes = packer.used_bytes
        self.packings = packer.summary

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


class _Packer:
    """Packs every matrix of a model into one slab."""

    def __init__(self, weights: ModelWeights, weight_format: str) -> None:
        self._format = weight_format
        self._formats: dict[str, int] = {}
        sources = [*_matrices(weights), weights.lm_head or weights.embedding]
        self._slab = _native.WeightSlab(sum(_native.packed_bytes(self._of(s), s.rows, s.columns) for s in sources))

    def _of(self, source: TensorSource) -> str:
        return packing(self._format, source.type)

    def pack(self, source: TensorSource) -> _native.PackedLinear:
        packed = self._slab.pack(source.raw, source.type, source.rows, source.columns, self._of(source), source.row_order)
        self._formats[packed.format] = self._formats.get(packed.format, 0) + packed.bytes
        return packed

    def layer(self, layer: LayerWeights) -> _native.Layer:
        return _native.Layer(
            q=self.pack(layer.q),
            k=self.pack(layer.k),
            v=self.pack(layer.v),
            o=self.pack(layer.o),
            gate=self.pack(layer.gate),
            up=self.pack(layer.up),
            down=self.pack(layer.down),
            attn_norm=_vector(layer.attn_norm),
            mlp_norm=_vector(layer.mlp_norm),
            q_bias=_maybe(layer.q_bias),
            k_bias=_maybe(layer.k_bias),
            v_bias=_maybe(layer.v_bias),
            o_bias=_maybe(layer.o_bias),
            gate_bias=_maybe(layer.gate_bias),
            up_bias=_maybe(layer.up_bias),
            down_bias=_maybe(layer.down_bias),
            q_norm=_maybe(layer.q_norm),
            k_norm=_maybe(layer.k_norm),
        )

    @property
    def used_bytes(self) -> int:
        return self._slab.used_bytes

    @property
    def summary(self) -> str:
        """The packings in use, the largest share first: "q4m+q8"."""
        return "+".join(sorted(self._formats, key=lambda name: -self._formats[name]))


def _matrices(weights: ModelWeights) -> Iterator[TensorSource]:
    for layer in weights.layers:
        yield from (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)


def _vector(values: Float32) -> Float32:
    return np.ascontiguousarray(values, dtype=np.float32)


def _maybe(values: Float32 | None) -> Float32 | None:
    return None if values is None else _vector(values)


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
