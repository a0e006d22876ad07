"""The demo model against Hugging Face transformers in float32: logits at chosen positions, and greedy text of 20 prompts.

Fixtures: tools/make_golden_fixtures.py. The texts are those where no two logits along the way come closer than float32 sums in another
order can tell apart, so equality is exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conformance.forward import BACKENDS, HAVE_CPU, Bench, Sequence_, make_backend, same_bits
from golden.small_models import FIXTURES

from kvseal.exec.backend import Backend
from kvseal.exec.backends.reference import ReferenceBackend
from kvseal.exec.loader import load_model
from kvseal.exec.weights.types import ModelWeights

TEXTS: list[dict[str, object]] = json.loads((FIXTURES / "demo_greedy.json").read_text())["texts"]
SEPARATED_GAP = 1e-3
REFERENCE_TEXTS = 1
"""The reference backend is slow; it computes the first text only."""


@pytest.fixture(scope="module")
def weights(demo_model_path: Path) -> ModelWeights:
    return load_model(demo_model_path)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, weights: ModelWeights) -> Iterator[Backend]:
    made = make_backend(request.param, weights, page_tokens=16, pages=160)
    yield made
    made.close()


def tokens_of(text: dict[str, object], key: str = "tokens") -> list[int]:
    return list(text[key])  # type: ignore[call-overload]


def greedy(bench: Bench, texts: list[dict[str, object]]) -> list[list[int]]:
    """All texts at once, one token per step after their prompts, until each has as many tokens as its expectation."""
    sequences = [bench.sequence(tokens_of(text) + [0] * len(tokens_of(text, "output"))) for text in texts]
    outputs: list[list[int]] = [[] for _ in texts]
    counts = [len(tokens_of(text)) for text in texts]
    while running := [index for index, text in enumerate(texts) if len(outputs[index]) < len(tokens_of(text, "output"))]:
        output = bench.step(*((sequences[index], counts[index]) for index in running), hidden=1)
        assert not output.breaks
        for index, row in zip(running, bench.backend.logits(output.hidden), strict=True):
            token = int(row.argmax())
            outputs[index].append(token)
            if sequences[index].done < len(sequences[index].tokens):
                sequences[index].tokens[sequences[index].done] = token
            counts[index] = 1
    return outputs


def test_the_texts_are_separated() -> None:
    assert len(TEXTS) == 20
    assert all(float(str(text["smallest_gap"])) > SEPARATED_GAP for text in TEXTS)


def test_greedy_text_equals_transformers(backend: Backend) -> None:
    texts = TEXTS[:REFERENCE_TEXTS] if isinstance(backend, ReferenceBackend) else TEXTS
    outputs = greedy(Bench(backend), texts)
    for text, output in zip(texts, outputs, strict=True):
        assert output == tokens_of(text, "output"), text["prompt"]


def test_logits_equal_transformers(backend: Backend) -> None:
    bench = Bench(backend)
    with np.load(FIXTURES / "demo_logits.npz") as stored:
        for index in range(1 if isinstance(backend, ReferenceBackend) else 3):
            sequence = bench.sequence(tokens_of(TEXTS[index]) + tokens_of(TEXTS[index], "output"))
            states = bench.hidden(sequence, [])[stored[f"positions_{index}"]]
            found, expected = bench.backend.logits(np.ascontiguousarray(states))[:, ::16], stored[f"logits_{index}"]
            assert np.abs(found - expected).max() <= 2e-3
            bench.next_page = 0


@pytest.mark.skipif(not HAVE_CPU, reason="the native part is not built")
@pytest.mark.parametrize(
    ("weight_format", "kv_dtype"), [("auto", "fp16"), ("fp32", "fp32"), ("q8", "int8"), ("q4", "int4"), ("bf16", "fp16")]
)
def test_the_demo_model_is_exact(weights: ModelWeights, weight_format: str, kv_dtype: str) -> None:
    """Batch = alone, chunked = whole, prefix hit = miss, one thread = two: the same bits (L13)."""
    texts = [tokens_of(text) + tokens_of(text, "output") for text in TEXTS[:4]]
    whole: list[np.ndarray] = []
    for threads in (2, 1):
        backend = make_backend("cpu", weights, kv_dtype=kv_dtype, weight_format=weight_format, page_tokens=16, pages=160, threads=threads)
        bench = Bench(backend)
        alone = [bench.hidden(bench.sequence(tokens), [] if threads == 2 else [5, 1, 33]) for tokens in texts]
        if threads == 2:
            whole = alone
            assert_batches_and_hits_equal(bench, texts, whole)
        assert all(same_bits(a, b) for a, b in zip(alone, whole, strict=True))
        backend.close()


def assert_batches_and_hits_equal(bench: Bench, texts: list[list[int]], whole: list[np.ndarray]) -> None:
    bench.next_page = 0
    sequences = [bench.sequence(tokens) for tokens in texts]
    parts: list[list[np.ndarray]] = [[] for _ in texts]
    while work := [(index, min(3 + 7 * index, left)) for index, s in enumerate(sequences) if (left := len(s.tokens) - s.done)]:
        output = bench.step(*((sequences[index], count) for index, count in work))
        place = 0
        for index, count in work:
            parts[index].append(output.hidden[place : place + count])
            place += count
    for index, expected in enumerate(whole):
        assert same_bits(np.concatenate(parts[index]), expected)
    bench.backend.seal_digests(np.array(sequences[0].stamps[0:4:2], dtype=np.int32))
    rest = bench.sequence(texts[0][32:])
    hit = Sequence_(list(texts[0]), sequences[0].stamps[:4] + rest.stamps, done=32)
    output = bench.step((hit, len(texts[0]) - 32))
    assert not output.breaks
    assert same_bits(output.hidden, whole[0][32:])
