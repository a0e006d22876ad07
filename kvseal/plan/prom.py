"""Prometheus text of a running engine: pool and context. Reads a saved page or a URL with a short timeout and a size bound.

Owns the metric names. Network only when the user gave a URL.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvseal.core.errors import ConfigError, ModelNotFound
from kvseal.plan.logs import Evidence

MAX_PAGE_BYTES = 16 * 2**20
TIMEOUT_S = 5.0
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([0-9.eE+-]+|NaN|[+-]?Inf)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def fetch(where: str) -> str:
    """The text behind a URL or a path. Raises ModelNotFound when it cannot be had, ConfigError when it is too large."""
    if where.startswith(("http://", "https://")):
        return _fetch_url(where)
    path = Path(where)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PAGE_BYTES + 1)
    except OSError as error:
        raise ModelNotFound(f"{where} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_PAGE_BYTES:
        raise ConfigError(f"{where} has more than {MAX_PAGE_BYTES // 2**20} MiB; a metrics page is smaller")
    return data.decode("utf-8", "replace")


def _fetch_url(url: str) -> str:
    import http.client
    import urllib.error
    import urllib.request

    target = url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"
    try:
        with urllib.request.urlopen(target, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read(MAX_PAGE_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException) as error:
        raise ModelNotFound(f"{url[:200]} does not answer with metrics: {str(error)[:120]}") from None
    if len(data) > MAX_PAGE_BYTES:
        raise ConfigError(f"{url[:200]} answers with more than {MAX_PAGE_BYTES // 2**20} MiB; that is not a metrics page")
    return data.decode("utf-8", "replace")


def read_metrics(text: str) -> Evidence:
    """What the samples state of the pool. Several replicas on one page: the smallest pool counts."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        match = _LINE.match(line[:20000])
        if match is None:
            continue
        labels = dict(_LABEL.findall(match.group(2) or ""))
        try:
            value = float(match.group(3))
        except ValueError:
            continue
        samples.setdefault(match.group(1), []).append((labels, value))
    for read in (_vllm, _sglang, _kvseal, _trtllm, _llamacpp):
        found = read(samples)
        if found is not None:
            return found
    return Evidence()


Samples = dict[str, list[tuple[dict[str, str], float]]]


def _least(samples: Samples, *names: str) -> int | None:
    values = [value for name in names for _, value in samples.get(name, []) if 0 < value < 1e15]
    return int(min(values)) if values else None


def _info(samples: Samples, name: str) -> dict[str, str]:
    entries = samples.get(name, [])
    return entries[0][0] if entries else {}


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 16 else None


def _vllm(samples: Samples) -> Evidence | None:
    if not any(name.startswith("vllm:") for name in samples):
        return None
    info = _info(samples, "vllm:cache_config_info")
    blocks, size = _int(info.get("num_gpu_blocks")), _int(info.get("block_size"))
    fraction = info.get("gpu_memory_utilization", "")
    return Evidence(
        engine="vllm",
        blocks=blocks,
        block_tokens=size,
        pool_tokens=_int(info.get("kv_cache_size_tokens")),
        kv_dtype=info.get("cache_dtype"),
        memory_fraction=float(fraction) if re.fullmatch(r"[01]?\.[0-9]+", fraction) else None,
        context_tokens=_least(samples, "vllm:max_model_len"),
        prefix_caching={"True": True, "False": False}.get(info.get("enable_prefix_caching", "")),
        lines=tuple(f'vllm:cache_config_info {key}="{value[:60]}"' for key, value in info.items() if key in _SHOWN),
    )


_SHOWN = {"block_size", "num_gpu_blocks", "cache_dtype", "gpu_memory_utilization", "kv_cache_size_tokens", "enable_prefix_caching"}


def _sglang(samples: Samples) -> Evidence | None:
    if not any(name.startswith("sglang:") for name in samples):
        return None
    tokens = _least(samples, "sglang:max_total_num_tokens", "sglang:full_max_total_num_tokens")
    used = _least(samples, "sglang:num_used_tokens")
    share = [value for _, value in samples.get("sglang:token_usage", []) if 0.01 < value <= 1]
    lines = [f"sglang:max_total_num_tokens {tokens}"] if tokens else []
    if tokens is None and used and share:
        tokens = int(used / share[0])
        lines = [f"sglang:num_used_tokens {used} / token_usage {share[0]:g}: about {tokens}"]
    longest = _least(samples, "sglang:max_req_len")
    # The longest request is one token below the smaller of context and pool: it says nothing of the context when the pool is smaller.
    context = _least(samples, "sglang:context_len") or (longest + 1 if longest is not None and longest + 1 != tokens else None)
    slots = _least(samples, "sglang:max_mamba_cache_size")
    return Evidence(engine="sglang", pool_tokens=tokens, context_tokens=context, state_slots=slots, lines=tuple(lines))


def _kvseal(samples: Samples) -> Evidence | None:
    if "kvseal_kv_pool_tokens" not in samples:
        return None
    return Evidence(
        engine="kvseal",
        pool_tokens=_least(samples, "kvseal_kv_pool_tokens"),
        pool_bytes=_least(samples, "kvseal_kv_pool_bytes"),
        context_tokens=_least(samples, "kvseal_max_servable_tokens"),
        lines=("kvseal_kv_pool_tokens",),
    )


def _trtllm(samples: Samples) -> Evidence | None:
    name = next((n for n in samples if n.startswith(("nv_trt_llm_kv_cache_block_metrics", "trtllm_kv_cache"))), None)
    if name is None:
        return None
    values: dict[str, int] = {}
    for labels, value in samples[name]:
        for key, label in labels.items():
            if key.endswith("type") and 0 < value < 1e15:
                values[label] = int(value)
    return Evidence(
        engine="tensorrt-llm",
        blocks=values.get("max") or values.get("max_num_blocks"),
        block_tokens=values.get("tokens_per"),
        lines=(name,),
    )


def _llamacpp(samples: Samples) -> Evidence | None:
    if not any(name.startswith("llamacpp:") for name in samples):
        return None
    context = _least(samples, "llamacpp:n_ctx")
    tokens = _least(samples, "llamacpp:kv_cache_tokens_total", "llamacpp:n_ctx")
    return Evidence(engine="llama.cpp", pool_tokens=tokens, context_tokens=context, lines=("llamacpp",))
