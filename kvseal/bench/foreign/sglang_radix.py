"""What SGLang's RadixCache costs, measured in SGLang's own Python: started by ``kvseal bench lookup --sglang-python PATH``.

Owns the measurement of figure 8 for SGLang: `match_prefix` of a prompt that is cached whole, and `insert` of one that is not, keys built
outside the measured time. Imports nothing of KVSeal. First line out: {"version": ...} or {"error": why}. Then, a line each,
{"operation": "match" or "insert", "tokens": n, "page_tokens": n} in and {"value": nanoseconds of CPU per token} out.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import time
import types
from array import array
from typing import Any

ROUNDS = 20


class Anything:
    """Stands for whatever a package that is not there would hold: kernels for GPUs and clients that the cache imports and never calls."""

    def __call__(self, *given: Any, **_named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else self

    def __getattr__(self, _name: str) -> Any:
        if _name.startswith("__"):
            raise AttributeError(_name)
        return self

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __getitem__(self, _key: Any) -> Any:
        return self

    def __or__(self, _other: Any) -> Any:
        return self

    __ror__ = __or__

    def __int__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())

    def __lt__(self, _other: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


class Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last to be asked for a module: gives SGLang, and nobody else, an empty one."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        root, _, inner = name.partition(".")
        missing = root not in ("sglang", "torch", "numpy") and (not inner or isinstance(sys.modules.get(root), Absent))
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        asked_by = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if missing and asked_by == "sglang" else None

    def create_module(self, spec: Any) -> Any:
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def radix() -> Any:
    if not any(isinstance(finder, Stubs) for finder in sys.meta_path):
        sys.meta_path.append(Stubs())
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
        if self._found_tokens(found) == 0:
            raise RuntimeError("nothing was found")
        return spent

    def _found_tokens(self, found: Any) -> int:
        """The result names the length since 0.5.23, and held the slots themselves before."""
        try:
            return int(found.device_prefix_len)
        except AttributeError:
            return len(found.device_indices)


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
