"""Linear kernels against what the core can do: figure 13 of the performance notes. ``kvseal bench linear``.

Owns two comparisons on one thread, both sides measured in turn in the same run: arithmetic of 4-bit and 8-bit weights times 8-bit
activations against single-precision multiply-adds in registers, and, for one token, weight bytes per second against plain reads of as
much memory. The matrices of one token are larger together than any cache. Kernels alone: quantising the activations is inside, attention
and norms are not.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median

import numpy as np

from kvseal import _native
from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.probes import per_second, read_rate
from kvseal.exec.backend import Float32

TOKENS = (1, 8, 32, 128)
PACKINGS = ("q4m", "q8")
SHAPE = (1536, 576)
"""Rows and columns of the demo model's largest layers."""
STREAM_SHAPE = (4096, 2048)
STREAM_BYTES = 96 * 2**20
SLICE_S, QUICK_SLICE_S = 0.1, 0.03
TURNS = 10
ARITHMETIC, READING = Target(low=1.7), Target(low=0.85)
NAMES = {"q4m": "4-bit weights", "q8": "8-bit weights"}


def packed(packing: str, rows: int, columns: int, *, seed: int) -> _native.PackedLinear:
    slab = _native.WeightSlab(_native.packed_bytes(packing, rows, columns))
    raw = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32).view(np.uint8).reshape(-1)
    return slab.pack(raw, "F32", rows, columns, packing)


class Kernel:
    """One matrix and inputs for it."""

    def __init__(self, packing: str, tokens: int) -> None:
        rows, columns = SHAPE
        self._weights = packed(packing, rows, columns, seed=1)
        self._x: Float32 = np.random.default_rng(2).standard_normal((tokens, columns), dtype=np.float32)
        self._out: Float32 = np.empty((tokens, rows), dtype=np.float32)
        self._call = _native.LinearCall()
        self._operations = 2e-9 * rows * columns * tokens

    def __call__(self) -> float:
        """Giga-operations of one product."""
        self._call(self._weights, self._x, self._out)
        return self._operations


class Stream:
    """Several matrices, one token through each: every weight is read from memory once."""

    def __init__(self, packing: str) -> None:
        rows, columns = STREAM_SHAPE
        count = max(2, STREAM_BYTES // _native.packed_bytes(packing, rows, columns))
        self._weights = [packed(packing, rows, columns, seed=3) for _ in range(count)]
        self._x: Float32 = np.random.default_rng(4).standard_normal((1, columns), dtype=np.float32)
        self._out: Float32 = np.empty((1, rows), dtype=np.float32)
        self._call = _native.LinearCall()

    def __call__(self) -> float:
        """Gigabytes of weights read."""
        for weights in self._weights:
            self._call(weights, self._x, self._out)
        return sum(weights.bytes for weights in self._weights) / 1e9


def in_turns(kernel: Kernel, seconds: float) -> tuple[list[float], list[float]]:
    """Giga-operations per second of the kernel and of the core at most, in short turns: whoever else shares the core, as another machine's
    thread does unseen, then slows both."""
    rates, peaks = [], []
    for _ in range(TURNS):
        rates.append(per_second(kernel, seconds / TURNS))
        peaks.append(_native.fma_rate(seconds / TURNS / 2))
    return rates, peaks


def arithmetic(packing: str, context: Context, seconds: float) -> tuple[list[Entry], Line, float]:
    """Entries for each number of tokens, the line of a plot, and the peak."""
    kernels = {tokens: Kernel(packing, tokens) for tokens in TOKENS}
    rates: dict[int, list[list[float]]] = {tokens: [] for tokens in TOKENS}
    peaks: dict[int, list[list[float]]] = {tokens: [] for tokens in TOKENS}
    for kernel in kernels.values():
        kernel()
    for pair in range(context.pairs):
        context.say(f"{NAMES[packing]}, pair {pair + 1} of {context.pairs}")
        for tokens, kernel in kernels.items():
            for kept, turns in zip((rates, peaks), in_turns(kernel, seconds), strict=True):
                kept[tokens].append(turns)
    entries = []
    for tokens in TOKENS:
        name = f"{NAMES[packing]}, {tokens} token{'s' if tokens > 1 else ''} / fp32 peak of the core"
        a = Side(f"{packing}, {tokens} tokens", "GOP/s", tuple(map(mean, rates[tokens])))
        b = Side("fp32 multiply-adds", "GFLOP/s", tuple(map(mean, peaks[tokens])))
        entries.append(Entry(figure="13", name=name, a=a, b=b, target=ARITHMETIC if tokens >= 8 else None))
        if tokens >= 8:
            a, b = replace(a, values=tuple(map(max, rates[tokens]))), replace(b, values=tuple(map(max, peaks[tokens])))
            entries.append(Entry(figure="13", name=f"{name}, fastest of {TURNS} turns of each", a=a, b=b))
    middle = Line(NAMES[packing], tuple((tokens, median(map(mean, rates[tokens]))) for tokens in TOKENS))
    return entries, middle, max(max(map(max, values)) for values in peaks.values())


def reading(packing: str, probe: _native.ReadProbe, context: Context, seconds: float) -> Entry:
    stream = Stream(packing)
    stream()
    probe.read(1)
    weights, memory = [], []
    for _ in range(context.pairs):
        weights.append(per_second(stream, seconds))
        memory.append(read_rate(probe, 1, seconds))
    rows, columns = STREAM_SHAPE
    a, b = Side(f"{packing} {rows}x{columns}", "GB/s", tuple(weights)), Side("plain reads", "GB/s", tuple(memory))
    return Entry(figure="13", name=f"{NAMES[packing]}, 1 token / read bandwidth of one core", a=a, b=b, target=READING)


def run(context: Context) -> Result:
    seconds = QUICK_SLICE_S if context.quick else SLICE_S
    probe = _native.ReadProbe(STREAM_BYTES)
    entries, lines, peak = [], [], 0.0
    for packing in PACKINGS:
        found, line, highest = arithmetic(packing, context, seconds)
        entries += found
        lines.append(line)
        peak = max(peak, highest)
    entries += [reading(packing, probe, context, seconds) for packing in PACKINGS]
    plot = Plot("Linear kernels, one core", "tokens", "GOP/s", tuple(lines), ((peak, "fp32 peak"), (1.7 * peak, "1.7 x fp32 peak")))
    settings = {"threads": "1", "instruction set": _native.instruction_set(), "matrix": "x".join(map(str, SHAPE))}
    return Result(name="linear", title="Linear kernels", entries=entries, plots=[plot], settings=settings)


def main() -> int:
    return benchmark_main("linear", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
