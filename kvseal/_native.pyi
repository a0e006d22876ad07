"""What native/module.cpp offers. Arrays are C-contiguous; wrong types, shapes or sizes raise ValueError or TypeError."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_F32 = npt.NDArray[np.float32]
_I32 = npt.NDArray[np.int32]
_U64 = npt.NDArray[np.uint64]
_U8 = npt.NDArray[np.uint8]
_Break = tuple[int, int, int, int, int]
"""row, check, page (-1: the table has none), ordinal, layer"""

SEAL_MAGIC: int
PARTITION_TOKENS: int

def seal_layout() -> dict[str, tuple[int, int]]:
    """Field -> (offset, bytes)."""

def seal_bytes(nonce: int, scope_low: int, scope_high: int, format: int, ordinal: int, layer: int, filled: int) -> bytes:
    """The line that the first append of a hand-out writes."""

def instruction_set(isa: str = "auto") -> str:
    """The set that `isa` stands for here: "avx2" or "portable". Raises ValueError when this machine lacks it."""

def check_pages(
    *, layout: Layout, memory: _U8, pages: _I32, nonces: _U64, ordinals: _I32, scope: _U64, folds: _U8, recompute: bool
) -> tuple[int, int, int] | None:
    """Compares pages [n] of memory [pages, page_bytes] with what was announced; (index, layer, check) of the first difference."""

def copy_pages(
    *,
    layout: Layout,
    memory: _U8,
    pages: _I32,
    source: _U8,
    source_pages: _I32,
    nonces: _U64,
    ordinals: _I32,
    scope: _U64,
    folds: _U8,
) -> tuple[int, int, int] | None:
    """Copies pages [n] from another arena and checks what stands in memory afterwards, digests recomputed; stops at the first break."""

def restamp_pages(
    *, layout: Layout, memory: _U8, pages: _I32, nonces: _U64, ordinals: _I32, scope: _U64, folds: _U8, fresh_nonces: _U64
) -> tuple[int, int, int] | None:
    """Checks each page's seals once more, then gives it its fresh nonce; stops at the first break."""

class Arena:
    """[pages, page_bytes] of lazily zero memory; shared: as a file (memfd) that another process may map. Raises MemoryError."""

    def __init__(self, pages: int, page_bytes: int, shared: bool = False) -> None: ...
    @property
    def memory(self) -> _U8: ...
    @property
    def file(self) -> int:
        """Descriptor of a shared arena's memory, valid while the arena is open; else -1."""
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    def close(self) -> None:
        """Gives the memory back once no view of it is left."""

class Layout:
    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        kv_dtype: str,
        run_bytes: int,
        element_run_bytes: int,
        section_bytes: int,
        page_bytes: int,
        format: int,
    ) -> None: ...

class PackedLinear:
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def bytes(self) -> int: ...

class WeightSlab:
    """Memory for packed matrices, filled from the front."""

    def __init__(self, bytes: int) -> None: ...
    @property
    def used_bytes(self) -> int: ...
    def pack(self, raw: _U8, type: str, rows: int, columns: int, format: str, row_order: _I32 | None = None) -> PackedLinear: ...

def packed_bytes(format: str, rows: int, columns: int) -> int: ...
def dequantise(raw: _U8, type: str, out: _F32) -> None:
    """out[rows, columns] from stored rows."""

class ModelNumbers:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_magnitude: float
    attention_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    inverse_frequencies: list[float]
    windows: list[int]
    nope_layers: list[int]
    def __init__(self) -> None: ...

class Layer:
    def __init__(
        self,
        *,
        q: PackedLinear,
        k: PackedLinear,
        v: PackedLinear,
        o: PackedLinear,
        gate: PackedLinear,
        up: PackedLinear,
        down: PackedLinear,
        attn_norm: _F32,
        mlp_norm: _F32,
        q_bias: _F32 | None = None,
        k_bias: _F32 | None = None,
        v_bias: _F32 | None = None,
        o_bias: _F32 | None = None,
        gate_bias: _F32 | None = None,
        up_bias: _F32 | None = None,
        down_bias: _F32 | None = None,
        q_norm: _F32 | None = None,
        k_norm: _F32 | None = None,
    ) -> None: ...

class Decoder:
    def __init__(
        self,
        *,
        numbers: ModelNumbers,
        layout: Layout,
        arena: Arena,
        layers: Sequence[Layer],
        final_norm: _F32,
        lm_head: PackedLinear,
        embedding: _U8,
        embedding_type: str,
        embedding_order: _I32 | None = None,
        threads: int = 1,
        isa: str = "auto",
    ) -> None: ...
    def forward(
        self,
        *,
        tokens: _I32,
        row_offsets: _I32,
        start_positions: _I32,
        tables: Sequence[object],
        scopes: _U64,
        hidden_counts: _I32,
        ledger_nonces: _U64,
        hidden: _F32,
    ) -> list[_Break]: ...
    def logits(self, hidden: _F32, out: _F32) -> None: ...
    def seal_digests(self, pages: _I32, folds: _U8) -> bool:
        """False, and nothing written, when a page is not full in every layer."""

    @property
    def instruction_set(self) -> str: ...
    @property
    def threads(self) -> int: ...

def linear(packed: PackedLinear, x: _F32, out: _F32, bias: _F32 | None = None, isa: str = "auto") -> None: ...
def rms_norm(x: _F32, weight: _F32, eps: float, out: _F32, isa: str = "auto") -> None: ...
def rope(x: _F32, cosines: _F32, sines: _F32, isa: str = "auto") -> None:
    """In place on x[tokens, heads, head_dim]; cosines and sines [tokens, rotary_dims / 2]."""

def silu_multiply(gate: _F32, up: _F32, out: _F32, isa: str = "auto") -> None: ...
def exponential(x: _F32, out: _F32, isa: str = "auto") -> None: ...
def append(
    *,
    arena: Arena,
    layout: Layout,
    layer: int,
    row_offsets: _I32,
    start_positions: _I32,
    tables: Sequence[object],
    scopes: _U64,
    ledger_nonces: _U64,
    k: _F32,
    v: _F32,
    isa: str = "auto",
) -> list[_Break]:
    """k, v [tokens, kv_heads, head_dim] into their pages of one layer."""

def attend(
    *,
    arena: Arena,
    layout: Layout,
    layer: int,
    row_offsets: _I32,
    start_positions: _I32,
    tables: Sequence[object],
    scopes: _U64,
    q: _F32,
    out: _F32,
    scale: float,
    window: int = 0,
    by_partition: bool = False,
    isa: str = "auto",
) -> list[_Break]:
    """q, out [tokens, heads, head_dim]; rows with a break are zero in out."""

def digest(data: _U8, seed: int) -> bytes:
    """16 bytes; data is whole 64-byte lines."""

def argmax(row: _F32) -> int: ...
def log_sum_exp(row: _F32) -> float: ...
def top_k(row: _F32, k: int) -> list[int]:
    """Ids of the k largest, largest first; ties to the lower id."""
