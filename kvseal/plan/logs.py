"""Start-up logs of vLLM, SGLang, llama.cpp, TensorRT-LLM and KVSeal: what they say of pool, context, memory and settings.

Owns the wordings, over the years. Reads lines, never the whole file at once; keeps numbers and names only. Says nothing of what it does
not find.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TextIO

from kvseal.plan.units import GIB, KIB, MIB, printable

MAX_LINES = 2_000_000
MAX_LINE_CHARS = 20_000
MAX_LOG_CHARS = 256 * 2**20
"""A start-up log is a few hundred kilobytes; what follows this much is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a log or a metrics page states. None: it does not say. Tokens are per replica, bytes per GPU."""

    engine: str | None = None
    version: str | None = None
    model: str | None = None
    pool_tokens: int | None = None
    pool_bytes: int | None = None
    blocks: int | None = None
    block_tokens: int | None = None
    context_tokens: int | None = None
    concurrency: float | None = None
    concurrency_tokens: int | None = None
    sliding_tokens: int | None = None
    state_slots: int | None = None
    state_bytes: int | None = None
    needed_bytes: int | None = None
    """What one full-length request would have needed, when the engine refused to start."""
    estimated_max_tokens: int | None = None
    refused: bool = False
    gpu_bytes: int | None = None
    memory_fraction: float | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None
    tp: int | None = None
    pp: int | None = None
    kv_dtype: str | None = None
    max_batched_tokens: int | None = None
    max_sequences: int | None = None
    sequences: int | None = None
    prefix_caching: bool | None = None
    lines: tuple[str, ...] = ()
    """The lines that the numbers came from, shortened."""

    @property
    def found(self) -> bool:
        return any(value is not None for value in (self.pool_tokens, self.pool_bytes, self.blocks, self.context_tokens)) or self.refused

    @property
    def tokens(self) -> int | None:
        """The pool in tokens: as stated, else blocks x tokens per block, else the least that the rounded concurrency allows."""
        if self.pool_tokens is not None:
            return self.pool_tokens
        if self.blocks is not None and self.block_tokens is not None:
            return self.blocks * self.block_tokens
        if self.concurrency is not None and self.concurrency_tokens is not None:
            return max(int((self.concurrency - 0.005) * self.concurrency_tokens), 0) or None
        return None


_UNITS = {"gib": GIB, "gb": GIB, "g": GIB, "mib": MIB, "mb": MIB, "kib": KIB, "kb": KIB, "b": 1}
"""Engines print GiB and call it GB, all of them."""
_NUM = r"([0-9][0-9,]*)"
_SIZE = r"([0-9][0-9.,]*)\s*([GMK]i?B)"

# (field, kind, pattern); kinds: int, float, size, text, flag. The first match of a line counts; later lines override earlier ones.
RULES = (
    # vLLM
    ("engine:vllm", "mark", r"\bvllm\b|# (?:GPU|cuda) blocks:|GPU KV cache size|LLM engine \(v[0-9]|To serve at least one request"),
    (
        "version",
        "text",
        r"(?:vLLM API server version|LLM engine \(v?|vllm version|vLLM v|\u2588\s+version)\s*v?([0-9]+\.[0-9]+[0-9A-Za-z.+]*)",
    ),
    ("pool_tokens", "int", rf"KV cache size: {_NUM} tokens"),
    ("concurrency_tokens", "int", rf"Maximum concurrency for {_NUM} tokens per request"),
    ("concurrency", "float", r"Maximum concurrency for [0-9,]+ tokens per request: ([0-9.]+)x"),
    ("blocks", "int", rf"# (?:GPU|cuda) blocks: {_NUM}"),
    ("blocks", "int", rf"num_gpu_blocks(?: is)?[:=] ?\"?{_NUM}"),
    ("pool_bytes", "size", rf"Available KV cache memory: {_SIZE}"),
    ("pool_bytes", "size", rf"(?:memory reserved for KV Cache is |kv_cache_size=){_SIZE}"),
    ("gpu_bytes", "size", rf"total_gpu_memory[ =]\(?{_SIZE}"),
    ("memory_fraction", "float", r"gpu_memory_utilization[ =]*\(?([01]?\.[0-9]+)"),
    ("weights_bytes", "size", rf"(?:Model loading took|Loading model weights took|model weights take) {_SIZE}"),
    ("non_torch_bytes", "size", rf"non_torch_memory(?: takes |=){_SIZE}"),
    ("activation_bytes", "size", rf"(?:activation peak memory takes|peak activation(?: memory)?:?) {_SIZE}"),
    ("graph_bytes", "size", rf"(?:Graph capturing finished.*took|CUDA ?graph (?:pool )?memory:?) {_SIZE}"),
    (
        "refused",
        "flag",
        r"To serve at least one request with the model'?s'?s? max seq len|larger than the maximum number of tokens that can be",
    ),
    ("context_tokens", "int", rf"max seq len \({_NUM}\)"),
    ("needed_bytes", "size", rf"\({_SIZE} KV cache is needed"),
    ("pool_bytes", "size", rf"available KV cache memory \({_SIZE}\)"),
    ("estimated_max_tokens", "int", rf"estimated maximum model length is {_NUM}"),
    ("pool_tokens", "int", rf"stored in KV cache \({_NUM}\)"),
    ("block_tokens", "int", rf"\bblock_size['\"]?[=:] ?{_NUM}"),
    ("block_tokens", "int", rf"Setting attention block size to {_NUM} tokens"),
    ("context_tokens", "int", rf"(?:max_model_len|max_seq_len|Using max model len)['\"]?[ =:]+{_NUM}"),
    ("context_tokens", "int", rf"Auto-fit max_model_len: reduced from [0-9]+ to {_NUM}"),
    ("tp", "int", rf"(?:tensor_parallel_size|tp_size)['\"]?[=:] ?{_NUM}"),
    ("pp", "int", rf"(?:pipeline_parallel_size|pp_size)['\"]?[=:] ?{_NUM}"),
    ("kv_dtype", "text", r"kv_cache_dtype['\"]?[=:] ?['\"]?([a-z0-9_]+)"),
    ("max_batched_tokens", "int", rf"(?:max_num_batched_tokens|chunked_prefill_size)['\"]?[=:] ?{_NUM}"),
    ("max_sequences", "int", rf"(?:max_num_seqs|max_running_requests)['\"]?[=:] ?{_NUM}"),
    ("model", "text", r"(?:LLM engine .*?model|model_path|served_model_name)=['\"]([^'\"]{1,200})"),
    # SGLang
    ("engine:sglang", "mark", r"\bsglang\b|KV Cache is allocated|max_total_num_tokens=|server_args=|mem_fraction_static"),
    ("pool_tokens", "int", rf"KV Cache is allocated\..*#tokens: {_NUM}"),
    ("pool_tokens", "int", rf"max_total_num_tokens[=:] ?{_NUM}"),
    ("pool_tokens", "int", rf"full_layer_tokens={_NUM}"),
    ("sliding_tokens", "int", rf"swa_layer_tokens={_NUM}"),
    ("context_tokens", "int", rf"context_len(?:gth)?=\s?{_NUM}"),
    ("memory_fraction", "float", r"mem_fraction_static=([01]?\.[0-9]+)"),
    ("block_tokens", "int", rf"page_size={_NUM}"),
    ("state_slots", "int", rf"max_mamba_cache_size: {_NUM}"),
    ("weights_bytes", "size", rf"Load weight end\..*mem usage={_SIZE}"),
    # llama.cpp
    ("engine:llama.cpp", "mark", r"llama_kv_cache|llama_context|llama_new_context|llama_memory|KV self size|llama_model_load"),
    ("context_tokens", "int", rf"n_ctx(?:_per_seq|_seq)?\s*= {_NUM}"),
    ("sequences", "int", rf"n_seq_max\s*= {_NUM}"),
    ("pool_tokens", "int", rf"llama_kv_cache\w*: .*\(\s*{_NUM} cells"),
    # TensorRT-LLM
    ("engine:tensorrt-llm", "mark", r"\[TensorRT-LLM\]|TRT-LLM|\[TRTLLM|tensorrt_llm|tokens in paged KV cache"),
    ("pool_tokens", "int", rf"max tokens in paged KV cache \({_NUM}\)"),
    ("pool_bytes", "size", rf"Allocated {_SIZE} for max tokens in paged KV cache"),
    ("block_tokens", "int", rf"(?:Number of tokens per block|tokens[_ ]per[_ ]block)[:=]? ?{_NUM}"),
    ("blocks", "int", rf"(?:Number of blocks in KV cache primary pool|Max KV cache (?:pages|blocks)|max_num_blocks)[:=] ?{_NUM}"),
    ("pool_tokens", "int", rf"Using {_NUM} tokens in paged KV cache"),
    ("pool_bytes", "bytes", rf"Allocate {_NUM} bytes for k/v cache"),
    ("blocks", "int", rf"primary blocks={_NUM}"),
    ("blocks", "int", rf"blocks for window sizes set to \{{[0-9]+: {_NUM}\}}"),
    ("context_tokens", "int", rf"(?:TRTGptModel maxSequenceLen|max_seq_len)[:=] ?{_NUM}"),
    ("version", "text", r"TensorRT-LLM(?: version)?:? ([0-9]+\.[0-9]+[0-9A-Za-z.]*)"),
    # KVSeal
    ("engine:kvseal", "mark", r"\bkvseal\b|served_context_tokens|served context\s"),
    ("pool_tokens", "int", rf"\bKV pool\s+{_NUM} tokens in"),
    ("blocks", "int", rf"\bKV pool\s+[0-9,]+ tokens in {_NUM} pages"),
    ("block_tokens", "int", rf"tokens in [0-9,]+ pages of {_NUM}"),
    ("pool_bytes", "size", rf"tokens in [0-9,]+ pages of [0-9,]+, {_SIZE}"),
    ("kv_dtype", "text", r"\bKV format\s+[0-9a-f]{4,} \(([a-z0-9]+)\)"),
    ("context_tokens", "int", rf"served context\s+{_NUM} tokens"),
    ("pool_tokens", "int", rf"pool_tokens['\"]?[=: ]+{_NUM}"),
    ("context_tokens", "int", rf"served_context_tokens['\"]?[=: ]+{_NUM}"),
    ("pool_bytes", "bytes", rf"pool_bytes['\"]?[=: ]+{_NUM}"),
    ("block_tokens", "int", rf"page_tokens['\"]?[=: ]+{_NUM}"),
)


@cache
def _rules() -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    """Compiled when the first log is read: sizes alone should not pay for it."""
    return tuple((field, kind, re.compile(pattern, re.IGNORECASE)) for field, kind, pattern in RULES)


_ALLOCATED = re.compile(r"KV Cache is allocated\.")
_SIZES = re.compile(r"\b(K size|V size|KV size): ([0-9.]+) ?([GM]i?B)")
_TOKENS = re.compile(r"#tokens: ([0-9]{1,15})\b")
_LLAMA_TOTAL = re.compile(r"llama_kv_cache\w*:\s+size =\s+([0-9.]+) MiB|KV self size\s*=\s+([0-9.]+) MiB")
_LLAMA_STATE = re.compile(r"llama_memory_recurrent:\s+size =\s+([0-9.]+) MiB")


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Lines of a file that may be a device, or one endless line: the beginning of each line, and an end."""
    left, inside = MAX_LOG_CHARS, False
    while left > 0 and (piece := file.readline(MAX_LINE_CHARS)):
        left -= len(piece)
        if not inside:
            yield piece
        inside = not piece.endswith("\n")


def read_log(lines: Iterable[str]) -> Evidence:
    """Everything the lines state. Sliding and draft sub-pools do not overwrite the main pool."""
    seen: dict[str, object] = {}
    marks: dict[str, int] = {}
    pools: dict[int, int] = {}
    kept: list[str] = []
    for number, raw in enumerate(lines):
        if number >= MAX_LINES:
            break
        line = raw[:MAX_LINE_CHARS]
        if _read_line(line, seen, marks, pools) and len(kept) < 40:
            kept.append(" ".join(line.split())[:240])
    if pools:
        # SGLang logs every pool in the same words (sliding, full, draft): the bytes are those of the pool whose tokens count.
        tokens = seen.get("pool_tokens")
        size = pools.get(tokens) if isinstance(tokens, int) else None
        seen["pool_bytes"] = size
    engine = max(marks, key=lambda name: marks[name]) if marks else None
    evidence = replace(Evidence(engine=engine, lines=tuple(kept)), **seen)  # type: ignore[arg-type]
    return evidence


def _read_line(line: str, seen: dict[str, object], marks: dict[str, int], pools: dict[int, int]) -> bool:
    """Adds what one line states; whether it stated anything worth showing."""
    stated = False
    for field, kind, pattern in _rules():
        match = pattern.search(line)
        if match is None:
            continue
        if kind == "mark":
            name = field.split(":", 1)[1]
            marks[name] = marks.get(name, 0) + 1
            continue
        value = _value(kind, match)
        if value is None or _keep_first(field, line, seen):
            continue
        before = seen.get(field)
        if "cells" in line and isinstance(before, int) and isinstance(value, int) and before >= value:
            continue
        # Every worker logs its own memory; blocks are the minimum over all of them.
        seen[field] = min(value, before) if field == "pool_bytes" and isinstance(value, int) and isinstance(before, int) else value
        stated = True
    return _buffers(line, seen, pools) or stated


def _keep_first(field: str, line: str, seen: dict[str, object]) -> bool:
    """A draft or sliding pool is logged after the main one in the same words."""
    if field == "pool_tokens" and field in seen and _ALLOCATED.search(line):
        return True
    return field in ("context_tokens", "model") and field in seen and "n_ctx_train" in line


def _value(kind: str, match: re.Match[str]) -> object:
    groups = [group for group in match.groups() if group]
    if kind == "flag":
        return True
    if not groups:
        return None
    text = groups[0].replace(",", "").rstrip(".")
    if kind == "text":
        return printable(groups[0])
    if len(text) > 18 or text.count(".") > 1:
        return None
    if kind == "size":
        return int(float(text) * _UNITS[groups[1].lower()])
    return float(text) if kind == "float" else int(text.split(".")[0])


def _buffers(line: str, seen: dict[str, object], pools: dict[int, int]) -> bool:
    """Sizes that add up over several parts of a line or over several lines."""
    if _ALLOCATED.search(line):
        total = sum(int(float(size) * _UNITS[unit.lower()]) for _, size, unit in _SIZES.findall(line))
        tokens = _TOKENS.search(line)
        if total and tokens is not None:
            pools.setdefault(int(tokens.group(1)), total)
        return bool(total)
    match = _LLAMA_TOTAL.search(line)
    if match:
        size = int(float(match.group(1) or match.group(2)) * MIB)
        before = seen.get("pool_bytes")
        seen["pool_bytes"] = size + (before if isinstance(before, int) else 0)
        return True
    match = _LLAMA_STATE.search(line)
    if match:
        seen["state_bytes"] = int(float(match.group(1)) * MIB)
        return True
    return False
