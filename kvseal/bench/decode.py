"""Whole decode steps against the memory's speed: figure 9 of the performance notes. ``kvseal bench decode``.

Owns the comparison of bare decode steps (no scheduler, no sampling; logits included) with plain reads by the same number of threads in the
same run: at batch 1 a step cannot be faster than its weights can be read. And of batch 8 with batch 1: up to the crossover to arithmetic
eight rows take little longer than one. Every page is checked, as always.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvseal import _native
from kvseal.bench.kernels import DecodeLoop
from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.probes import read_rate
from kvseal.exec.backends.cpu import CPUBackend
from kvseal.exec.loader import load_model
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.node.models import resolve_model

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXT_TOKENS = 128
"""Where the measured steps begin."""
STEPS, QUICK_STEPS = 24, 8
SLICE_S = 0.1
BANDWIDTH, EIGHT = Target(low=0.85), Target(low=6.5)


class Decoding:
    """One batch that decodes on and on from the same position."""

    def __init__(self, loop: DecodeLoop, rows: int, steps: int) -> None:
        self._loop = loop
        self._rows = rows
        self._steps = steps

    def seconds_per_step(self) -> float:
        """Median over the steps, after prefilling anew."""
        tables = self._loop.tables(self._rows, CONTEXT_TOKENS + self._steps)
        for start in range(0, CONTEXT_TOKENS, 64):
            self._loop.step(tables, start, min(64, CONTEXT_TOKENS - start))
        times = [self._loop.step(tables, CONTEXT_TOKENS + index, 1) for index in range(self._steps)]
        return float(np.median(times))


def measure(context: Context, backend: CPUBackend, pages: int) -> tuple[dict[int, list[float]], list[float]]:
    """Seconds per step by batch, and GB/s of plain reads, one of each for each pair."""
    steps = QUICK_STEPS if context.quick else STEPS
    loop = DecodeLoop(backend, pages)
    probe = _native.ReadProbe(max(backend.packed_bytes, 64 * 2**20))
    batches = {rows: Decoding(loop, rows, steps) for rows in BATCHES}
    seconds: dict[int, list[float]] = {rows: [] for rows in BATCHES}
    reads: list[float] = []
    batches[1].seconds_per_step()
    for pair in range(context.pairs):
        context.say(f"pair {pair + 1} of {context.pairs}")
        for rows, decoding in batches.items():
            seconds[rows].append(decoding.seconds_per_step())
            if rows == 1:
                reads.append(read_rate(probe, context.threads_used, SLICE_S))
    return seconds, reads


def entries_of(seconds: dict[int, list[float]], reads: Sequence[float], weight_bytes: int, threads: int) -> list[Entry]:
    def rates(rows: int) -> Side:
        return Side(f"batch {rows}", "tok/s", tuple(rows / each for each in seconds[rows]))

    used = Side("weight bytes / step time, batch 1", "GB/s", tuple(weight_bytes / each / 1e9 for each in seconds[1]))
    plain = Side(f"plain reads, {threads} threads", "GB/s", tuple(reads))
    note = f"{weight_bytes / 1e6:.1f} MB of weights; {CONTEXT_TOKENS} tokens of context"
    return [
        Entry(figure="9", name="decode step / read bandwidth, batch 1", a=used, b=plain, target=BANDWIDTH, note=note),
        Entry(figure="9", name="decode, batch 8 / batch 1", a=rates(8), b=rates(1), target=EIGHT),
        Entry(figure="9", name="decode, batch 32 / batch 1", a=rates(32), b=rates(1)),
    ]


def run(context: Context) -> Result:
    weights = load_model(resolve_model(context.model))
    spec = weights.spec
    geometry = KVGeometry(
        layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, kv_dtype=KVDtype("fp16"), weights_digest=weights.digest
    )
    pages = max(BATCHES) * geometry.pages_for(CONTEXT_TOKENS + STEPS)
    began_s = time.perf_counter()
    backend = CPUBackend(weights, geometry, pages=pages, threads=context.threads_used)
    packed_s = time.perf_counter() - began_s
    try:
        seconds, reads = measure(context, backend, pages)
        entries = entries_of(seconds, reads, backend.packed_bytes, context.threads_used)
        settings = {
            "weights": backend.packings,
            "cache": "fp16",
            "threads": str(backend.threads),
            "instruction set": backend.instruction_set,
            "packed in": f"{packed_s:.2f} s",
        }
    finally:
        backend.close()
    points = tuple((rows, rows / float(np.median(values))) for rows, values in seconds.items())
    plot = Plot("Bare decode steps", "batch", "tokens/s", (Line("decode", points),))
    return Result(name="decode", title="Decode steps", entries=entries, plots=[plot], settings=settings)


def main() -> int:
    return benchmark_main("decode", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
