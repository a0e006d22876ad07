"""Start-up logs of engines: the pool, the context, the version and the settings that matter to an audit.

Owns the wordings (vLLM, SGLang, llama.cpp and KVSeal). Reads what it knows and passes over the rest. Never keeps a line of the log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MOST_CHARS = 20_000_000
_NUMBER = r"([0-9][0-9,]{0,20})(?![0-9])"

_POOLS = (
    ("vllm", re.compile(rf"GPU KV cache size:\s*{_NUMBER} tokens")),
    ("vllm", re.compile(rf"CPU KV cache size:\s*{_NUMBER} tokens")),
    ("sglang", re.compile(rf"max_total_num_tokens\s*=\s*{_NUMBER}")),
    ("sglang", re.compile(rf"KV Cache is allocated\.\s*#tokens:\s*{_NUMBER}")),
    ("kvseal", re.compile(rf"KV pool\s+{_NUMBER} tokens")),
)
_CONTEXTS = (
    ("vllm", re.compile(rf"max_seq_len\s*=\s*{_NUMBER}")),
    ("vllm", re.compile(rf"['\"]?max_model_len['\"]?\s*[:=]\s*{_NUMBER}")),
    ("sglang", re.compile(rf"context_len(?:gth)?\s*=\s*{_NUMBER}")),
    ("kvseal", re.compile(rf"served context\s+{_NUMBER} tokens")),
)
_VERSIONS = (
    ("vllm", re.compile(r"vLLM (?:API server|engine|is starting)?[^\n]{0,60}?version\s+v?(\d+\.\d+[\w.]*)", re.IGNORECASE)),
    ("vllm", re.compile(r"LLM engine \(v(\d+\.\d+[\w.]*)\)")),
    ("sglang", re.compile(r"sglang[^\n]{0,40}?version\s*[:=]?\s*v?(\d+\.\d+[\w.]*)", re.IGNORECASE)),
)
_SETTINGS = (
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "kv_canary",
    "disaggregation_enable_kv_checksum",
    "enable_hierarchical_cache",
    "kv_load_failure_policy",
    "kv_connector",
    "enable_prefix_caching",
    "disaggregation_enable_deferred_release",
)
_LLAMA_TOTAL = re.compile(rf"n_ctx\s*=\s*{_NUMBER}")
_LLAMA_SEQUENCE = re.compile(rf"n_ctx_(?:per_seq|seq|slot)\s*=\s*{_NUMBER}")
_LLAMA_SLOTS = re.compile(r"n_slots = ([0-9]{1,9}), n_ctx_slot = ([0-9]{1,15}), kv_unified = '(true|false)'")
_LLAMA_TRAIN = re.compile(rf"n_ctx_train\s*=\s*{_NUMBER}")


@dataclass(slots=True)
class StartLog:
    """What a log says. `settings` holds only those that are stated; its values are as written, in lower case."""

    engine: str = ""
    version: str = ""
    pool_tokens: int | None = None
    context_tokens: int | None = None
    settings: dict[str, str] = field(default_factory=dict)


def read_log(text: str) -> StartLog:
    """Reads a start-up log; the last statement of each kind counts (a server may have been started again), the smallest pool of several."""
    text = text[:_MOST_CHARS]
    log = StartLog()
    for engine, pattern in _POOLS:
        pools = [_count(found) for found in pattern.findall(text)]
        if pools and log.pool_tokens is None:
            log.engine, log.pool_tokens = engine, min(pools)
    for engine, pattern in _CONTEXTS:
        contexts = [_count(found) for found in pattern.findall(text)]
        if contexts and (log.context_tokens is None or log.engine == engine) and log.engine in ("", engine):
            log.engine, log.context_tokens = engine, contexts[-1]
    for engine, pattern in _VERSIONS:
        versions = pattern.findall(text)
        if versions and not log.version and log.engine in ("", engine):
            log.engine, log.version = engine, versions[-1]
    _read_llama(text, log)
    for name in _SETTINGS:
        stated = re.findall(rf"\b{name}['\"]?\s*[:=]\s*['\"]?([\w.+-]+)", text)
        if stated:
            log.settings[name] = stated[-1].lower()
    return log


def _read_llama(text: str, log: StartLog) -> None:
    """llama.cpp allocates n_ctx cells at start and parts them among the slots, or lets them share: the pool is what it says it is."""
    slots = _LLAMA_SLOTS.findall(text)
    if not log.engine and slots:
        count, each, shared = slots[-1]
        log.engine, log.context_tokens = "llamacpp", int(each)
        log.pool_tokens = int(each) * (1 if shared == "true" else int(count))
        log.settings |= {"n_slots": count, "kv_unified": shared}
    if log.engine or not ("llama_context" in text or "llama_init" in text or "llama_kv_cache" in text):
        return
    totals, sequences = _LLAMA_TOTAL.findall(text), _LLAMA_SEQUENCE.findall(text)
    if totals:
        log.engine, log.pool_tokens = "llamacpp", _count(totals[-1])
        log.context_tokens = _count(sequences[-1]) if sequences else _count(totals[-1])
        trained = _LLAMA_TRAIN.findall(text)
        if trained:
            log.settings["n_ctx_train"] = str(_count(trained[-1]))


def _count(text: str) -> int:
    return int(text.replace(",", ""))
