"""Whose prefix is it: tenants come from keys, and nothing that a caller writes reaches another tenant's pages (L4)."""

from __future__ import annotations

import json
from pathlib import Path

from servers import ServerProcess

SYSTEM = "You are the confidential assistant of one company; this text is long enough to fill several pages of the cache. " * 2


def test_prefixes_are_shared_inside_a_tenant_only(demo_model_path: Path, logs: Path) -> None:
    keys = logs / "tenants.json"
    keys.write_text(json.dumps({"alice-key-1": "alice", "alice-key-2": "alice", "bob-key-1": "bob"}))
    with ServerProcess(demo_model_path, logs / "tenants.log", engine={"pool_tokens": 2048}, api_keys=str(keys)) as server:

        def cached(key: str, **more: str) -> int:
            body = {"prompt": SYSTEM, "max_tokens": 2, "temperature": 0, "seed": 1} | more
            answer = server.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            usage = answer.raise_for_status().json()["usage"]
            texts.add(answer.json()["choices"][0]["text"])
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        texts: set[str] = set()
        assert cached("alice-key-1") == 0
        assert cached("alice-key-1") > 16
        assert cached("alice-key-2") > 16, "two keys of one tenant"
        assert cached("bob-key-1") == 0
        assert cached("alice-key-1", cache_salt="s") == 0, "a caller can narrow its own scope"
        assert cached("alice-key-1", cache_salt="s") > 16
        assert cached("bob-key-1", cache_salt="s") == 0, "a copied salt opens nothing"
        assert cached("bob-key-1", user="alice", prompt_cache_key="alice") == 0
        assert len(texts) == 1, "hit or miss, the answer is the same"
        seen = server.metrics(authorization="Bearer bob-key-1")
        assert all(value == 0 for name, value in seen.items() if name.startswith("kvseal_broken_seals"))
