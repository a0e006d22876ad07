"""append and attend alone: every KV dtype, head layout and window against NumPy; every seal check in the page's own memory.

L3-L7, L10: one field changed, one check reported, nothing else touched. L12: other rows keep their bits. L13: chunks, partitions and
instruction sets.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvseal.exec.backend import RowBreak, SealCheck
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.kv.seal import SEAL_BYTES, SEAL_DTYPE

_native = pytest.importorskip("kvseal._native", reason="the native part is not built")
cpu = pytest.importorskip("kvseal.exec.backends.cpu", reason="the native part is not built")
native_layout = pytest.importorskip("kvseal.kv.native_layout", reason="the native part is not built")

Float32 = npt.NDArray[np.float32]
SCOPE = (11, 22)
DTYPES = ["fp32", "fp16", "int8", "int4"]


def instruction_sets() -> list[str]:
    return _native.instruction_sets()


every_isa = pytest.mark.parametrize("isa", instruction_sets())


@dataclass
class Row:
    stamps: array[int]
    start: int
    count: int
    scope: tuple[int, int] = SCOPE


@dataclass
class Cache:
    """An arena of two layers and a ledger; hands out stamps."""

    kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "fp16"
    page_tokens: int = 16
    pages: int = 24
    isa: str = "auto"
    layer: int = 1
    geometry: KVGeometry = field(init=False)
    ledger: npt.NDArray[np.uint64] = field(init=False)
    next_page: int = 0

    def __post_init__(self) -> None:
        self.geometry = KVGeometry(
            layers=2, kv_heads=self.kv_heads, head_dim=self.head_dim, kv_dtype=KVDtype(self.dtype), page_tokens=self.page_tokens
        )
        self.arena = cpu.new_arena(self.geometry, self.pages)
        self.layout = native_layout.native_layout(self.geometry)
        self.ledger = np.zeros(self.pages, dtype=np.uint64)

    def table(self, tokens: int) -> array[int]:
        stamps = array("Q")
        for _ in range(self.geometry.pages_for(tokens)):
            self.ledger[self.next_page] = 900 + 7 * self.next_page
            stamps.extend((self.next_page, 900 + 7 * self.next_page))
            self.next_page += 1
        return stamps

    @property
    def seals(self) -> npt.NDArray[np.void]:
        """[pages] seals of the layer under test; live."""
        geometry = self.geometry
        sections = self.arena.memory.reshape(self.pages, geometry.layers, geometry.section_bytes)[:, self.layer, :SEAL_BYTES]
        return np.lib.stride_tricks.as_strided(sections[:, :1].view(np.uint8), (self.pages, SEAL_BYTES), sections.strides).view(SEAL_DTYPE)[
            :, 0
        ]

    def _rows(self, rows: list[Row]) -> dict[str, object]:
        return {
            "arena": self.arena.native,
            "layout": self.layout,
            "layer": self.layer,
            "row_offsets": np.cumsum([0, *(row.count for row in rows)], dtype=np.int32),
            "start_positions": np.array([row.start for row in rows], dtype=np.int32),
            "tables": [row.stamps for row in rows],
            "scopes": np.array([row.scope for row in rows], dtype=np.uint64).reshape(-1, 2),
            "isa": self.isa,
        }

    def append(self, rows: list[Row], k: Float32, v: Float32) -> tuple[RowBreak, ...]:
        return cpu.row_breaks(_native.append(**self._rows(rows), ledger_nonces=self.ledger, k=k, v=v))

    def attend(self, rows: list[Row], q: Float32, window: int = 0, by_partition: bool = False) -> tuple[Float32, tuple[RowBreak, ...]]:
        out = np.full_like(q, np.nan)
        scale = self.head_dim**-0.5
        breaks = _native.attend(**self._rows(rows), q=q, out=out, scale=scale, window=window, by_partition=by_partition)
        return out, cpu.row_breaks(breaks)

    def random(self, tokens: int, heads: int, seed: int) -> Float32:
        return np.random.default_rng(seed).standard_normal((tokens, heads, self.head_dim), dtype=np.float32)

    def filled(self, tokens: int, seed: int = 1, chunks: tuple[int, ...] = ()) -> tuple[Row, Float32, Float32]:
        """A row whose first `tokens` tokens are in the cache, with their K and V."""
        k, v = self.random(tokens, self.kv_heads, seed), self.random(tokens, self.kv_heads, seed + 1)
        row = Row(self.table(tokens + self.page_tokens), 0, 0)
        for count in (*chunks, tokens):
            row.count = min(count, tokens - row.start)
            if row.count:
                at = slice(row.start, row.start + row.count)
                assert not self.append([row], k[at], v[at])
                row.start += row.count
        return row, k, v


def rounded(x: Float32, dtype: str) -> npt.NDArray[np.float64]:
    """What the cache keeps of x."""
    if dtype == "fp32":
        return x.astype(np.float64)
    if dtype == "fp16":
        return x.astype(np.float16).astype(np.float64)
    if dtype == "int8":
        top = np.abs(x).max(axis=-1, keepdims=True)
        return np.rint(x * (np.float32(127) / top)).astype(np.float64) * (top / np.float32(127)).astype(np.float64)
    turned = hadamard(x)
    peak = np.take_along_axis(turned, np.abs(turned).argmax(axis=-1)[..., None], axis=-1)
    kept = np.rint(np.minimum(turned * (np.float32(-8) / peak), np.float32(7))).astype(np.float64) * (peak / np.float32(-8)).astype(
        np.float64
    )
    return hadamard(kept) / (x.shape[-1] & -x.shape[-1])


def hadamard(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sums and differences of neighbours, of pairs, of fours ..., within blocks of the largest power of two that divides the row."""
    out, half = x.copy(), 1
    while half < (x.shape[-1] & -x.shape[-1]):
        first = [i for i in range(x.shape[-1]) if i // half % 2 == 0]
        second = [i + half for i in first]
        out[..., first], out[..., second] = out[..., first] + out[..., second], out[..., first] - out[..., second]
        half *= 2
    return out


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_four_bits_keep_a_key_with_a_few_large_dimensions(head_dim: int) -> None:
    """As keys of real models are: without turning, the large ones take all levels, and the rest is lost."""
    x = np.random.default_rng(3).standard_normal((200, 1, head_dim)).astype(np.float32)
    x[..., [3, 7]] += 20.0
    plain = np.rint(x * (7 / np.abs(x).max(axis=-1, keepdims=True))) * np.abs(x).max(axis=-1, keepdims=True) / 7
    assert ((rounded(x, "int4") - x) ** 2).mean() < 0.6 * ((plain - x) ** 2).mean()


def attention(q: Float32, k: Float32, v: Float32, start: int, window: int, dtype: str) -> npt.NDArray[np.float64]:
    """q [tokens, heads, dim] at positions start.., k and v [all tokens, kv_heads, dim]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(rounded(x, dtype), group, axis=1) for x in (k, v))
    out = np.empty(q.shape)
    for index in range(len(q)):
        high = start + index + 1
        low = max(0, high - window) if window else 0
        scores = np.einsum("hd,shd->hs", q[index].astype(np.float64), keys[low:high]) * q.shape[2] ** -0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[index] = np.einsum("hs,shd->hd", weights / weights.sum(axis=1, keepdims=True), values[low:high])
    return out


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (8, 2, 80), (14, 2, 64), (4, 4, 96), (2, 1, 128), (2, 2, 256), (33, 1, 8)]
)
def test_attention_matches_numpy(heads: int, kv_heads: int, head_dim: int, dtype: str, isa: str) -> None:
    cache = Cache(kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, isa=isa)
    row, k, v = cache.filled(45)
    row.start, row.count = 20, 25
    q = cache.random(25, heads, 5)
    out, breaks = cache.attend([row], q)
    assert not breaks
    allowed = 1e-5 if dtype == "int4" else 3e-6  # float32 sums of what is turned, sqrt(head_dim) times as large
    assert np.abs(out - attention(q, k, v, 20, 0, dtype)).max() <= allowed


@every_isa
@pytest.mark.parametrize("page_tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("window", [0, 1, 5, 16, 100, 256, 300, 1000])
@pytest.mark.parametrize("heads", [6, 8, 10])
def test_long_rows_cross_partitions_and_windows(page_tokens: int, window: int, heads: int, isa: str) -> None:
    """Groups of 3, 4 and 5 heads: tiles of queries that see the same slots, and tiles that do not."""
    cache = Cache(kv_heads=2, page_tokens=page_tokens, pages=700 // page_tokens + 2, isa=isa)
    row, k, v = cache.filled(600)
    row.start, row.count = 500, 100
    q = cache.random(100, heads, 5)
    out, breaks = cache.attend([row], q, window)
    assert not breaks
    assert np.abs(out - attention(q, k, v, 500, window, "fp16")).max() <= 3e-6
    for first, count in ((0, 1), (13, 1), (99, 1), (11, 37)):  # alone, in other blocks, and partition by partition: the same bits
        part = Row(row.stamps, 500 + first, count)
        for by_partition in (False, True):
            alone, _ = cache.attend([part], q[first : first + count], window, by_partition)
            np.testing.assert_array_equal(alone, out[first : first + count])


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_leave_the_same_pages(dtype: str, isa: str) -> None:
    cache = Cache(dtype=dtype, isa=isa)
    whole, _, _ = cache.filled(40)
    chunked, _, _ = cache.filled(40, chunks=(1, 15, 1, 3, 13))
    memory = cache.arena.memory
    for a, b in zip(whole.stamps[0:6:2], chunked.stamps[0:6:2], strict=True):
        np.testing.assert_array_equal(
            memory[a, cache.geometry.section_bytes + SEAL_BYTES :], memory[b, cache.geometry.section_bytes + SEAL_BYTES :]
        )
    assert not memory[:, : cache.geometry.section_bytes].any(), "the other layer is untouched"


def test_the_seal_says_what_was_written() -> None:
    cache = Cache()
    row, _, _ = cache.filled(20)
    for ordinal, filled in enumerate((16, 4)):
        seal = cache.seals[row.stamps[2 * ordinal]]
        assert (int(seal["nonce"]), tuple(seal["scope"]), int(seal["format"])) == (
            row.stamps[2 * ordinal + 1],
            SCOPE,
            cache.geometry.format,
        )
        assert (seal["ordinal"], seal["layer"], seal["filled"], seal["digest"].any()) == (ordinal, 1, filled, False)


def damage(cache: Cache, page: int, check: SealCheck) -> None:
    seal = cache.seals[page : page + 1]
    name = {"MAGIC": "magic", "NONCE": "nonce", "FORMAT": "format", "LAYER": "layer", "ORDINAL": "ordinal"}.get(check.name)
    if name is not None:
        seal[name] ^= 4
    elif check is SealCheck.SCOPE:
        seal["scope"][0, 1] ^= 1
    else:
        seal["filled"] -= 1


@every_isa
@pytest.mark.parametrize("check", list(SealCheck)[1:8])
@pytest.mark.parametrize("ordinal", [0, 2])
@pytest.mark.parametrize("by_partition", [False, True])
def test_attend_refuses_a_page_that_does_not_match(check: SealCheck, ordinal: int, by_partition: bool, isa: str) -> None:
    cache = Cache(isa=isa)
    rows, q = [cache.filled(40, seed)[0] for seed in (1, 5, 9)], cache.random(9, 9, 20)
    for row in rows:
        row.start, row.count = 37, 3
    clean, _ = cache.attend(rows, q, by_partition=by_partition)
    damage(cache, rows[1].stamps[2 * ordinal], check)
    before = cache.arena.memory.copy()
    out, breaks = cache.attend(rows, q, by_partition=by_partition)
    assert breaks == (RowBreak(1, check, rows[1].stamps[2 * ordinal], ordinal, 1),)
    assert not out[3:6].any(), "nothing was read"
    np.testing.assert_array_equal(out[[0, 1, 2, 6, 7, 8]], clean[[0, 1, 2, 6, 7, 8]])
    np.testing.assert_array_equal(cache.arena.memory, before)


@every_isa
def test_attend_refuses_tables_that_do_not_reach(isa: str) -> None:
    cache = Cache(isa=isa)
    row, _, _ = cache.filled(40)
    row.start, row.count = 39, 1
    q = cache.random(1, 9, 2)
    out, breaks = cache.attend([Row(row.stamps[:4], 39, 1)], q)
    assert breaks == (RowBreak(0, SealCheck.TABLE, -1, 2, 1),)
    assert not out.any()
    far = array("Q", row.stamps)
    far[2] = cache.pages
    assert cache.attend([Row(far, 39, 1)], q)[1] == (RowBreak(0, SealCheck.TABLE, cache.pages, 1, 1),)


@every_isa
def test_slots_past_filled_and_pages_past_the_end_are_never_used(isa: str) -> None:
    for dtype in DTYPES:
        cache = Cache(isa=isa, dtype=dtype)
        row, _, _ = cache.filled(21)
        row.start, row.count = 18, 3
        q = cache.random(3, 9, 2)
        clean, _ = cache.attend([row], q)
        fresh = Cache(isa=isa, dtype=dtype)
        fresh.arena.memory.reshape(fresh.pages, 2, -1)[:, 1, SEAL_BYTES:] = 0xFF  # NaN in every slot that is not written
        again, _, _ = fresh.filled(21)
        again.start, again.count = 18, 3
        np.testing.assert_array_equal(fresh.attend([again], q)[0], clean)


def broken_append(cache: Cache, row: Row, check: SealCheck, ordinal: int) -> None:
    """Between two sound neighbours the row is flagged, and nothing of it is written."""
    left, right = (cache.filled(10, seed)[0] for seed in (31, 41))
    left.count = right.count = 2
    k, v = (cache.random(4 + row.count, cache.kv_heads, seed) for seed in (51, 52))
    before = cache.arena.memory.copy()
    breaks = cache.append([left, row, right], k, v)
    has_page = 2 * ordinal < len(row.stamps)
    assert breaks == (RowBreak(1, check, row.stamps[2 * ordinal] if has_page else -1, ordinal, 1),)
    changed = set(np.flatnonzero((cache.arena.memory != before).any(axis=1)).tolist())
    assert changed == {left.stamps[0], right.stamps[0]}
    assert [int(cache.seals[row.stamps[0]]["filled"]) for row in (left, right)] == [12, 12]


@every_isa
@pytest.mark.parametrize("check", list(SealCheck)[1:8])
def test_append_refuses_a_page_that_does_not_match(check: SealCheck, isa: str) -> None:
    cache = Cache(isa=isa)
    row, _, _ = cache.filled(20)
    row.count = 3
    damage(cache, row.stamps[2], check)
    broken_append(cache, row, check, 1)


@pytest.mark.parametrize("start", [19, 21])
def test_append_writes_the_next_slot_only(start: int) -> None:
    cache = Cache()
    row, _, _ = cache.filled(20)
    row.start, row.count = start, 1
    broken_append(cache, row, SealCheck.FILLED, 1)


def test_append_refuses_a_hand_out_that_the_ledger_does_not_know() -> None:
    for ledger_nonce in (0, 5):
        cache = Cache()
        row, _, _ = cache.filled(16)
        row.count = 1
        cache.ledger[row.stamps[2]] = ledger_nonce
        broken_append(cache, row, SealCheck.LEDGER, 1)


def test_append_begins_a_hand_out_once() -> None:
    cache = Cache()
    row, _, _ = cache.filled(20)
    row.start, row.count = 16, 1
    broken_append(cache, row, SealCheck.REUSED, 1)


def test_append_never_writes_a_sealed_page() -> None:
    cache = Cache()
    row, _, _ = cache.filled(20)
    row.count = 1
    cache.seals[row.stamps[2] : row.stamps[2] + 1]["digest"][0, 1] = 1
    broken_append(cache, row, SealCheck.REUSED, 1)


def test_append_refuses_tables_that_do_not_reach() -> None:
    cache = Cache()
    row, _, _ = cache.filled(20)
    row.count, row.stamps = 13, row.stamps[:4]
    broken_append(cache, row, SealCheck.TABLE, 2)
    far = Cache()
    other, _, _ = far.filled(16)
    other.count = 1
    other.stamps[2] = 2**64 - 1
    far_breaks = far.append([other], far.random(1, 3, 1), far.random(1, 3, 2))
    assert [(found.check, found.ordinal) for found in far_breaks] == [(SealCheck.TABLE, 1)]


def test_a_later_page_that_does_not_match_stops_the_whole_row() -> None:
    cache = Cache()
    row, _, _ = cache.filled(20)
    row.stamps.extend((5, 1234))  # a stamp that nobody handed out
    row.count = 30
    broken_append(cache, row, SealCheck.LEDGER, 3)


def test_one_page_in_two_rows_is_written_once() -> None:
    cache = Cache()
    row, _, _ = cache.filled(20)
    twin = Row(array("Q", row.stamps), 20, 1)
    row.count = 1
    breaks = cache.append([row, twin], cache.random(2, 3, 1), cache.random(2, 3, 2))
    assert breaks == (RowBreak(1, SealCheck.FILLED, row.stamps[2], 1, 1),)
    assert int(cache.seals[row.stamps[2]]["filled"]) == 5


def test_malformed_steps_are_errors() -> None:
    cache = Cache()
    row, _, _ = cache.filled(20)
    k = cache.random(1, 3, 1)
    for change in ({"row_offsets": np.array([0, 0], dtype=np.int32)}, {"start_positions": np.array([-1], dtype=np.int32)},
                   {"tables": [array("Q", [1])]}, {"tables": [array("I", [1, 2, 3, 4])]}, {"tables": []}, {"layer": 2},
                   {"scopes": np.zeros((1, 3), dtype=np.uint64)}):  # fmt: skip
        row.count = 1
        arguments = {**cache._rows([row]), "ledger_nonces": cache.ledger, "k": k, "v": k, **change}
        with pytest.raises(ValueError):
            _native.append(**arguments)
