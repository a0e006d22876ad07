"""Sizing: what a model's KV cache needs, what an engine makes of a GPU, and whether a promised context is true.

For KVSeal and for vLLM, SGLang and llama.cpp. Pure arithmetic on configs and logs: no weights, no NumPy, no network for local files.
Owns `kvseal size`. Imports only `kvseal.core` and the standard library.

    from kvseal.plan import Ask, answer, load_shape
    report = answer(load_shape("Qwen2.5-7B/config.json"), Ask(context_tokens=32768))
    report.main.growing_per_token      # 57344
"""

from __future__ import annotations

from kvseal.plan.dtype import KVFormat, parse_format
from kvseal.plan.engines.base import EnginePlan, Pool, Settings
from kvseal.plan.footprint import Footprint, Parallel, footprint
from kvseal.plan.model import read_shape
from kvseal.plan.planner import Ask, Report, answer
from kvseal.plan.promise import PoolClaim, PromiseResult, judge
from kvseal.plan.shape import Kind, LayerGroup, ModelShape
from kvseal.plan.source import load_shape

__all__ = [
    "Ask", "EnginePlan", "Footprint", "KVFormat", "Kind", "LayerGroup", "ModelShape", "Parallel", "Pool", "PoolClaim", "PromiseResult",
    "Report", "Settings", "answer", "footprint", "judge", "load_shape", "parse_format", "read_shape",
]  # fmt: skip
