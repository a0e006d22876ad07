"""The backend in NumPy: slow, and plainly right. Twin of the native kernels, to which they are compared.

Owns its arena and a float32 copy of the weights; only `--weights fp32`. One row after the other, one token's matrix product after the
other, so that nothing a row computes can depend on its neighbours (L13). Linear layers in float32, norms, softmax and sums in float64.
The seal checks (L3-L7, L10) are those of native/seal.h, comparison by comparison.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvseal.exec.backend import Float32, Int32, RowBreak, SealCheck, StepArrays, StepOutput, UInt64
from kvseal.exec.backends.reference_arena import Expected, ReferenceArena
from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.types import LayerWeights, ModelWeights
from kvseal.kv.geometry import KVGeometry

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Float32 matrices and vectors of one layer."""

    q: Float32
    k: Float32
    v: Float32
    o: Float32
    gate: Float32
    up: Float32
    down: Float32
    norms: LayerWeights
    """The layer as loaded, for its norms and biases."""

    @classmethod
    def of(cls, layer: LayerWeights) -> _Layer:
        return cls(
            q=layer.q.to_float32(),
            k=layer.k.to_float32(),
            v=layer.v.to_float32(),
            o=layer.o.to_float32(),
            gate=layer.gate.to_float32(),
            up=layer.up.to_float32(),
            down=layer.down.to_float32(),
            norms=layer,
        )


@dataclass(frozen=True, slots=True)
class _RowView:
    """One row of a step."""

    row: int
    tokens: Int32
    start: int
    pages: npt.NDArray[np.int64]
    nonces: UInt64
    scope: tuple[int, int]
    ledger: UInt64

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class _Broken(Exception):
    """Control flow inside one row: the first check that failed."""

    def __init__(self, check: SealCheck, *, page: int, ordinal: int, layer: int) -> None:
        super().__init__(check.name)
        self.found = (check, page, ordinal, layer)


class ReferenceBackend:
    """See `kvseal.exec.backend.Backend`."""

    spec: ModelSpec
    geometry: KVGeometry
    arena: ReferenceArena

    def __init__(self, weights: ModelWeights, geometry: KVGeometry, *, pages: int) -> None:
        """Dequantises all weights and allocates `pages` pages."""
        self.spec = weights.spec
        self.geometry = geometry
        self.arena = ReferenceArena(geometry, pages)
        self._embedding = weights.embedding.to_float32()
        self._lm_head = self._embedding if weights.lm_head is None else weights.lm_head.to_float32()
        self._final_norm = weights.final_norm
        self._layers = [_Layer.of(layer) for layer in weights.layers]
        self._frequencies = np.array(self.spec.rope.inverse_frequencies, dtype=np.float32)

    def forward(self, step: StepArrays) -> StepOutput:
        hidden = np.zeros((int(step.hidden_counts.sum()), self.spec.hidden_size), dtype=np.float32)
        breaks: list[RowBreak] = []
        place = 0
        for row in range(len(step.start_positions)):
            wanted = int(step.hidden_counts[row])
            try:
                states = self._row(_row_view(step, row))
                if wanted:
                    hidden[place : place + wanted] = _rms_norm(states[-wanted:], self._final_norm, self.spec.norm_eps)
            except _Broken as broken:
                check, page, ordinal, layer = broken.found
                breaks.append(RowBreak(row, check, page, ordinal, layer))
            place += wanted
        return StepOutput(hidden, breaks)

    def logits(self, hidden: Float32) -> Float32:
        return _linear(self._lm_head, hidden, None) / np.float32(self.spec.logits_divisor)

    def seal_digests(self, pages: Int32) -> npt.NDArray[np.uint8]:
        return self.arena.seal_digests(pages)

    def wipe(self, pages: Int32) -> None:
        self.arena.wipe(pages)

    def close(self) -> None:
        self.arena.close()

    def _row(self, row: _RowView) -> Float32:
        """[tokens, hidden_size] after the last layer. Raises _Broken."""
        spec = self.spec
        states = self._embedding[row.tokens] * np.float32(spec.embedding_multiplier)
        angles = np.arange(row.start, row.end, dtype=np.float32)[:, None] * self._frequencies
        cosines = (np.cos(angles.astype(np.float64)) * spec.rope.magnitude).astype(np.float32)
        sines = (np.sin(angles.astype(np.float64)) * spec.rope.magnitude).astype(np.float32)
        residual = np.float32(spec.residual_multiplier)
        for index, layer in enumerate(self._layers):
            norms = layer.norms
            x = _rms_norm(states, norms.attn_norm, spec.norm_eps)
            q = _linear(layer.q, x, norms.q_bias).reshape(len(x), spec.heads, spec.head_dim)
            k = _linear(layer.k, x, norms.k_bias).reshape(len(x), spec.kv_heads, spec.head_dim)
            v = _linear(layer.v, x, norms.v_bias).reshape(len(x), spec.kv_heads, spec.head_dim)
            if norms.q_norm is not None and norms.k_norm is not None:
                q, k = _rms_norm(q, norms.q_norm, spec.norm_eps), _rms_norm(k, norms.k_norm, spec.norm_eps)
            if not (spec.nope_layers and spec.nope_layers[index]):
                q, k = _rotate(q, cosines, sines), _rotate(k, cosines, sines)
            self._append(row, index, k, v)
            mixed = self._attend(row, index, q)
            states = states + residual * _linear(layer.o, mixed, norms.o_bias)
            x = _rms_norm(states, norms.mlp_norm, spec.norm_eps)
            inner = _silu(_linear(layer.gate, x, norms.gate_bias)) * _linear(layer.up, x, norms.up_bias)
            states = states + residual * _linear(layer.down, inner, norms.down_bias)
        return states

    def _page(self, row: _RowView, ordinal: int, layer: int) -> int:
        """The page that the table names, which must lie in the arena."""
        if ordinal >= len(row.pages):
            raise _Broken(SealCheck.TABLE, page=-1, ordinal=ordinal, layer=layer)
        page = int(row.pages[ordinal])
        if not 0 <= page < self.arena.pages:
            raise _Broken(SealCheck.TABLE, page=page, ordinal=ordinal, layer=layer)
        return page

    def _expected(self, row: _RowView, ordinal: int, layer: int) -> Expected:
        return Expected(int(row.nonces[ordinal]), row.scope, self.geometry.format, ordinal, layer)

    def _append(self, row: _RowView, layer: int, k: Float32, v: Float32) -> None:
        """Checks every page that is to be written, then writes K and V slot by slot and moves `filled` after them (L5)."""
        page_tokens = self.geometry.page_tokens
        for ordinal in range(row.start // page_tokens, self.geometry.pages_for(row.end)):
            page, slot = self._page(row, ordinal, layer), max(row.start - ordinal * page_tokens, 0)
            ledger_nonce = int(row.ledger[page])
            check = self.arena.check_write(page, self._expected(row, ordinal, layer), slot, ledger_nonce)
            if check is not SealCheck.CLEAN:
                raise _Broken(check, page=page, ordinal=ordinal, layer=layer)
        for index in range(len(row.tokens)):
            ordinal, slot = divmod(row.start + index, page_tokens)
            self.arena.write(int(row.pages[ordinal]), self._expected(row, ordinal, layer), slot, k[index], v[index])

    def _attend(self, row: _RowView, layer: int, q: Float32) -> Float32:
        """[tokens, heads * head_dim]. Checks every page that any of the row's queries reads, in order."""
        spec, page_tokens = self.spec, self.geometry.page_tokens
        window = spec.windows[layer] if spec.windows else 0
        first = max(row.start - window + 1, 0) if window else 0
        ordinals = range(first // page_tokens, self.geometry.pages_for(row.end))
        for ordinal in ordinals:
            needed = min(row.end - ordinal * page_tokens, page_tokens)
            page = self._page(row, ordinal, layer)
            check = self.arena.check_read(page, self._expected(row, ordinal, layer), needed)
            if check is not SealCheck.CLEAN:
                raise _Broken(check, page=page, ordinal=ordinal, layer=layer)
        keys, values = self.arena.read(row.pages[ordinals.start : ordinals.stop], layer)
        base = ordinals.start * page_tokens
        out = np.empty((len(q), spec.heads * spec.head_dim), dtype=np.float32)
        grouped = q.astype(np.float64).reshape(len(q), spec.kv_heads, spec.heads // spec.kv_heads, 1, spec.head_dim)
        for index in range(len(q)):
            position = row.start + index
            low = (max(position - window + 1, 0) if window else 0) - base
            high = position + 1 - base
            scores = (keys[:, None, low:high] * grouped[index]).sum(axis=-1) * spec.attention_scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[index] = (values[:, None, low:high] * weights[..., None]).sum(axis=2).reshape(-1)
        return out


def _row_view(step: StepArrays, row: int) -> _RowView:
    table: array[int] = step.tables[row]
    stamps = np.frombuffer(table, dtype=np.uint64) if len(table) else np.zeros(0, dtype=np.uint64)
    pages = np.minimum(stamps[0::2], np.uint64(2**62)).astype(np.int64)
    return _RowView(
        row=row,
        tokens=step.tokens[step.row_offsets[row] : step.row_offsets[row + 1]],
        start=int(step.start_positions[row]),
        pages=pages,
        nonces=stamps[1::2],
        scope=(int(step.scopes[row, 0]), int(step.scopes[row, 1])),
        ledger=step.ledger_nonces,
    )


def _linear(weight: Float32, x: Float32, bias: Float32 | None) -> Float32:
    """[n, in] -> [n, out], one product of the same shape per row."""
    out = np.empty((len(x), weight.shape[0]), dtype=np.float32)
    for index in range(len(x)):
        out[index] = weight @ x[index]
    return out if bias is None else out + bias


def _rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
    normed: Float32 = (wide * scale).astype(np.float32) * weight
    return normed


def _rotate(x: Float32, cosines: Float32, sines: Float32) -> Float32:
    """Rotates the first 2 * half dimensions of every head: i pairs with i + half (the Hugging Face order)."""
    half = cosines.shape[1]
    cos, sin = cosines[:, None, :], sines[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _silu(x: Float32) -> Float32:
    wide = x.astype(np.float64)
    return (wide / (1.0 + np.exp(-np.clip(wide, -700.0, None)))).astype(np.float32)
