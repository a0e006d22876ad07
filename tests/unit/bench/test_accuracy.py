"""The comparison of two formats: right against plain float64 arithmetic, blind to nothing, and the texts that it reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvseal.bench._texts import read_texts, windows_of
from kvseal.bench.accuracy import Scores, Variant, compare, main
from kvseal.core.errors import ConfigError
from kvseal.serve.tokenizer_files import load_tokenizer


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 1.0, 20.0])
def test_compare_agrees_with_the_definitions(noise: float) -> None:
    random = np.random.default_rng(1)
    reference = (4 * random.standard_normal((7, 3000))).astype(np.float32)
    variant = (reference + noise * random.standard_normal(reference.shape) + 5.0).astype(np.float32)
    following = random.integers(0, 3000, 7, dtype=np.int32)
    reference_nll, change, divergence, agrees = compare(reference, variant, following)
    p, q = log_softmax(reference), log_softmax(variant)
    rows = np.arange(7)
    np.testing.assert_allclose(reference_nll, -p[rows, following], rtol=1e-5)
    np.testing.assert_allclose(change, p[rows, following] - q[rows, following], rtol=1e-4, atol=3e-6)
    np.testing.assert_allclose(divergence, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-3, atol=1e-6)
    assert (agrees == (p.argmax(axis=1) == q.argmax(axis=1))).all()


def test_equal_logits_differ_in_nothing() -> None:
    logits = np.random.default_rng(2).standard_normal((3, 100)).astype(np.float32)
    _, change, divergence, agrees = compare(logits, logits, np.zeros(3, dtype=np.int32))
    assert not change.any() and not divergence.any() and agrees.all()


def test_a_summary_counts_tokens_not_windows() -> None:
    few = Scores(np.full(1, 2.0), np.full(1, 0.5), np.full(1, 0.4), np.array([False]), np.array([0], dtype=np.int32))
    many = Scores(np.full(3, 1.0), np.zeros(3), np.zeros(3), np.ones(3, dtype=bool), np.arange(3, dtype=np.int32))
    found = Scores.joined([few, many]).summary()
    assert found["tokens"] == 4
    assert found["reference_perplexity"] == pytest.approx(np.exp(5 / 4))
    assert found["perplexity"] == pytest.approx(np.exp(5.5 / 4))
    assert found["kl_mean"] == pytest.approx(0.1)
    assert found["agreement"] == pytest.approx(0.75)


@pytest.mark.parametrize("text", ["auto", "auto/fp8", "q3/fp16", "fp16/auto", ""])
def test_a_variant_names_both_formats(text: str) -> None:
    with pytest.raises(ConfigError):
        Variant.parse(text)


def test_texts_are_every_string_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"q": "one", "n": 1, "a": ["two", {"deep": "three"}]}\n\n{"q": "four"}\n')
    (tmp_path / "c.json").write_text(json.dumps([{"x": "five"}]))
    (tmp_path / "d.bin").write_bytes(b"\xff")
    assert read_texts([tmp_path]) == {"a": "plain", "b": "one\ntwo\nthree\n\nfour", "c": "five"}
    assert read_texts([tmp_path / "a.txt"]) == {"a": "plain"}
    assert len(read_texts([])["python-reference"]) > 100_000


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no text in"):
        read_texts([tmp_path])
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_texts([tmp_path])


def test_windows_are_consecutive_tokens(demo_model_path: Path) -> None:
    tokenizer = load_tokenizer(demo_model_path)
    text = " ".join(str(number) for number in range(400))
    windows = windows_of({"numbers": text, "short": "too short"}, tokenizer, length=100, tokens=250)
    assert [(window.text, len(window.tokens)) for window in windows] == [("numbers", 100), ("numbers", 100)]
    assert np.concatenate([window.tokens for window in windows]).tolist() == tokenizer.encode(text)[:200]
    assert len(windows_of({"numbers": text}, tokenizer, length=100, tokens=50)) == 1


def test_the_command_sees_what_a_format_costs(demo_model_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = tmp_path / "text.txt"
    text.write_text("The seal is a line of sixty-four bytes that stands in front of every run of keys and values. " * 8)
    arguments = ["--text", str(text), "--length", "64", "--tokens", "64", "--against", "auto/fp32", "--json", str(out), "--threads", "1"]
    assert main([str(demo_model_path), *arguments, "--variants", "auto/fp32,auto/fp16,auto/int4"]) == 0
    found = {name: of["texts"]["all 64"] for name, of in json.loads(out.read_text())["variants"].items()}
    assert found["auto/fp32"]["kl_mean"] == 0.0 and found["auto/fp32"]["agreement"] == 1.0
    assert 0.0 < found["auto/fp16"]["kl_mean"] < 1e-3 < found["auto/int4"]["kl_mean"]
    assert found["auto/int4"]["tokens"] == 63
