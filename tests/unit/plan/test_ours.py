"""KVSeal's own figures: what `size` foretells is what the server prints, and a log of it agrees with the formula that made it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvseal.core.config import EngineConfig, ServeConfig
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.plan import Ask, Settings, answer, read_shape
from kvseal.plan.dtype import KVFormat
from kvseal.plan.evidence import Comparison, compare
from kvseal.plan.logs import read_log
from kvseal.plan.shape import ModelShape
from kvseal.serve import server
from kvseal.serve.chat_template import ChatTemplate
from kvseal.serve.served import ServedModel
from kvseal.serve.tokenizer_files import from_gguf_metadata

from ..serve.tiny_model import TEMPLATE, start_report, tiny_metadata

LAYERS, HEADS, DIM = 30, 3, 64
OLD = """\
  KV pool               65536 tokens in 4096 pages of 16, 1.4 GiB
  KV format             6a5e385a4c2bbc2a (fp16)
  served context        8192 tokens per request, prompt and output together (the model's own limit)
"""
"""As servers up to 0.1 printed it."""


def shape() -> ModelShape:
    return read_shape(
        {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "hidden_size": 576, "num_attention_heads": 9,
            "num_key_value_heads": HEADS, "max_position_embeddings": 8192, "torch_dtype": "float16",
        },
        "demo",
    )  # fmt: skip


@pytest.fixture(scope="module")
def served() -> ServedModel:
    tokenizer = from_gguf_metadata(tiny_metadata())
    template = ChatTemplate(TEMPLATE, tokenizer.special_texts)
    return ServedModel(name="demo", tokenizer=tokenizer, template=template, report=start_report(), created_s=1)


def report_of(kv: KVDtype, pages: int, page_tokens: int, served: ServedModel) -> str:
    """What a server with such a pool prints at start."""
    geometry = KVGeometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, kv_dtype=kv, page_tokens=page_tokens)
    report = start_report(
        kv_dtype=kv.value, page_tokens=page_tokens, pool_pages=pages, pool_tokens=pages * page_tokens,
        pool_bytes=pages * geometry.page_bytes, served_context_tokens=min(8192, pages * page_tokens), model_context_tokens=8192,
    )  # fmt: skip
    return server.start_report(ServeConfig(engine=EngineConfig(model=Path("demo.gguf"))), replace(served, report=report))


def against(text: str, kv_dtype: str = "auto") -> Comparison:
    return compare(shape(), Ask(kv_dtype=kv_dtype), read_log(text.splitlines()))[1]


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("pages", [3, 26, 999, 4096, 77777, 10**6])
@pytest.mark.parametrize("kv", list(KVDtype))
def test_a_log_of_ours_agrees_with_the_formula_and_is_foretold(kv: KVDtype, pages: int, page_tokens: int, served: ServedModel) -> None:
    text = report_of(kv, pages, page_tokens, served)
    found = against(text)
    assert found.agrees and found.logged_tokens == found.computed_tokens == pages * page_tokens
    settings = Settings(kv_format=KVFormat("bf16"), pool_tokens=pages * page_tokens, block_tokens=page_tokens)
    plan = answer(shape(), Ask(engine="kvseal", kv_dtype=kv.value, context_tokens=16, settings=settings)).engine
    assert plan is not None and plan.log_line.removeprefix("KV pool ") in text


def test_a_figure_rounded_to_a_tenth_agrees_too() -> None:
    found = against(OLD)
    assert found.agrees and found.logged_tokens == found.computed_tokens == 65536


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp32"])
def test_another_format_than_the_logged_one_differs(kv_dtype: str) -> None:
    found = against(OLD, kv_dtype)
    assert found.agrees is False and "--kv-dtype" in found.explanations[-1]


def test_the_format_is_read_from_the_log() -> None:
    assert read_log(OLD.splitlines()).kv_dtype == "fp16"
    report, _ = compare(shape(), Ask(), read_log(OLD.replace("(fp16)", "(int8)").splitlines()))
    assert report.engine is not None and report.engine.kv_format == "int8_per_token_head"
    assert "--" not in report.kv_format_source + report.context_source, "nobody gave an option"
    report, _ = compare(shape(), Ask(kv_dtype="fp16", context_tokens=4096), read_log(OLD.splitlines()))
    assert (report.kv_format_source, report.context_source) == ("--kv-dtype", "--context")


def test_only_formats_that_we_serve_are_listed() -> None:
    names = [name for name, _ in answer(shape(), Ask(engine="kvseal")).formats]
    assert names == [kv.value for kv in (KVDtype.FP16, KVDtype.FP32, KVDtype.INT8, KVDtype.INT4)]
    assert "fp8" in [name for name, _ in answer(shape(), Ask()).formats]
