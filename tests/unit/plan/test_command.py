"""`kvseal size` as people run it: exit statuses, one-line errors, JSON, page, promise. And files that are not what they seem."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvseal.core.errors import ModelCorrupt
from kvseal.plan.command import main
from kvseal.plan.gguf import read_gguf

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 4 * 2 * 128 * 2


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    out = capsys.readouterr()
    return status, out.out, out.err


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    status, out, err = run(capsys, *argv, "--json")
    assert (status, err) == (0, "")
    page: dict[str, Any] = json.loads(out)
    return page


def test_table_and_json_say_the_same(capsys: pytest.CaptureFixture[str], config: str) -> None:
    status, text, _ = run(capsys, config, "--context", "4096", "--users", "3")
    page = as_json(capsys, config, "--context", "4,096", "--users", "3")
    assert status == 0 and f"{TOKEN_BYTES:,}" in text
    assert page["per_gpu"]["growing_bytes_per_token"] == TOKEN_BYTES
    assert page["per_gpu"]["all_users_bytes"] == 3 * 4096 * TOKEN_BYTES
    assert page["by_kv_dtype"]["fp8"]["sequence_bytes"] == 4096 * TOKEN_BYTES // 2


@pytest.mark.parametrize(
    ("pools", "status", "word"),
    [
        (["--prefill-pool", "681,280"], 1, "BROKEN"),
        (["--prefill-pool", "681280", "--decode-pool", "2000000"], 1, "BROKEN"),
        (["--prefill-pool", "1048576"], 0, "HELD"),
        (["--prefill-pool", "1,048,575"], 1, "BROKEN"),
        (["--decode-pool", "4GiB"], 0, "HELD"),
        (["--decode-pool", "2GiB"], 1, "BROKEN"),
        (["--kv-gib", "4"], 0, "HELD"),
        (["--engine", "sglang", "--pool-tokens", "681280"], 1, "BROKEN"),
    ],
)
def test_promise(capsys: pytest.CaptureFixture[str], config: str, pools: list[str], status: int, word: str) -> None:
    found, out, _ = run(capsys, config, "--model-limit", "1Mi", "--promise", "1048576", *pools)
    assert found == status
    assert f"PROMISE {word}" in out
    assert ("missing" in out) == (status == 1)


def test_missing_gib_and_largest_true_context(capsys: pytest.CaptureFixture[str], config: str) -> None:
    status, out, _ = run(capsys, config, "--promise", "1048576", "--prefill-pool", "681280", "--json")
    pool = json.loads(out)["promise"]["pools"][0]
    assert status == 1
    assert pool["missing_tokens"] == 1048576 - 681280
    assert pool["missing_bytes_per_gpu"] == (1048576 - 681280) * TOKEN_BYTES
    assert json.loads(out)["promise"]["largest_true_context_tokens"] == 8192
    _, out, _ = run(capsys, config, "--promise", "1048576", "--prefill-pool", "681280", "--model-limit", "2M", "--json")
    assert json.loads(out)["promise"]["largest_true_context_tokens"] == 681280


def test_promise_beyond_the_model_is_broken(capsys: pytest.CaptureFixture[str], config: str) -> None:
    status, out, _ = run(capsys, config, "--promise", "1048576", "--prefill-pool", "2000000")
    assert status == 1 and "PROMISE BROKEN" in out and "largest true context is 8,192" in out
    assert "the model's own limit is 8,192" in out and "--model-limit" in out
    status, out, _ = run(capsys, config, "--promise", "8192", "--prefill-pool", "2000000")
    assert status == 0 and "own limit" not in out and "largest true context is 8,192" in out
    assert run(capsys, config, "--promise", "8193", "--prefill-pool", "2000000")[0] == 1


@pytest.mark.parametrize(
    ("engine", "words"),
    [("vllm", "refuses to start"), ("sglang", "refuses to start"), ("llama.cpp", "dangerous"), ("kvseal", "never advertises")],
)
def test_a_context_beyond_the_model_is_not_said_to_start(capsys: pytest.CaptureFixture[str], config: str, engine: str, words: str) -> None:
    assert words in run(capsys, config, "--engine", engine, "--context", "9000", "--kv-gib", "8")[1]
    assert words not in run(capsys, config, "--engine", engine, "--context", "8192", "--kv-gib", "8")[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_weights_that_do_not_fit_are_never_thought_smaller(capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str) -> None:
    path = tmp_path / "config.json"
    large = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
    path.write_text(json.dumps(GOOD | large))
    asked = (str(path), "--gpu", "H100-80G", "--engine", engine, "--promise", "8192")
    status, out, _ = run(capsys, *asked)
    assert status == 1 and "does not start: weights of" in out and "NOT CERTAIN" in out and "expect in the log" not in out
    assert run(capsys, *asked, "--weights-dtype", "int4")[0] == 0


def test_llamacpp_splits_layers_never_heads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD | {"num_hidden_layers": 28, "num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 448}))
    for split in (["--gpus", "8"], ["--tp", "8"]):
        page = as_json(capsys, str(path), "--engine", "llama.cpp", "--gpu", "RTX3090", *split)
        assert page["per_gpu"]["growing_bytes_per_token"] == 2 * 28 * 7 * 64 * 2
        assert (
            page["engine"]["budget"]["gpu_total"]
            == 8 * as_json(capsys, str(path), "--engine", "vllm", "--gpu", "RTX3090")["engine"]["budget"]["gpu_total"]
        )
    assert run(capsys, str(path), "--engine", "vllm", "--gpu", "RTX3090", "--gpus", "8")[0] == 2


def test_a_limit_that_only_the_class_knows_breaks_no_promise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "max_position_embeddings"}))
    assert run(capsys, str(path), "--promise", "1048576", "--prefill-pool", "2000000")[0] == 0


def test_a_log_context_below_the_promise_breaks_it(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Initializing a V1 LLM engine (v0.26.1) with config: max_seq_len=65536\nGPU KV cache size: 2,000,000 tokens\n")
    for model in ([config], []):
        status, out, _ = run(capsys, *model, "--log", str(log), "--promise", "131072")
        assert status == 1 and "the server's own context is 65,536" in out
        # The server runs with it: what the config says of the limit has been overridden.
        assert run(capsys, *model, "--log", str(log), "--promise", "65536")[0] == 0


def test_names_with_control_characters_reach_no_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD | {"architectures": ["Evil\x1b]0;x\x07\nForCausalLM"], "model_type": "e\x1b[31m"}))
    status, _, err = run(capsys, str(path))
    assert status == 2 and err.count("\n") == 1 and "\x1b" not in err and "\x07" not in err
    status, out, err = run(capsys, str(path), "--assume-gqa")
    assert status == 0 and "\x1b" not in out and "\x07" not in out


def test_log_on_standard_input(capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(
        sys, "stdin", io.StringIO("KV Cache is allocated. #tokens: 681280, K size: 1.0 GB, V size: 1.0 GB\ncontext_len=1048576\n")
    )
    status, out, _ = run(capsys, "--log", "-", "--promise", "1048576")
    assert status == 1 and "681,280" in out


def test_compare_and_page(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, out, _ = run(capsys, config, "--compare", config, "--context", "4k", "--engine", "vllm", "--kv-gib", "2", "--html", str(page))
    assert status == 0 and len(out.splitlines()) == 3
    text = page.read_text()
    assert text.count("<svg") >= 6 and "<script" not in text and "http" not in text.replace("https://github.com", "")


def test_page_escapes_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "<img src=x onerror=alert(1)>.json"
    path.write_text(json.dumps(GOOD | {"architectures": ["LlamaForCausalLM"]}))
    page = tmp_path / "page.html"
    assert run(capsys, str(path), "--html", str(page))[0] == 0
    assert "<img" not in page.read_text()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "examples:" in out and "exit status" in out and "--promise" in out


BAD_OPTIONS = [
    [],
    ["--tp", "-1"],
    ["--tp", "3"],
    ["--tp", "16"],
    ["--tp", "0"],
    ["--users", "0"],
    ["--users", "-5"],
    ["--context", "0"],
    ["--context", "x"],
    ["--context", "-4096"],
    ["--context", "9" * 400],
    ["--kv-dtype", "fp7"],
    ["--kv-dtype", "kvarn"],
    ["--gpu", "abacus"],
    ["--gpus", "3"],
    ["--engine", "tgi"],
    ["--engine-version", "latest", "--engine", "vllm"],
    ["--promise", "4096"],
    ["--promise", "4096.5", "--kv-gib", "4"],
    ["--prefill-pool", "lots", "--promise", "1"],
    ["--gpu-memory-utilization", "1.5", "--gpu", "H100"],
    ["--gpu-memory-utilization", "nan", "--gpu", "H100"],
    ["--frobnicate"],
    ["--log", "/nonexistent/log"],
    ["--metrics", "/nonexistent/page"],
    ["--dcp", "3", "--tp", "4"],
    ["--pp", "99"],
    ["--kv-gib", "-1"],
    ["--block-size", "0"],
    ["--html", "/nonexistent/dir/page.html"],
    ["--log", "a", "--metrics", "b"],
    ["--speculative-tokens", "1e9"],
    ["--engine", "kvseal", "--kv-dtype", "fp8"],
    ["--engine", "llama.cpp", "--kv-dtype", "nvfp4"],
    ["--kv-dtype", "fp8_ds_mla"],
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=" ".join)
def test_bad_options_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str], config: str, options: list[str]) -> None:
    status, out, err = run(capsys, *([config] if options else []), *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kvseal size: ") and len(err) > 25


def bad_files(tmp_path: Path) -> list[Path]:
    texts = {
        "null": GOOD | {"num_attention_heads": None},
        "negative": GOOD | {"num_hidden_layers": -3},
        "fraction": GOOD | {"hidden_size": 64.5},
        "text": GOOD | {"num_hidden_layers": "32"},
        "true": GOOD | {"num_hidden_layers": True},
        "huge": GOOD | {"hidden_size": 10**300},
        "layers": GOOD | {"num_hidden_layers": 10**9},
        "bert": {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
        "tokenizer": {"tokenizer_class": "LlamaTokenizer", "model_max_length": 4096},
        "diffusion": {"_class_name": "UNet2DConditionModel"},
        "unknown": GOOD | {"architectures": ["NovelForCausalLM"], "model_type": "novel"},
        "string": GOOD | {"architectures": "LlamaForCausalLM"},
        "nested": {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": "gemma"},
        "nan": GOOD | {"hidden_size": float("nan")},
        "infinite": GOOD | {"num_hidden_layers": float("inf")},
    }
    paths = []
    for name, value in texts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    raw = {
        "empty": b"",
        "words": b"hello",
        "cut": b'{"architectures": ["Lla',
        "list": b"[1, 2]",
        "number": b"12",
        "deep": b'{"a":' * 100000,
        "deeper": b"[" * 300 + b"]" * 300,
        "digits": b'{"architectures":["LlamaForCausalLM"],"hidden_size":' + b"9" * 6000 + b"}",
        "random": bytes(range(256)) * 8,
        "utf16": "{}".encode("utf-16"),
        "gguf": b"GGUF" + b"\xff" * 64,
        "gguf-cut": b"GGUF\x03\0\0\0",
        "nest": json.dumps(GOOD)[:-1].encode() + b',"x":' + b"[" * 100 + b"]" * 100 + b"}",
    }
    for name, data in raw.items():
        (tmp_path / f"{name}.json").write_bytes(data)
    with (tmp_path / "large.json").open("wb") as file:
        file.write(b'{"architectures":["LlamaForCausalLM"],"x":"')
        file.truncate(200 * 2**20)
    (tmp_path / "directory").mkdir()
    paths = sorted(tmp_path.iterdir())
    return [*paths, tmp_path / "absent.json"]


def test_bad_files_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = bad_files(tmp_path)
    assert len(paths) > 28
    for path in paths:
        status, out, err = run(capsys, str(path))
        assert (status, out, err.count("\n")) == (2, "", 1), path.name
        assert "Traceback" not in err and len(err) > 25, path.name


def gguf_file(path: Path, values: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, value in values.items():
        out += text(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
        else:
            out += struct.pack("<II", 4, value)
    for name, dims in tensors.items():
        out += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", 8, 0)
    path.write_bytes(out)
    return path


LLAMA_GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.context_length": 8192,
    "llama.feed_forward_length": 1536,
    "tokenizer.ggml.tokens": ["a"] * 50,
}


def test_gguf_header(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "small.gguf", LLAMA_GGUF, {"token_embd.weight": (576, 50)})
    page = as_json(capsys, str(path), "--engine", "llama.cpp", "--context", "8192")
    assert page["per_gpu"]["growing_bytes_per_token"] == 23040
    assert page["model"]["max_context_tokens"] == 8192
    header = read_gguf(path)
    assert (header.weight_bytes, header.config["vocab_size"]) == (576 * 50 * 34 // 32, 50)


def test_gguf_of_a_delta_net(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = {
        "general.architecture": "qwen35",
        "qwen35.block_count": 65,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.embedding_length": 5120,
        "qwen35.attention.head_count": 24,
        "qwen35.attention.head_count_kv": 4,
        "qwen35.attention.key_length": 256,
        "qwen35.attention.value_length": 256,
        "qwen35.ssm.conv_kernel": 4,
        "qwen35.ssm.state_size": 128,
        "qwen35.ssm.group_count": 16,
        "qwen35.ssm.time_step_rank": 48,
        "qwen35.ssm.inner_size": 6144,
        "qwen35.full_attention_interval": 4,
        "qwen35.context_length": 4096,
    }
    page = as_json(capsys, str(gguf_file(tmp_path / "delta.gguf", values, {})), "--engine", "llama.cpp", "--context", "4096")
    assert page["per_gpu"]["growing_bytes_per_token"] == 65536
    assert page["engine"]["request_bytes"] == 4096 * 65536 + 48 * (30720 + 786432) * 4


def test_gguf_without_mla_tensors_falls_back_to_full_heads(tmp_path: Path) -> None:
    values = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 2,
        "deepseek2.embedding_length": 2048,
        "deepseek2.attention.head_count": 16,
        "deepseek2.attention.head_count_kv": 16,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
        "deepseek2.attention.key_length": 192,
        "deepseek2.attention.value_length": 128,
    }
    old = read_gguf(gguf_file(tmp_path / "old.gguf", values, {"blk.0.attn_kv_b.weight": (512, 4096)}))
    new = read_gguf(gguf_file(tmp_path / "new.gguf", values, {"blk.0.attn_k_b.weight": (128, 512)}))
    assert (old.config["model_type"], old.config["v_head_dim"]) == ("llama", 128)
    assert (new.config["kv_lora_rank"], new.config["qk_rope_head_dim"]) == (512, 64)


def test_gguf_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    data = gguf_file(tmp_path / "whole.gguf", LLAMA_GGUF, {"token_embd.weight": (576, 50)}).read_bytes()
    for length in range(4, len(data), 7):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:length])
        with pytest.raises(ModelCorrupt):
            read_gguf(cut)


def test_weights_next_to_the_config_are_counted(capsys: pytest.CaptureFixture[str], config: str) -> None:
    with (Path(config).parent / "model.safetensors").open("wb") as file:
        file.truncate(3 * 2**30)
    page = as_json(capsys, str(Path(config).parent), "--engine", "vllm", "--gpu", "H100")
    assert page["engine"]["budget"]["weights"] == 3 * 2**30


def test_nothing_heavy_is_imported() -> None:
    heavy = ("numpy", "huggingface_hub", "torch", "msgspec", "asyncio")
    code = f"import sys, kvseal.plan.command; print([m for m in {heavy} if m in sys.modules])"
    root = str(Path(__file__).resolve().parents[3])
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": root})
    assert out.stdout.strip() == "[]"


def test_every_shared_config_is_answered_by_every_engine(capsys: pytest.CaptureFixture[str], shared: Path) -> None:
    paths = sorted((shared / "model-configs").glob("*.json"))
    assert len(paths) >= 53
    for path in paths:
        for engine in ("vllm", "sglang"):
            status, out, err = run(capsys, str(path), "--engine", engine, "--kv-gib", "40", "--context", "16384", "--json")
            assert (status, err) == (0, ""), (path.name, engine)
            assert json.loads(out)["engine"]["pool"]["tokens"] > 0, (path.name, engine)
