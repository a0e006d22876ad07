"""How fast the native kernels are: `python -m kvseal.bench.kernels [MODEL.gguf]`.

Owns the measuring loop: every figure is the median and the best of interleaved repeats, so that a busy neighbour shows as spread and not
as a result. Linear layers in GOP/s (2 x rows x columns x tokens) and GB/s of packed weights, attention in GFLOP/s, digests in GB/s; with a
model, tokens/s of a bare decode loop (no scheduler, no sampling) and of prefill. Never judges; figure numbers are those of
docs/performance.md (9, 13).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvseal import _native
from kvseal.bench.suite.command import thread_count
from kvseal.exec.backend import Float32, StepArrays
from kvseal.exec.backends.cpu import CPUBackend, new_arena
from kvseal.exec.loader import load_model
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.kv.native_layout import native_layout

REPEATS = 15
SHAPES = ((1536, 576), (576, 1536))
TOKENS = (1, 2, 4, 8, 32, 128)
PACKINGS = ("q4m", "q8", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time: `work` units of work per call, in `unit` per second when divided by seconds."""

    name: str
    call: Callable[[], None]
    work: float
    unit: str


def measure(cases: Sequence[Case], repeats: int = REPEATS) -> list[str]:
    """Runs all cases in turn, `repeats` times; a line each with median and best."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for case in cases:
        case.call()
    for _ in range(repeats):
        for case in cases:
            start = time.perf_counter()
            case.call()
            seconds[case.name].append(time.perf_counter() - start)
    lines = []
    for case in cases:
        median, best = case.work / statistics.median(seconds[case.name]), case.work / min(seconds[case.name])
        lines.append(f"{case.name:34} median {median:9.1f}  best {best:9.1f}  {case.unit}")
    return lines


def linear_cases(isa: str) -> list[Case]:
    """One thread."""
    random = np.random.default_rng(1)
    cases = []
    for packing in PACKINGS:
        for rows, columns in SHAPES:
            slab = _native.WeightSlab(_native.packed_bytes(packing, rows, columns))
            raw = random.standard_normal((rows, columns), dtype=np.float32).view(np.uint8).reshape(-1)
            packed = slab.pack(raw, "F32", rows, columns, packing)
            for tokens in TOKENS:
                x = random.standard_normal((tokens, columns), dtype=np.float32)
                cases.append(_linear_case(packed, x, isa))
    return cases


def _linear_case(packed: _native.PackedLinear, x: Float32, isa: str) -> Case:
    out = np.empty((len(x), packed.rows), dtype=np.float32)
    product = _native.LinearCall()
    operations = 2.0 * packed.rows * packed.columns * len(x)
    rounds = max(1, int(2e7 / operations))

    def call() -> None:
        for _ in range(rounds):
            product(packed, x, out, None, isa)

    return Case(f"linear {packed.format} {packed.rows}x{packed.columns} tokens {len(x)}", call, operations * rounds / 1e9, "GOP/s")


def attend_cases(isa: str, *, heads: int = 9, kv_heads: int = 3, head_dim: int = 64, cached_tokens: int = 1024) -> list[Case]:
    """One thread, one layer: a single query over a long past, and a chunk of them."""
    geometry = KVGeometry(layers=1, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=KVDtype.FP16, page_tokens=16)
    pages = geometry.pages_for(cached_tokens)
    arena, layout = new_arena(geometry, pages), native_layout(geometry)
    ledger = np.arange(1, pages + 1, dtype=np.uint64)
    stamps = array("Q", [number for page in range(pages) for number in (page, page + 1)])
    random = np.random.default_rng(2)
    k, v = (random.standard_normal((cached_tokens, kv_heads, head_dim), dtype=np.float32) for _ in range(2))
    scopes = np.ones((1, 2), dtype=np.uint64)
    starts, offsets = np.zeros(1, dtype=np.int32), np.array([0, cached_tokens], dtype=np.int32)
    _native.append(
        arena=arena.native, layout=layout, layer=0, row_offsets=offsets, start_positions=starts, tables=[stamps], scopes=scopes,
        ledger_nonces=ledger, k=k, v=v,
    )  # fmt: skip
    cases = []
    for queries in (1, 32):
        q = random.standard_normal((queries, heads, head_dim), dtype=np.float32)
        out, start = np.empty_like(q), cached_tokens - queries
        seen = sum(range(start + 1, cached_tokens + 1))

        def call(q: Float32 = q, out: Float32 = out, start: int = start) -> None:
            _native.attend(
                arena=arena.native, layout=layout, layer=0, row_offsets=np.array([0, len(q)], dtype=np.int32),
                start_positions=np.array([start], dtype=np.int32), tables=[stamps], scopes=scopes, q=q, out=out, scale=0.125, isa=isa,
            )  # fmt: skip

        cases.append(Case(f"attend {queries} of {cached_tokens} tokens", call, 4.0 * heads * head_dim * seen / 1e9, "GFLOP/s"))
    return cases


def digest_case() -> Case:
    data = np.random.default_rng(3).integers(0, 256, 2**22, dtype=np.uint8)

    def call() -> None:
        _native.digest(data, 1)

    return Case("digest 4 MiB", call, len(data) / 1e9, "GB/s")


class DecodeLoop:
    """Rows that decode in step, from sealed pages of their own."""

    def __init__(self, backend: CPUBackend, pages: int) -> None:
        self._backend = backend
        self._ledger = np.zeros(pages, dtype=np.uint64)
        self._random = np.random.default_rng(4)
        self._nonce = 0

    def tables(self, rows: int, tokens: int) -> list[array[int]]:
        """Fresh stamps for `rows` sequences of `tokens` tokens, from page 0 on."""
        per_row = self._backend.geometry.pages_for(tokens)
        tables = []
        for row in range(rows):
            stamps = array("Q")
            for page in range(row * per_row, (row + 1) * per_row):
                self._nonce += 1
                self._ledger[page] = self._nonce
                stamps.extend((page, self._nonce))
            tables.append(stamps)
        return tables

    def step(self, tables: list[array[int]], start: int, tokens: int) -> float:
        """Seconds for `tokens` new tokens of each row at position `start`, logits of the last included."""
        rows = len(tables)
        step = StepArrays(
            tokens=self._random.integers(0, self._backend.spec.vocab_size, rows * tokens, dtype=np.int32),
            row_offsets=np.arange(0, rows * tokens + 1, tokens, dtype=np.int32),
            start_positions=np.full(rows, start, dtype=np.int32),
            tables=tables,
            scopes=np.ones((rows, 2), dtype=np.uint64),
            hidden_counts=np.ones(rows, dtype=np.int32),
            ledger_nonces=self._ledger,
        )
        began = time.perf_counter()
        output = self._backend.forward(step)
        self._backend.logits(output.hidden)
        seconds = time.perf_counter() - began
        if output.breaks:
            raise SystemExit(f"broken seals in a benchmark: {output.breaks}")
        return seconds


def model_lines(path: Path, threads: int, weight_format: str, kv_dtype: str) -> list[str]:
    weights = load_model(path)
    spec = weights.spec
    geometry = KVGeometry(
        layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, kv_dtype=KVDtype(kv_dtype), weights_digest=weights.digest
    )
    pages = 32 * geometry.pages_for(512)
    began = time.perf_counter()
    backend = CPUBackend(weights, geometry, pages=pages, weight_format=weight_format, threads=threads)
    lines = [f"packed {backend.packed_bytes / 1e6:.1f} MB as {backend.packings} in {time.perf_counter() - began:.2f} s"]
    loop = DecodeLoop(backend, pages)
    for tokens in (128, 512, 1024):
        times = [loop.step(loop.tables(1, tokens), 0, tokens) for _ in range(5)]
        lines.append(_rate(f"prefill {tokens}", tokens, times))
    for rows, context in ((1, 128), (1, 400), (8, 128), (32, 128)):
        tables = loop.tables(rows, 512)
        for start in range(0, context, 64):
            loop.step(tables, start, min(64, context - start))
        times = [loop.step(tables, context + index, 1) for index in range(32)]
        lines.append(_rate(f"decode {rows} rows at {context}", rows, times))
        bandwidth = backend.packed_bytes / min(times) / 1e9
        lines[-1] += f"  ({bandwidth:.1f} GB/s of weights at best)"
    backend.close()
    return lines


def _rate(name: str, tokens: int, seconds: Sequence[float]) -> str:
    return f"{name:34} median {tokens / statistics.median(seconds):9.1f}  best {tokens / min(seconds):9.1f}  tokens/s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvseal bench kernels", description="Times the native kernels and a bare decode loop.")
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file or a folder; without it, single kernels only")
    parser.add_argument("--threads", type=thread_count, default=0, help="for the decode loop; 0: one per core")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv-dtype", default="fp16")
    parser.add_argument("--isa", default="auto", help="instruction set of the single kernels")
    options = parser.parse_args(arguments)
    print(f"instruction set {_native.instruction_set(options.isa)}; single kernels on one thread")
    for line in measure([*linear_cases(options.isa), *attend_cases(options.isa), digest_case()]):
        print(line)
    if options.model is not None:
        for line in model_lines(options.model, options.threads, options.weights, options.kv_dtype):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
