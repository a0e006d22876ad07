"""What SGLang's RadixCache costs, measured in SGLang's own Python: started by ``kvseal bench lookup --sglang-python PATH``.

Owns the measurement of figure 8 for SGLang: `match_prefix` of a prompt that is cached whole, and `insert` of one that is not, keys built
outside the measured time. Imports nothing of KVSeal. First line out: {"version": ...} or {"error": why}. Then, a line each,
{"operation": "match" or "insert", "tokens": n, "page_tokens": n} in and {"value": nanoseconds of CPU per token} out.
"""

import contextlib
import importlib
import importlib.metadata
import json
import sys
import time
import types
from array import array
from typing import Any

ROUNDS = 20
STUBBED = ("sgl_kernel", "triton", "triton.language")
"""Packages for GPUs that a machine without one lacks and the cache does not use."""


def radix() -> Any:
    for name in STUBBED:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
    return importlib.import_module("sglang.srt.mem_cache.radix_cache")


class Rig:
    """One cache and its keys."""

    def __init__(self, page_tokens: int) -> None:
        self._module = radix()
        self._torch = importlib.import_module("torch")
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self._match_params, self._insert_params = base.MatchPrefixParams, base.InsertParams
        self.cache = self._module.RadixCache.create_simulated(page_size=page_tokens)

    def key(self, tokens: int, seed: int) -> Any:
        ids = [seed, *((index * 7_919 + seed) % 49_152 for index in range(1, tokens))]
        try:
            return self._module.RadixKey(token_ids=array("q", ids), extra_key=None)
        except TypeError:
            return self._module.RadixKey(ids, None)

    def insert(self, key: Any, tokens: int) -> int:
        """CPU nanoseconds."""
        value = self._torch.arange(tokens, dtype=self._torch.int64)
        params = self._insert_params(key=key, value=value)
        began = time.thread_time_ns()
        self.cache.insert(params)
        return time.thread_time_ns() - began

    def match(self, key: Any) -> int:
        params = self._match_params(key=key)
        began = time.thread_time_ns()
        found = self.cache.match_prefix(params)
        spent = time.thread_time_ns() - began
        if len(found.device_indices) == 0:
            raise RuntimeError("nothing was found")
        return spent


def measure(operation: str, tokens: int, page_tokens: int) -> float:
    """Median of the rounds."""
    rig = Rig(page_tokens)
    if operation == "insert":
        times = sorted(rig.insert(rig.key(tokens, seed), tokens) for seed in range(ROUNDS))
    else:
        rig.insert(rig.key(tokens, 1), tokens)
        times = sorted(rig.match(rig.key(tokens, 1)) for _ in range(ROUNDS))
    return times[ROUNDS // 2] / tokens


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        try:
            measure("match", 512, 16)
            version = importlib.metadata.version("sglang")
        except Exception as error:
            answer({"error": f"SGLang's RadixCache does not run there: {type(error).__name__}: {str(error)[:200]}"})
            raise
        answer({"version": version})
        for line in sys.stdin:
            asked = json.loads(line)
            answer({"value": measure(asked["operation"], asked["tokens"], asked["page_tokens"])})


def answer(said: dict[str, Any]) -> None:
    print(json.dumps(said), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
