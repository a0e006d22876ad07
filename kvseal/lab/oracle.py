"""A model whose next token is a hash of what it really read from the cache.

Owns `OracleBackend`: the arena, the seals and the door of a real backend, with no weights. Each layer writes one 64-bit value per token
into the token's slot (K and V hold different mixes of it) and then reads *all* slots of the sequence back from the pages. What it read
goes, with the position, into the token's own value and so into every later layer and token. Any foreign, missing, stale or misplaced
slot therefore changes the hidden state with certainty, and the greedy token but for one chance in `vocab_size`.

Laws L3-L7 and L10 are enforced here like in any backend: `_append_check` and `_attend_check` are the two places, so that a test can
build a twin without them and show what would have been read. All arithmetic is on integers, so results depend on nothing else (L13).
"""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
import numpy.typing as npt

from kvseal.exec.backend import Arena, Float32, Int32, RowBreak, SealCheck, StepArrays, StepOutput, UInt64
from kvseal.exec.spec import ModelSpec, RopeSpec
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE, SEAL_MAGIC

VALUE_BYTES = 8
HIDDEN_SIZE = 4
"""A 64-bit value as four 16-bit pieces, each exact in float32."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(value: UInt64) -> UInt64:
    """SplitMix64's finaliser: a bijection on 64 bits that changes half of them for any change."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    mixed: UInt64 = value ^ (value >> np.uint64(31))
    return mixed


def oracle_geometry(*, layers: int = 3, page_tokens: int = 16) -> KVGeometry:
    """One head of four fp16 elements: eight bytes for K and eight for V in each slot."""
    return KVGeometry(
        layers=layers, kv_heads=1, head_dim=4, kv_dtype=KVDtype.FP16, page_tokens=page_tokens, weights_digest=b"kvseal oracle model 1"
    )


def oracle_spec(geometry: KVGeometry, *, vocab_size: int = 4096, context_tokens: int = 4096) -> ModelSpec:
    return ModelSpec(
        family="oracle",
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        layers=geometry.layers,
        heads=1,
        kv_heads=1,
        head_dim=4,
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dims=0, inverse_frequencies=()),
        context_tokens=context_tokens,
        eos_tokens=(vocab_size - 1,),
    )


class OracleArena:
    def __init__(self, geometry: KVGeometry, pages: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.zeros((pages, geometry.page_bytes), np.uint8)

    def close(self) -> None:
        """Nothing is held outside the array."""


class OracleBackend:
    """Satisfies `exec.backend.Backend`."""

    def __init__(self, spec: ModelSpec, geometry: KVGeometry, pages: int) -> None:
        self.spec = spec
        self.geometry = geometry
        self.arena: Arena = OracleArena(geometry, pages)
        self.pages = pages
        self.look_at(self.arena.memory)

    def look_at(self, memory: npt.NDArray[np.uint8]) -> None:
        """[pages, page_bytes]: where the pages are."""
        geometry, section = self.geometry, self.geometry.section_bytes
        self._seals = [memory[:, at : at + SEAL_BYTES].view(SEAL_DTYPE)[:, 0] for at in range(0, geometry.page_bytes, section)]
        run = geometry.page_tokens * VALUE_BYTES
        starts = [layer * section + SEAL_BYTES for layer in range(geometry.layers)]
        self._keys = [memory[:, at : at + run].view(np.uint64) for at in starts]
        self._values = [memory[:, at : at + run].view(np.uint64) for at in (start + geometry.run_bytes for start in starts)]

    # --- the door ---

    def forward(self, step: StepArrays) -> StepOutput:
        hidden: list[Float32] = []
        breaks: list[RowBreak] = []
        for row in range(len(step.start_positions)):
            tokens = step.tokens[step.row_offsets[row] : step.row_offsets[row + 1]].astype(np.uint64)
            start, wanted = int(step.start_positions[row]), int(step.hidden_counts[row])
            state, broken = self._row(row, tokens, start, step)
            if broken is not None:
                breaks.append(broken)
            hidden.append(_to_hidden(state[len(state) - wanted :]))
        return StepOutput(np.concatenate(hidden), breaks)

    def logits(self, hidden: Float32) -> Float32:
        ids = np.arange(1, self.spec.vocab_size + 1, dtype=np.uint64) * _ODD
        scores = mix(_from_hidden(hidden)[:, None] + ids[None, :]) >> np.uint64(40)
        return (scores.astype(np.float32) / np.float32(2**20)).astype(np.float32)

    def seal_digests(self, pages: Int32) -> npt.NDArray[np.uint8]:
        folds = np.empty((len(pages), 16), np.uint8)
        size = self.geometry.section_bytes
        for i, page in enumerate(pages.tolist()):
            fold = hashlib.blake2b(digest_size=16)
            for layer in range(self.geometry.layers):
                run = self.arena.memory[page, layer * size + SEAL_BYTES : (layer + 1) * size]
                digest = hashlib.blake2b(run.tobytes(), digest_size=16).digest()
                self._seals[layer]["digest"][page] = np.frombuffer(digest, np.uint64)
                fold.update(digest)
            folds[i] = np.frombuffer(fold.digest(), np.uint8)
        return folds

    def wipe(self, pages: Int32) -> None:
        self.arena.memory[pages] = 0

    def close(self) -> None:
        self.arena.close()

    # --- one row ---

    def _row(self, row: int, tokens: UInt64, start: int, step: StepArrays) -> tuple[UInt64, RowBreak | None]:
        table, scope = step.tables[row], step.scopes[row]
        positions = np.arange(start, start + len(tokens), dtype=np.uint64)
        state = mix(tokens * _ODD + mix(positions + _ODD))
        for layer in range(self.geometry.layers):
            keys = mix(state + np.uint64(2 * layer + 1))
            broken = self._append(row, layer, keys, mix(keys ^ _ODD), start, table, scope, step.ledger_nonces)
            if broken is None:
                broken = self._attend_check(row, layer, start + len(tokens), table, scope)
            if broken is not None:
                return state, broken
            read = self._read(layer, start + len(tokens), table)
            state = mix(state + read[start:])
        return state, None

    def _append(
        self, row: int, layer: int, keys: UInt64, values: UInt64, start: int, table: array[int], scope: UInt64, ledger_nonces: UInt64
    ) -> RowBreak | None:
        """Writes slot by slot; `filled` moves after both planes are written (L5)."""
        page_tokens, seals = self.geometry.page_tokens, self._seals[layer]
        for i in range(len(keys)):
            ordinal, slot = divmod(start + i, page_tokens)
            broken = self._append_check(row, layer, ordinal, slot, table, scope, ledger_nonces)
            if broken is not None:
                return broken
            page = int(table[2 * ordinal])
            if slot == 0:
                nonce = table[2 * ordinal + 1]
                seals[page] = (SEAL_MAGIC, nonce, scope, self.geometry.format, ordinal, layer, 0, (0, 0))
            self._keys[layer][page, slot] = keys[i]
            self._values[layer][page, slot] = values[i]
            seals["filled"][page] = slot + 1
        return None

    def _append_check(
        self, row: int, layer: int, ordinal: int, slot: int, table: array[int], scope: UInt64, ledger_nonces: UInt64
    ) -> RowBreak | None:
        if 2 * ordinal >= len(table) or table[2 * ordinal] >= self.pages:
            return RowBreak(row, SealCheck.TABLE, 0, ordinal, layer)
        page, nonce = int(table[2 * ordinal]), table[2 * ordinal + 1]
        seal = self._seals[layer][page]
        if slot == 0:
            check = SealCheck.CLEAN
            if ledger_nonces[page] != nonce:
                check = SealCheck.LEDGER
            elif seal["magic"] == SEAL_MAGIC and seal["nonce"] == nonce:
                check = SealCheck.REUSED
        else:
            check = self._compare(seal, nonce, scope, ordinal, layer)
            if check is SealCheck.CLEAN and seal["filled"] != slot:
                check = SealCheck.FILLED
            elif check is SealCheck.CLEAN and seal["digest"].any():
                check = SealCheck.REUSED
        return None if check is SealCheck.CLEAN else RowBreak(row, check, page, ordinal, layer)

    def _attend_check(self, row: int, layer: int, end: int, table: array[int], scope: UInt64) -> RowBreak | None:
        page_tokens = self.geometry.page_tokens
        for ordinal in range(-(-end // page_tokens)):
            if 2 * ordinal >= len(table) or table[2 * ordinal] >= self.pages:
                return RowBreak(row, SealCheck.TABLE, 0, ordinal, layer)
            page, nonce = int(table[2 * ordinal]), table[2 * ordinal + 1]
            seal = self._seals[layer][page]
            check = self._compare(seal, nonce, scope, ordinal, layer)
            if check is SealCheck.CLEAN and seal["filled"] < min(page_tokens, end - ordinal * page_tokens):
                check = SealCheck.FILLED
            if check is not SealCheck.CLEAN:
                return RowBreak(row, check, page, ordinal, layer)
        return None

    def _compare(self, seal: np.void, nonce: int, scope: UInt64, ordinal: int, layer: int) -> SealCheck:
        if seal["magic"] != SEAL_MAGIC:
            return SealCheck.MAGIC
        if seal["nonce"] != nonce:
            return SealCheck.NONCE
        if seal["scope"][0] != scope[0] or seal["scope"][1] != scope[1]:
            return SealCheck.SCOPE
        if seal["format"] != self.geometry.format:
            return SealCheck.FORMAT
        if seal["layer"] != layer:
            return SealCheck.LAYER
        return SealCheck.CLEAN if seal["ordinal"] == ordinal else SealCheck.ORDINAL

    def _read(self, layer: int, end: int, table: array[int]) -> UInt64:
        """[end]: for each position the sum over itself and all before it of what stands in their slots, mixed with where they stand."""
        pages = np.array(table[: 2 * -(-end // self.geometry.page_tokens) : 2], dtype=np.int64)
        keys = self._keys[layer][pages].reshape(-1)[:end]
        values = self._values[layer][pages].reshape(-1)[:end]
        places = np.arange(1, end + 1, dtype=np.uint64) * _ODD
        sums: UInt64 = np.cumsum(mix(keys + places) ^ mix(values + places * _MIX_1), dtype=np.uint64)
        return sums


def _to_hidden(state: UInt64) -> Float32:
    shifts = np.array([0, 16, 32, 48], dtype=np.uint64)
    return ((state[:, None] >> shifts) & np.uint64(0xFFFF)).astype(np.float32)


def _from_hidden(hidden: Float32) -> UInt64:
    pieces = hidden.astype(np.uint64)
    whole: UInt64 = pieces[:, 0] | pieces[:, 1] << np.uint64(16) | pieces[:, 2] << np.uint64(32) | pieces[:, 3] << np.uint64(48)
    return whole
