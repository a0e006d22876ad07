"""What an operator shows: logs of four engines, metrics, and settings that matter."""

from __future__ import annotations

import pytest

from kvseal.audit.advisories import load
from kvseal.audit.findings import Verdict
from kvseal.audit.logs import read_log
from kvseal.audit.metrics import parse_metrics
from kvseal.audit.probes.offline import Shown, look

SGLANG = """
[2026-11-01 10:00:00] server_args=ServerArgs(model_path='zai-org/GLM-5.3', disaggregation_mode='prefill', kv_canary='none',
enable_hierarchical_cache=True) [2026-11-01 10:03:00] KV Cache is allocated. #tokens: 681280, KV size: 34.22 GB
[2026-11-01 10:03:01] max_total_num_tokens=681280, chunked_prefill_size=16384, max_prefill_tokens=16384, context_len=1048576,
available_gpu_mem=5.1 GB
"""
VLLM = """
(APIServer pid=1) INFO 11-01 10:00:00 [api_server.py:1] vLLM API server version 0.20.2
(APIServer pid=1) INFO 11-01 10:00:00 non-default args: {'max_model_len': 32768, 'kv_transfer_config':
KVTransferConfig(kv_connector='NixlConnector')}
(EngineCore pid=9) INFO 11-01 10:01:00 [kv_cache_utils.py:1] GPU KV cache size: 187,232 tokens
"""
LLAMA = """
llama_context: n_seq_max     = 4
llama_context: n_ctx         = 8192
llama_context: n_ctx_seq     = 2048
print_info: n_ctx_train      = 8192
llama_kv_cache:        CPU KV buffer size =   180.00 MiB
"""
LLAMA_SHARED = "0.03 I srv    load_model: initializing, n_slots = 8, n_ctx_slot = 1024, kv_unified = 'true'\n"
KVSEAL = """
  KV pool               65536 tokens in 4096 pages of 16, 1.4 GiB
  served context        8192 tokens per request, prompt and output together (the model's own limit)
"""


@pytest.mark.parametrize(
    ("text", "engine", "pool", "context"),
    [
        (SGLANG, "sglang", 681_280, 1_048_576),
        (VLLM, "vllm", 187_232, 32_768),
        (LLAMA, "llamacpp", 8_192, 2_048),
        (LLAMA_SHARED, "llamacpp", 1_024, 1_024),
        (LLAMA_SHARED.replace("true", "false"), "llamacpp", 8_192, 1_024),
        (KVSEAL, "kvseal", 65_536, 8_192),
    ],
)
def test_logs_of_four_engines(text: str, engine: str, pool: int, context: int) -> None:
    log = read_log(text)
    assert (log.engine, log.pool_tokens, log.context_tokens) == (engine, pool, context)


def test_slots_that_share_their_memory_are_said_to() -> None:
    said = look(Shown(log=read_log(LLAMA_SHARED)), load())
    assert said.findings == [] and any("8 slots of llama.cpp promise 1024 tokens each and share 1024" in text for text in said.unproven)


def test_a_log_of_nothing_known() -> None:
    log = read_log("hello\nn_ctx = 5\n")
    assert (log.engine, log.pool_tokens, log.context_tokens) == ("", None, None)


def test_the_incident_is_seen_in_its_log() -> None:
    result = look(Shown(log=read_log(SGLANG)), load())
    rules = {finding.rule for finding in result.findings}
    assert {"offline.pool-below-context", "offline.no-kv-checksum"} <= rules
    assert "681280 tokens (by the log), the context is 1048576 (by the log): 65 % of it" in next(
        f.proof for f in result.findings if f.rule == "offline.pool-below-context"
    )


def test_a_version_in_the_log_meets_the_advisories() -> None:
    result = look(Shown(log=read_log(VLLM)), load())
    assert "advisory.GHSA-v97p-wpxp-px84" in {finding.rule for finding in result.findings}
    assert any("one full request fits" in text for text in result.proved)
    assert any("kv_load_failure_policy" in text for text in result.unproven)


def test_settings_that_are_right_are_proved() -> None:
    good = SGLANG.replace("kv_canary='none'", "kv_canary='raise', disaggregation_enable_kv_checksum=True").replace("681280", "1048576")
    result = look(Shown(log=read_log(good), packages={"sglang": "0.5.23"}), load())
    assert result.findings == [] and result.verdict is Verdict.PASSED
    policy = VLLM.replace("kv_connector='NixlConnector'", "kv_connector='NixlConnector', kv_load_failure_policy='recompute'")
    assert "offline.load-failure-policy" in {f.rule for f in look(Shown(log=read_log(policy)), load()).findings}
    assert any("fails a request" in text for text in look(Shown(log=read_log(policy.replace("recompute", "fail"))), load()).proved)


def test_metrics_state_pool_context_and_broken_seals() -> None:
    seals = 'kvseal_broken_seals_total{law="L3"} 2\nkvseal_broken_seals_total{law="L4"} 0\n'
    text = "kvseal_kv_pool_tokens 4096\nkvseal_max_servable_tokens 8192\n" + seals
    rules = {finding.rule for finding in look(Shown(metrics=parse_metrics(text)), load()).findings}
    assert rules == {"offline.pool-below-context", "offline.broken-seals"}


def test_metrics_of_vllm_and_lines_that_do_not_read() -> None:
    samples = parse_metrics(
        '# HELP x\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n}}}\nx{ 3\nvllm:num_requests_running{m="a"} 2\n'
    )
    assert samples.pool_tokens() == 1_600 and samples.busy() == 2.0 and samples.engine() == "vllm" and samples.held() is None


def test_nothing_known_proves_nothing() -> None:
    result = look(Shown(packages={"numpy": "2.0"}), load())
    assert result.verdict is Verdict.UNPROVEN and not result.findings
    assert look(Shown(packages={}), load()).verdict is Verdict.UNPROVEN


@pytest.mark.parametrize(
    "text",
    [
        'kvseal_kv_pool_tokens 1e308\nkvseal_kv_pool_tokens{node="1"} 1e308\n',
        'vllm:cache_config_info{num_gpu_blocks="²",block_size="16"} 1\n',
        'vllm:cache_config_info{num_gpu_blocks="' + "9" * 5_000 + '",block_size="16"} 1\n',
        "sglang:max_total_num_tokens -5\n",
        "kvseal_max_servable_tokens 1e300\n",
    ],
)
def test_metrics_beyond_all_bounds_count_nothing(text: str) -> None:
    samples = parse_metrics(text)
    assert samples.pool_tokens() is None and samples.context_tokens() is None
