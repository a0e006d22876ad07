"""Start-up logs and metrics pages, in the wordings of several years, against promise and formula."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvseal.core.errors import ConfigError, ModelNotFound
from kvseal.plan import Ask, read_shape
from kvseal.plan.evidence import claim_of, compare
from kvseal.plan.logs import Evidence, bounded_lines, read_log
from kvseal.plan.prom import fetch, read_metrics

GIB = 2**30
VLLM_V0 = """\
INFO worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.5GiB peak_torch_memory=17.06GiB
INFO worker.py: the current vLLM instance can use total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.90) = 21.22GiB
INFO worker.py: model weights take 14.99GiB; non_torch_memory takes 0.35GiB; PyTorch activation peak memory takes 2.07GiB; \
the rest of the memory reserved for KV Cache is 3.81GiB.
INFO executor_base.py:110] # CUDA blocks: 1952, # CPU blocks: 2048
INFO executor_base.py:115] Maximum concurrency for 20000 tokens per request: 1.56x
"""
VLLM_V1 = """\
INFO api_server.py: vLLM API server version 0.26.1
INFO core.py: Initializing a V1 LLM engine (v0.26.1) with config: model='Qwen/Qwen3.8-27B-FP8', max_seq_len=131072, \
tensor_parallel_size=2, pipeline_parallel_size=1, kv_cache_dtype=fp8_e4m3
(Worker_TP0) INFO gpu_worker.py: Available KV cache memory: 5.01 GiB
(Worker_TP1) INFO gpu_worker.py: Available KV cache memory: 4.99 GiB
INFO kv_cache_utils.py: GPU KV cache size: 302,921 tokens
INFO kv_cache_utils.py: Maximum concurrency for 131,072 tokens per request: 2.31x
"""
VLLM_REFUSED = """\
ValueError: To serve at least one request with the models's max seq len (30000), (6.66 GiB KV cache is needed, which is larger than the \
available KV cache memory (5.44 GiB). Based on the available memory, the estimated maximum model length is 13528. Try increasing \
`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""
SGLANG = """\
[TP0] server_args=ServerArgs(model_path='zai-org/GLM-5.2-FP8', tp_size=8, mem_fraction_static=0.75, kv_cache_dtype='fp8_e4m3', page_size=64)
[TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 464768, KV size: 23.91 GB
[TP1] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 464768, KV size: 23.91 GB
[TP0] KV Cache is allocated. #tokens: 464768, K size: 0.15 GB, V size: 0.15 GB
[TP0] max_total_num_tokens=464768, chunked_prefill_size=8192, max_running_requests=2048, context_len=1048576
"""
LLAMA = """\
llama_context: n_ctx_train = 131072
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 32768
llama_kv_cache: size =  768.00 MiB ( 32768 cells,  24 layers,  1/1 seqs), K (f16):  384.00 MiB, V (f16):  384.00 MiB
llama_memory_recurrent: size =   72.98 MiB (     1 cells,  24 layers,  1 seqs), R (f32):    0.98 MiB, S (f32):   72.00 MiB
"""
TRTLLM = """\
[TensorRT-LLM][INFO] TRTGptModel maxSequenceLen: 1048576
[TensorRT-LLM][INFO] Number of tokens per block: 64.
[TensorRT-LLM][INFO] Allocated 34.20 GiB for max tokens in paged KV cache (681280).
"""
OURS = """\
  KV per token          23040 bytes = 2 (K and V) x 30 layers x 3 KV heads x 64 x 2 B
  KV pool               26112 tokens in 1632 pages of 16, 576.9 MiB
  context               8192 tokens promised by the model
  served context        8192 tokens per request, prompt and output together (the model's own limit)
"""


def read(text: str) -> Evidence:
    return read_log(text.splitlines())


def test_vllm_v0() -> None:
    found = read(VLLM_V0)
    assert (found.engine, found.blocks, found.concurrency, found.concurrency_tokens) == ("vllm", 1952, 1.56, 20000)
    assert (found.pool_bytes, found.weights_bytes) == (int(3.81 * GIB), int(14.99 * GIB))
    assert (found.activation_bytes, found.non_torch_bytes) == (int(2.07 * GIB), int(0.35 * GIB))
    assert (found.gpu_bytes, found.memory_fraction) == (int(23.58 * GIB), 0.90)


def test_vllm_v0_in_one_line() -> None:
    found = read(
        "Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.34GiB peak_torch_memory=17.06GiB "
        "memory_usage_post_profile=15.35GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB gpu_memory_utilization=0.90"
    )
    assert (found.gpu_bytes, found.non_torch_bytes, found.pool_bytes) == (int(23.58 * GIB), int(0.35 * GIB), int(3.81 * GIB))


def test_vllm_arguments_and_banner() -> None:
    found = read(
        "(APIServer pid=1) INFO [utils.py:299]  \u2584\u2584 \u2584\u2588 \u2588     \u2588  version 0.19.1rc1.dev301+g60995c05b\n"
        "non-default args: {'model_tag': 'm', 'max_model_len': 131072, 'kv_cache_dtype': 'fp8', 'tensor_parallel_size': 2, "
        "'max_num_batched_tokens': 8192, 'max_num_seqs': 1}\n"
        "INFO [gpu_worker.py:508] Available KV cache memory: 5.98 GiB"
    )
    assert (found.version, found.context_tokens, found.kv_dtype) == ("0.19.1rc1.dev301+g60995c05b", 131072, "fp8")
    assert (found.tp, found.max_batched_tokens, found.max_sequences) == (2, 8192, 1)


def test_vllm_v1_keeps_the_poorest_worker() -> None:
    found = read(VLLM_V1)
    assert (found.version, found.model, found.tp, found.kv_dtype) == ("0.26.1", "Qwen/Qwen3.8-27B-FP8", 2, "fp8_e4m3")
    assert (found.pool_tokens, found.pool_bytes, found.context_tokens) == (302921, int(4.99 * GIB), 131072)


def test_vllm_combined_line_of_0_33() -> None:
    found = read("INFO GPU KV cache size: 893,504 tokens, Maximum concurrency for 163,840 tokens per request: 5.45x")
    assert (found.pool_tokens, found.concurrency_tokens, found.concurrency) == (893504, 163840, 5.45)


def test_vllm_refusal() -> None:
    found = read(VLLM_REFUSED)
    assert found.refused
    assert (found.context_tokens, found.needed_bytes, found.pool_bytes) == (30000, int(6.66 * GIB), int(5.44 * GIB))
    claim = claim_of(found)
    assert claim is not None and claim.tokens == 13528


def test_vllm_old_refusal() -> None:
    found = read(
        "ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648)."
    )
    assert (found.refused, found.context_tokens, found.pool_tokens) == (True, 29000, 23648)


def test_sglang_main_pool_is_not_overwritten_by_the_draft() -> None:
    found = read(SGLANG)
    assert (found.engine, found.pool_tokens, found.pool_bytes) == ("sglang", 464768, int(23.91 * GIB))
    assert (found.context_tokens, found.tp, found.block_tokens, found.memory_fraction) == (1048576, 8, 64, 0.75)


def test_sglang_sliding_pool_comes_first_and_is_not_the_pool(shared: Path) -> None:
    found = read(
        "[TP0] Use sliding window memory pool. full_layer_tokens=375360, swa_layer_tokens=300288\n"
        "[TP0] KV Cache is allocated. #tokens: 300288, K size: 8.38 GB, V size: 5.59 GB\n"
        "[TP0] KV Cache is allocated. #tokens: 375360, K size: 1.21 GB, V size: 0.81 GB\n"
        "[TP0] max_total_num_tokens=375360, context_len=262144, tp_size=4, page_size=64\n"
    )
    assert (found.pool_tokens, found.sliding_tokens, found.pool_bytes) == (375360, 300288, int(1.21 * GIB) + int(0.81 * GIB))
    _, compared = compare(shape(shared, "XiaomiMiMo__MiMo-V2-Flash"), Ask(engine_version="0.5.8"), found)
    assert compared.agrees is True


def test_llamacpp_adds_its_buffers() -> None:
    found = read(LLAMA)
    assert (found.engine, found.pool_tokens, found.context_tokens, found.sequences) == ("llama.cpp", 32768, 32768, 1)
    assert (found.pool_bytes, found.state_bytes) == (768 * 2**20, int(72.98 * 2**20))


def test_old_llamacpp_wording() -> None:
    found = read("llama_new_context_with_model: KV self size  = 4096.00 MiB, K (f16): 2048.00 MiB, V (f16): 2048.00 MiB")
    assert (found.engine, found.pool_bytes) == ("llama.cpp", 4096 * 2**20)


def test_tensorrt_llm_and_ours() -> None:
    trt, ours = read(TRTLLM), read(OURS)
    assert (trt.engine, trt.pool_tokens, trt.pool_bytes, trt.block_tokens) == ("tensorrt-llm", 681280, int(34.20 * GIB), 64)
    assert (ours.engine, ours.pool_tokens, ours.context_tokens, ours.block_tokens) == ("kvseal", 26112, 8192, 16)
    assert (ours.blocks, ours.pool_bytes) == (1632, int(576.9 * 2**20))


def test_tensorrt_llm_against_the_formula(shared: Path) -> None:
    text = "[TensorRT-LLM] TensorRT-LLM version: 0.17.0\n[TensorRT-LLM][INFO] TRTGptModel maxSequenceLen: 131072\n"
    text += "[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 14283\n[TensorRT-LLM][INFO] Number of tokens per block: 64.\n"
    text += "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 55.79 GiB for max tokens in paged KV cache (914112)."
    llama = shape(shared, "meta-llama__Meta-Llama-3.1-8B")
    report, found = compare(llama, Ask(promise_tokens=131072), read(text))
    # No other engine's blocks are made of it, and its tokens stand.
    assert report.engine is None and report.promise is not None and report.promise.verdicts[0].claim.tokens == 914112
    assert found.agrees is False and any("8-bit, not 16-bit" in line for line in found.explanations)
    assert compare(llama, Ask(kv_dtype="fp8"), read(text))[1].agrees is True


def test_a_physical_figure_is_not_overruled_by_a_formula_of_the_wrong_format(shared: Path) -> None:
    text = "vLLM API server version 0.19.0\nAvailable KV cache memory: 40.00 GiB\nGPU KV cache size: 1,497,952 tokens\nmax_seq_len=131072\n"
    report, found = compare(shape(shared, "Qwen__Qwen2.5-7B"), Ask(promise_tokens=131072), read(text))
    assert found.agrees is False and report.promise is not None and report.promise.verdicts[0].claim.tokens == 1497952


def test_blocks_without_their_size_and_engines_that_do_not_say_their_name() -> None:
    found = read("# GPU blocks: 1952, # CPU blocks: 2048\nMaximum concurrency for 20000 tokens per request: 1.56x")
    assert found.tokens is not None and 0.995 < found.tokens / (1952 * 16) < 1
    assert read("args: Namespace(block_size=32)\n# GPU blocks: 1952").tokens == 1952 * 32
    assert read("Initializing a V1 LLM engine (v0.33.0) with config: max_seq_len=131072").engine == "vllm"


def test_tensorrt_llm_over_the_years() -> None:
    old = read(
        "[TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache.\n[TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache."
    )
    new = read(
        "[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 65 [window size=2051], tokens per block=32, "
        "primary blocks=116617, secondary blocks=0\n"
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 78.30 GiB for max tokens in paged KV cache (3731744)."
    )
    assert (old.engine, old.pool_tokens, old.pool_bytes) == ("tensorrt-llm", 132608, 69524783104)
    assert (new.blocks, new.block_tokens, new.pool_tokens) == (116617, 32, 3731744)


def test_llamacpp_sliding_cache_does_not_hide_the_full_one() -> None:
    found = read(
        "llama_kv_cache_unified_iswa: creating non-SWA KV cache, size = 32768 cells\n"
        "llama_kv_cache_unified: size =  512.00 MiB ( 32768 cells,   8 layers,  1/1 seqs), K (f16):  256.00 MiB, V (f16):  256.00 MiB\n"
        "llama_kv_cache_unified_iswa: creating     SWA KV cache, size = 1536 cells\n"
        "llama_kv_cache_unified: size =  120.00 MiB (  1536 cells,  40 layers,  1/1 seqs), K (f16):   60.00 MiB, V (f16):   60.00 MiB\n"
    )
    assert (found.pool_tokens, found.pool_bytes) == (32768, 632 * 2**20)


def test_noise_states_nothing() -> None:
    assert not read("GET /v1/models 200\n\x00\xff binary\nKV cache is a nice thing\n" * 50).found


def test_a_hostile_line_is_cut_and_survived() -> None:
    assert read("GPU KV cache size: " + "9" * 300000 + " tokens").pool_tokens is None


def shape(shared: Path, name: str):  # type: ignore[no-untyped-def]
    return read_shape(json.loads((shared / "model-configs" / f"{name}.json").read_text()), name)


def test_log_agrees_with_formula_and_promise(shared: Path) -> None:
    report, found = compare(shape(shared, "Qwen__Qwen3.5-27B"), Ask(promise_tokens=131072), read(VLLM_V1))
    assert found.agrees is True and found.computed_tokens == 302921
    assert report.promise is not None and report.promise.held and report.promise.largest_true_context == 131072
    report, _ = compare(shape(shared, "Qwen__Qwen3.5-27B"), Ask(promise_tokens=262144), read(VLLM_V1))
    assert report.promise is not None and not report.promise.held and report.promise.verdicts[0].claim.tokens == 316736


def test_difference_is_explained(shared: Path) -> None:
    report, found = compare(shape(shared, "zai-org__GLM-5.2"), Ask(engine_version="0.5.15", promise_tokens=1048576), read(SGLANG))
    assert found.agrees is False
    assert any("raw 576-byte fp8 rows with an index key in 78 of 78" in text for text in found.explanations)
    assert report.promise is not None and not report.promise.held


def test_another_rank_had_less_memory(shared: Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    }
    log = "vLLM API server version 0.8.0\nAvailable KV cache memory: 8.69 GiB\nGPU KV cache size: 81,536 tokens\n"
    log += "max_seq_len=131072, tensor_parallel_size=2\n"
    _, found = compare(read_shape(config, "distill"), Ask(), read(log))
    assert found.agrees is False and any("minimum over all workers" in text for text in found.explanations)


def test_vllm_v0_blocks_beat_rounded_gib(shared: Path) -> None:
    _, found = compare(shape(shared, "meta-llama__Meta-Llama-3.1-8B"), Ask(engine_version="0.6.4"), read(VLLM_V0))
    assert found.computed_tokens == 1952 * 16


def test_llamacpp_log_agrees() -> None:
    config = {
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    _, found = compare(read_shape(config, "falcon-h1"), Ask(), read(LLAMA))
    assert found.agrees is True


def test_metrics_pages(tmp_path: Path) -> None:
    vllm = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",gpu_memory_utilization="0.9",num_gpu_blocks="11702"} 1.0\n'
    found = read_metrics("# HELP x\n" + vllm + "vllm:num_requests_running 3\n")
    assert (found.engine, found.blocks, found.block_tokens, found.tokens) == ("vllm", 11702, 16, 187232)
    assert read_metrics('sglang:max_total_num_tokens{model_name="m"} 681280.0\n').pool_tokens == 681280
    assert read_metrics("sglang:num_used_tokens 5000\nsglang:token_usage 0.5\n").pool_tokens == 10000
    assert read_metrics("sglang:max_total_num_tokens 9000\nsglang:max_req_len 8191\n").context_tokens == 8192
    assert read_metrics("sglang:max_total_num_tokens 9000\nsglang:max_req_len 8999\n").context_tokens is None
    assert read_metrics("llamacpp:n_tokens_max 17\n").context_tokens is None
    ours = read_metrics("kvseal_kv_pool_tokens 26112.0\nkvseal_max_servable_tokens 8192.0\n")
    assert (ours.engine, ours.pool_tokens, ours.context_tokens) == ("kvseal", 26112, 8192)
    trt = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 100\n'
    trt += 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64\n'
    assert read_metrics(trt).tokens == 6400
    assert not read_metrics("up 1\nnot a metric NaN").found
    page = tmp_path / "metrics.txt"
    page.write_text(vllm)
    assert "11702" in fetch(str(page))


def test_metrics_of_a_live_server() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"kvseal_kv_pool_tokens 26112.0\n" if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        assert read_metrics(fetch(address)).pool_tokens == read_metrics(fetch(f"{address}/metrics")).pool_tokens == 26112
        server.shutdown()


def test_an_endless_line_is_cut_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.plan.logs.MAX_LOG_CHARS", 100_000)
    with Path("/dev/zero").open(encoding="utf-8", errors="replace") as endless:
        pieces = list(bounded_lines(endless))
    assert [len(piece) for piece in pieces] == [20_000]
    assert list(bounded_lines(io.StringIO("a" * 30_000 + "\nb\n\nc"))) == ["a" * 20_000, "b\n", "\n", "c"]
    with pytest.raises(ConfigError):
        fetch("/dev/zero")


def test_metrics_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        fetch(str(tmp_path / "absent"))
    with pytest.raises(ModelNotFound):
        fetch("http://127.0.0.1:9/metrics")
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(ConfigError):
        fetch(str(big))
