"""What native/module.cpp offers. Arrays are C-contiguous; wrong types, shapes or sizes raise ValueError or TypeError."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvseal.core.batch import Row
from kvseal.core.request import SamplingParams

_F32 = npt.NDArray[np.float32]
_I32 = npt.NDArray[np.int32]
_U16 = npt.NDArray[np.uint16]
_U64 = npt.NDArray[np.uint64]
_U8 = npt.NDArray[np.uint8]
_Break = tuple[int, int, int, int, int]
"""row, check, page (-1: the table has none), ordinal, layer"""

SEAL_MAGIC: int
PARTITION_TOKENS: int
CHECKED: bool
"""False only in the twin that the benchmark of the checks builds for itself."""

def seal_layout() -> dict[str, tuple[int, int]]:
    """Field -> (offset, bytes)."""

def seal_bytes(nonce: int, scope_low: int, scope_high: int, format: int, ordinal: int, layer: int, filled: int) -> bytes:
    """The line that the first append of a hand-out writes."""

def instruction_sets() -> list[str]:
    """The sets that this machine runs, the fastest first: of "avx512", "avxvnni", "avx2", "neon"; "portable" last."""

def instruction_set(isa: str = "auto") -> str:
    """The set that `isa` stands for here. Raises ValueError when this machine lacks it."""

def check_pages(
    *, layout: Layout, memory: _U8, pages: _I32, nonces: _U64, ordinals: _I32, filled: _U16, scope: _U64, folds: _U8, recompute: bool
) -> tuple[int, int, int] | None:
    """Compares pages [n] of memory [pages, page_bytes] with what was announced; (index, layer, check) of the first difference."""

def close_tail(
    *, layout: Layout, memory: _U8, page: int, nonce: int, ordinal: int, filled: int, scope: _U64, fold: _U8
) -> tuple[int, int, int] | None:
    """Zeros behind the first `filled` slots of a page that is not full, and a digest in each of its seals; the page's goes to `fold`
    [16]. What a seal has that it should not, and nothing has changed."""

def copy_pages(
    *,
    layout: Layout,
    memory: _U8,
    pages: _I32,
    source: _U8,
    source_pages: _I32,
    nonces: _U64,
    ordinals: _I32,
    filled: _U16,
    scope: _U64,
    folds: _U8,
) -> tuple[int, int, int] | None:
    """Copies pages [n] from another arena and checks what stands in memory afterwards, digests recomputed; stops at the first break."""

def provide_pages(*, memory: _U8, pages: _I32) -> None:
    """The system gives pages [n] of memory [pages, page_bytes] their memory now; what stands there does not change."""

def restamp_pages(
    *,
    layout: Layout,
    memory: _U8,
    pages: _I32,
    nonces: _U64,
    ordinals: _I32,
    filled: _U16,
    scope: _U64,
    folds: _U8,
    fresh_nonces: _U64,
) -> tuple[int, int, int] | None:
    """Checks each page's seals once more, then gives it its fresh nonce, and takes the digest out of one that is not full; stops at the
    first break."""

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
    def fill(self, raw: _U8, type: str, row_order: _I32 | None = None, importance: _F32 | None = None) -> bool:
        """Packs stored rows into its place. `importance` [columns]: an error's weight in a 4-bit fit. ValueError for a mapped one."""

PACK_LAYOUT: int
"""Changes whenever packed memory does."""

class WeightSlab:
    """Memory for packed matrices, placed one after the other from the front."""

    def __init__(self, bytes: int) -> None: ...
    @staticmethod
    def map(file: int, offset: int, bytes: int) -> WeightSlab:
        """What a file holds from `offset` on, read-only; no place is taken yet. The caller checks that the file is long enough."""
    @property
    def size_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def memory(self) -> _U8:
        """[size_bytes], read-only."""
    def digest(self) -> bytes:
        """16 bytes over all of it."""
    def place(self, rows: int, columns: int, format: str) -> PackedLinear:
        """Takes the next place, without filling it."""
    def pack(self, raw: _U8, type: str, rows: int, columns: int, format: str, row_order: _I32 | None = None) -> PackedLinear:
        """`place` and `PackedLinear.fill`."""

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
    def stepper(
        self, page_tokens: int, native_of: Callable[[SamplingParams], Sampling], point_of: Callable[[SamplingParams, int], float]
    ) -> Stepper:
        """On this decoder; `native_of` is called once for each request, `point_of` for each draw."""

    def sampler(self) -> Sampler:
        """On this decoder's threads."""

    def seal_digests(self, pages: _I32, folds: _U8) -> bool:
        """False, and nothing written, when a page is not full in every layer."""

    @property
    def instruction_set(self) -> str: ...
    @property
    def threads(self) -> int: ...

def linear(packed: PackedLinear, x: _F32, out: _F32, bias: _F32 | None = None, isa: str = "auto") -> None: ...

class LinearCall:
    """`linear` in memory that stays from call to call, as an engine keeps it."""

    def __init__(self) -> None: ...
    def __call__(self, packed: PackedLinear, x: _F32, out: _F32, bias: _F32 | None = None, isa: str = "auto") -> None: ...

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

def fma_rate(seconds: float = 0.02) -> float:
    """GFLOP/s of single-precision fused multiply-adds of this thread's core, measured for so long. For benchmarks."""

class ReadProbe:
    """Memory that is read from end to end, to know how fast this machine can. For benchmarks."""

    def __init__(self, bytes: int) -> None: ...
    def read(self, threads: int) -> float:
        """GB/s of one pass, each thread reading its own part."""

NOT_FINITE: int
RULED_OUT: int

class Sampling:
    """One request's parameters, as `core.request.SamplingParams` has them."""

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        presence_penalty: float,
        frequency_penalty: float,
        repetition_penalty: float,
        bias_ids: Sequence[int],
        biases: Sequence[float],
        allowed_ids: Sequence[int] | None,
        stop_ids: Sequence[int],
        min_tokens: int,
        logprobs: int,
    ) -> None: ...

_Logprobs = tuple[float, tuple[tuple[int, float], ...]]
"""Of the token; of the likeliest ones, most likely first."""

class Stepper:
    """Steps in which every row is one token that wants the next."""

    def decode(
        self, rows: tuple[Row, ...], ledger_nonces: _U64
    ) -> tuple[list[int | tuple[int, _Logprobs | None]], list[_Break], list[tuple[int, bytes]] | None] | None:
        """Answers as `Sampler.draw` gives them, breaks, and (row, digest) of the pages that became full (None: one is not full).
        None for a step of another kind: nothing has happened."""

    @property
    def kernel_seconds(self) -> float:
        """Spent in layers and logits, by all steps so far."""

class Sampler:
    """Logits [n, vocab] become tokens, the rows shared out among its threads."""

    def __init__(self, vocab: int, threads: int = 1, isa: str = "auto") -> None: ...
    def greedy(self, logits: _F32) -> list[int]:
        """The highest of each row, the lower id among equals; NOT_FINITE where a row is not."""

    def draw(
        self, logits: _F32, asks: list[tuple[Sampling, array[int] | None, int, int, float]]
    ) -> list[int | tuple[int, _Logprobs | None]]:
        """An ask: parameters, history (typecode 'I') or None, prompt_tokens, output_index, point. Negative tokens say why there is none."""

    def logprobs(self, logits: _F32, tokens: Sequence[int], top: int) -> list[_Logprobs | None]:
        """None where a row is not finite."""
