"""Every matrix of a model in the kernels' own form: taken from the cache on disk, or packed from the source.

Owns the choice of packing and the order of matrices in a slab. Never computes with them. Law L13: the packed numbers depend on the source
and the packing alone, not on whether they come from the cache, nor on how many threads packed them.

Which packing `--weights` gives (groups are 32 columns; inputs of grouped weights are rounded to 8 bits per
group of 32, see native/kernels.h):

====== ==========================================================================================================================
auto   as close to the file as a kernel allows: Q4_0, Q4_1 exactly as stored, Q4_K with its scales rounded to fp16, in 4-bit groups;
       Q8_0, Q5_0, Q5_1 exactly, Q5_K with rounded scales, Q6_K requantised, in 8-bit groups; BF16 as bf16; F16 and F32 as fp32
fp32   everything dequantised exactly to float32
bf16   everything rounded to bfloat16, float32 inputs and sums
q8     8-bit groups: stored 8-, 5- and 4-bit types keep their numbers as in auto, everything else is requantised (largest magnitude / 127)
q4     4-bit groups: stored 4-bit types as in auto, everything else requantised (scale and minimum of the smallest error, each
       column counted by the norm that scales its input)
====== ==========================================================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvseal import _native
from kvseal.core.errors import ConfigError, ModelCorrupt
from kvseal.exec.backend import Float32
from kvseal.exec.weights.packed_cache import PackedCache
from kvseal.exec.weights.types import LayerWeights, ModelWeights, TensorSource

_AS_STORED = {"F32": "fp32", "F16": "fp32", "BF16": "bf16", "Q4_0": "q4", "Q4_1": "q4m", "Q4_K": "q4m", "Q5_0": "q8", "Q5_1": "q8m",
              "Q5_K": "q8m", "Q6_K": "q8", "Q8_0": "q8"}  # fmt: skip
_IN_EIGHT = {"q4": "q8", "q4m": "q8m", "q8": "q8", "q8m": "q8m"}
"""Where the numbers of a grouped format fit as they are."""
_log = logging.getLogger("kvseal.exec")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""Of a layer, in the order in which they lie in a slab; the output projection comes last."""


def packing(weight_format: str, stored_type: str) -> str:
    """The kernel format for a stored tensor type under `--weights`. Raises ConfigError for an unknown option."""
    stored = _AS_STORED[stored_type]
    if weight_format == "auto":
        return stored
    if weight_format in ("fp32", "bf16"):
        return weight_format
    if weight_format == "q8":
        return _IN_EIGHT.get(stored, "q8")
    if weight_format == "q4":
        return stored if stored.startswith("q4") else "q4m"
    raise ConfigError(f"--weights is {weight_format!r}; choose from auto, fp32, bf16, q8, q4")


@dataclass(frozen=True, slots=True)
class PackedModel:
    layers: list[_native.Layer]
    lm_head: _native.PackedLinear
    bytes: int
    summary: str
    """The packings in use, the largest share first: "q4m+q8"."""
    file: Path | None
    """Where they are mapped from; None: they are in this process's own memory."""


def pack_model(weights: ModelWeights, weight_format: str, *, cache: PackedCache | None = None, threads: int = 1) -> PackedModel:
    """Maps the packed matrices from `cache`, or packs them (with so many threads) and leaves them there.

    Raises ModelCorrupt naming a matrix that is not finite: packing reads every value anyway, and nothing like it comes into the cache.
    """
    matrices = list(_matrices(weights))
    sources = [(source, packing(weight_format, source.type)) for source, _ in matrices]
    importance = [None if norm is None else vector(norm * norm) for _, norm in matrices]
    slab_bytes = sum(_native.packed_bytes(to, source.rows, source.columns) for source, to in sources)
    name = cache.name_of(weights, sources, importance) if cache is not None else ""
    mapped = cache.find(name, slab_bytes) if cache is not None else None
    placed: list[_native.PackedLinear] = []
    if mapped is None:
        slab = _native.WeightSlab(slab_bytes)
        placed = _filled(slab, sources, importance, threads)
        mapped = cache.keep(name, slab) if cache is not None else None
    if mapped is not None:
        placed = [mapped.place(source.rows, source.columns, to) for source, to in sources]
    weights.release_pages()
    rest = iter(placed)
    layers = [_layer(layer, {matrix: next(rest) for matrix in MATRICES}) for layer in weights.layers]
    file = cache.directory / name if cache is not None and mapped is not None else None
    if file is not None:
        _log.info("packed weights: %.1f MiB, mapped from %s", slab_bytes / 2**20, file)
    return PackedModel(layers, next(rest), slab_bytes, _summary(placed), file)


def _filled(
    slab: _native.WeightSlab, sources: list[tuple[TensorSource, str]], importance: list[Float32 | None], threads: int
) -> list[_native.PackedLinear]:
    placed = [slab.place(source.rows, source.columns, to) for source, to in sources]

    def fill(index: int) -> bool:
        source, _ = sources[index]
        return placed[index].fill(source.raw, source.type, source.row_order, importance[index])

    with ThreadPoolExecutor(max(1, threads)) as team:
        for index, is_finite in enumerate(team.map(fill, range(len(placed)))):
            if not is_finite:
                layer, matrix = divmod(index, len(MATRICES))
                where = f"{MATRICES[matrix]} projection of layer {layer}" if index < len(placed) - 1 else "output projection"
                raise ModelCorrupt(f"the model's {where} holds values that are not finite (NaN or infinite, or scales beyond fp16)")
    return placed


def _matrices(weights: ModelWeights) -> Iterator[tuple[TensorSource, Float32 | None]]:
    """In the order in which they lie in a slab; with each the norm that scales its inputs, column by column, where there is one.

    A fit of four bits counts errors by its square: where inputs are large, errors weigh.
    """
    for layer in weights.layers:
        yield from ((matrix, layer.attn_norm) for matrix in (layer.q, layer.k, layer.v))
        yield layer.o, None
        yield from ((matrix, layer.mlp_norm) for matrix in (layer.gate, layer.up))
        yield layer.down, None
    yield weights.lm_head or weights.embedding, weights.final_norm


def _layer(layer: LayerWeights, matrices: dict[str, _native.PackedLinear]) -> _native.Layer:
    return _native.Layer(
        **matrices,
        attn_norm=vector(layer.attn_norm),
        mlp_norm=vector(layer.mlp_norm),
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


def _summary(placed: list[_native.PackedLinear]) -> str:
    sizes: dict[str, int] = {}
    for matrix in placed:
        sizes[matrix.format] = sizes.get(matrix.format, 0) + matrix.bytes
    return "+".join(sorted(sizes, key=lambda name: -sizes[name]))


def vector(values: Float32) -> Float32:
    return np.ascontiguousarray(values, dtype=np.float32)


def _maybe(values: Float32 | None) -> Float32 | None:
    return None if values is None else vector(values)
