"""Bare steps of one build of the kernels, driven over standard input and output: ``python -m kvseal.bench.suite.step_worker``.

Owns one side of the comparison in `bench.safety`. The first line names a built `_native` to use instead of the installed one ("" for that);
it is loaded before anything that computes. Then, asked {"rows": n, "start": position, "tokens": per row and step, "steps": n}, it answers
{"value": median seconds of a step}, digests of the pages that the step filled included. Never part of a server.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from array import array
from pathlib import Path
from statistics import median
from typing import Any


def use(file: Path) -> None:
    """Makes this build the `kvseal._native` of this process."""
    import kvseal

    spec = importlib.util.spec_from_file_location("kvseal._native", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no extension module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvseal._native"] = module
    spec.loader.exec_module(module)
    kvseal._native = module


class Steps:
    """A model, and rows that go on and on."""

    def __init__(self, model: Path, threads: int, pages: int) -> None:
        import numpy as np

        from kvseal.bench.kernels import DecodeLoop
        from kvseal.exec.backends.cpu import CPUBackend
        from kvseal.exec.loader import load_model
        from kvseal.kv.geometry import KVDtype, KVGeometry

        weights = load_model(model)
        spec = weights.spec
        geometry = KVGeometry(
            layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, kv_dtype=KVDtype("fp16"), weights_digest=weights.digest
        )
        self._np = np
        self._page_tokens = geometry.page_tokens
        self._backend = CPUBackend(weights, geometry, pages=pages, threads=threads)
        self._loop = DecodeLoop(self._backend, pages)

    def seconds(self, rows: int, start: int, tokens: int, steps: int) -> float:
        tables = self._loop.tables(rows, start + tokens * steps)
        for position in range(0, start, 64):
            self._step(tables, position, min(64, start - position))
        return median(self._step(tables, start + index * tokens, tokens) for index in range(steps))

    def _step(self, tables: list[array[int]], start: int, tokens: int) -> float:
        spent_s = self._loop.step(tables, start, tokens)
        filled = range(start // self._page_tokens, (start + tokens) // self._page_tokens)
        pages = self._np.array([table[2 * ordinal] for table in tables for ordinal in filled], dtype=self._np.int32)
        if not len(pages):
            return spent_s
        began_s = time.perf_counter()
        self._backend.seal_digests(pages)
        return spent_s + time.perf_counter() - began_s


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    if asked["native"]:
        use(Path(asked["native"]))
    steps = Steps(Path(asked["model"]), asked["threads"], asked["pages"])
    from kvseal import _native

    print(json.dumps({"checked": _native.CHECKED}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"value": steps.seconds(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
