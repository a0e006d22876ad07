"""One suite for every backend, part one: results are exact (L13), whatever the batch, the chunks, the pages or the threads."""

from __future__ import annotations

import numpy as np
import pytest
from conformance.forward import BACKENDS, HAVE_CPU, Bench, make_backend, same_bits
from golden.small_models import random_tokens

from kvseal.exec.weights.types import ModelWeights
from kvseal.kv.seal import SEAL_BYTES

VOCAB = 96
LENGTH = 43
CHUNKINGS = [[1] * LENGTH, [8, 8, 8], [7, 9, 1, 1, 13], [LENGTH - 1], [3] * 14]
FORMATS = [(name, weights) for name in BACKENDS for weights in (("fp32",) if name == "reference" else ("fp32", "bf16", "q8", "q4"))]

backends = pytest.mark.parametrize(("name", "weight_format"), FORMATS)
kv_dtypes = pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "int8", "int4"])


@backends
@kv_dtypes
def test_chunks_equal_whole(name: str, weight_format: str, kv_dtype: str, tiny_weights: ModelWeights) -> None:
    bench = Bench(make_backend(name, tiny_weights, kv_dtype=kv_dtype, weight_format=weight_format, pages=40))
    tokens = random_tokens(3, LENGTH, VOCAB)
    whole = bench.hidden(bench.sequence(tokens), [])
    for chunks in CHUNKINGS:
        assert same_bits(bench.hidden(bench.sequence(tokens), chunks), whole), chunks


@pytest.mark.parametrize("name", BACKENDS)
def test_chunks_equal_whole_with_a_window(name: str, window_weights: ModelWeights) -> None:
    bench = Bench(make_backend(name, window_weights, kv_dtype="fp16", pages=40))
    tokens = random_tokens(4, LENGTH, VOCAB)
    whole = bench.hidden(bench.sequence(tokens), [])
    for chunks in CHUNKINGS:
        assert same_bits(bench.hidden(bench.sequence(tokens), chunks), whole), chunks


@backends
@kv_dtypes
def test_batch_equals_alone(name: str, weight_format: str, kv_dtype: str, tiny_weights: ModelWeights) -> None:
    texts = [random_tokens(seed, length, VOCAB) for seed, length in ((1, 20), (2, 9), (3, 33), (4, 1), (5, 16))]
    backend = make_backend(name, tiny_weights, kv_dtype=kv_dtype, weight_format=weight_format, pages=64)
    bench = Bench(backend)
    alone = [bench.hidden(bench.sequence(tokens), []) for tokens in texts]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        sequences = {index: bench.sequence(texts[index]) for index in order}
        parts: dict[int, list[np.ndarray]] = {index: [] for index in order}
        bench.next_page -= sum(backend.geometry.pages_for(len(text)) for text in texts)  # the next order reuses these pages
        while work := [(index, min(1 + (index * 5 + len(parts[index])) % 7, left)) for index in order if (left := _left(sequences[index]))]:
            output = bench.step(*((sequences[index], count) for index, count in work))
            assert not output.breaks
            place = 0
            for index, count in work:
                parts[index].append(output.hidden[place : place + count])
                place += count
        for index in order:
            assert same_bits(np.concatenate(parts[index]), alone[index]), (order, index)


def _left(sequence: object) -> int:
    return len(sequence.tokens) - sequence.done  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", BACKENDS)
@kv_dtypes
def test_payload_does_not_depend_on_chunks(name: str, kv_dtype: str, tiny_weights: ModelWeights) -> None:
    bench = Bench(make_backend(name, tiny_weights, kv_dtype=kv_dtype))
    tokens = random_tokens(5, 24, VOCAB)
    first, second = bench.sequence(tokens), bench.sequence(tokens)
    bench.hidden(first, [])
    bench.hidden(second, [5, 1, 7])
    sections = bench.backend.arena.memory.reshape(-1, bench.backend.geometry.layers, bench.backend.geometry.section_bytes)[..., SEAL_BYTES:]
    for a, b in zip(first.stamps[0::2], second.stamps[0::2], strict=True):
        assert same_bits(sections[a], sections[b])


@pytest.mark.parametrize("name", BACKENDS)
def test_shared_pages_equal_own_pages(name: str, tiny_weights: ModelWeights) -> None:
    """A prefix hit: two sequences read the same sealed pages in one step."""
    bench = Bench(make_backend(name, tiny_weights))
    prefix, ends = random_tokens(6, 16, VOCAB), [random_tokens(7, 9, VOCAB), random_tokens(8, 5, VOCAB)]
    alone = [bench.hidden(bench.sequence(prefix + end), [])[16:] for end in ends]
    owner = bench.sequence(prefix)
    bench.hidden(owner, [])
    bench.backend.seal_digests(np.array(owner.stamps[0::2], dtype=np.int32))
    sharers = [bench.sequence(end) for end in ends]
    for sharer, end in zip(sharers, ends, strict=True):
        sharer.stamps = owner.stamps + sharer.stamps
        sharer.tokens, sharer.done = prefix + end, 16
    output = bench.step(*((sharer, len(end)) for sharer, end in zip(sharers, ends, strict=True)))
    assert not output.breaks
    assert same_bits(output.hidden, np.concatenate(alone))


@backends
def test_logits_of_a_row_depend_on_that_row(name: str, weight_format: str, tiny_weights: ModelWeights) -> None:
    backend = make_backend(name, tiny_weights, weight_format=weight_format)
    hidden = np.random.RandomState(1).standard_normal((37, 64)).astype(np.float32)
    together = backend.logits(hidden)
    assert together.shape == (37, VOCAB)
    for index in (0, 1, 17, 36):
        assert same_bits(backend.logits(hidden[index : index + 1])[0], together[index])
    assert same_bits(backend.logits(hidden[5:14]), together[5:14])


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_wanted_states_come_back(name: str, tiny_weights: ModelWeights) -> None:
    bench = Bench(make_backend(name, tiny_weights))
    tokens = random_tokens(9, 12, VOCAB)
    states = bench.hidden(bench.sequence(tokens), [])
    assert same_bits(bench.step((bench.sequence(tokens), 12), hidden=2).hidden, states[-2:])
    assert bench.step((bench.sequence(tokens), 12), hidden=0).hidden.shape == (0, 64)


WORK = ((50, 21), (31, 12), (9, 9), (40, 1), (24, 24), (33, 5), (18, 1), (12, 12))
"""Of each sequence: its tokens, and how many of them are computed in the step (the others before it)."""


@backends
@kv_dtypes
@pytest.mark.parametrize("states", [(1,) * 8, (0,) * 8, (0, 1, 9, 1, 3, 0, 0, 1), (21, 0, 0, 0, 0, 0, 0, 0)])
def test_states_do_not_depend_on_who_else_asks(
    name: str, weight_format: str, kv_dtype: str, states: tuple[int, ...], tiny_weights: ModelWeights
) -> None:
    """The last layer computes only what is asked for: the same bits, and the same keys and values for whoever goes on."""
    bench = Bench(make_backend(name, tiny_weights, kv_dtype=kv_dtype, weight_format=weight_format, pages=80))
    texts = [random_tokens(seed, length + 1, VOCAB) for seed, (length, _) in enumerate(WORK)]
    alone = [bench.hidden(bench.sequence(text), []) for text in texts]
    bench.next_page = 0
    rows = [bench.sequence(text) for text in texts]
    for row, (length, now) in zip(rows, WORK, strict=True):
        if length > now:
            bench.step((row, length - now))
    output = bench.step(*((row, now) for row, (_, now) in zip(rows, WORK, strict=True)), hidden=states)
    wanted = [whole[length - count : length] for whole, (length, _), count in zip(alone, WORK, states, strict=True)]
    assert not output.breaks
    assert same_bits(output.hidden, np.concatenate(wanted))
    after = bench.step(*((row, 1) for row in rows))
    assert same_bits(after.hidden, np.concatenate([whole[-1:] for whole in alone]))


@pytest.mark.skipif(not HAVE_CPU, reason="the native part is not built")
@pytest.mark.parametrize("weight_format", ["fp32", "bf16", "q8", "q4"])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_threads_do_not_change_a_bit(weight_format: str, kv_dtype: str, tiny_weights: ModelWeights) -> None:
    tokens = random_tokens(10, LENGTH, VOCAB)
    found = []
    for threads in (1, 2, 3):
        backend = make_backend("cpu", tiny_weights, weight_format=weight_format, kv_dtype=kv_dtype, threads=threads)
        states = Bench(backend)
        found.append((hidden := states.hidden(states.sequence(tokens), [11]), backend.logits(hidden)))
        backend.close()
    for hidden, logits in found[1:]:
        assert same_bits(hidden, found[0][0])
        assert same_bits(logits, found[0][1])


@pytest.mark.skipif(not HAVE_CPU, reason="the native part is not built")
@kv_dtypes
def test_native_agrees_with_its_twin(kv_dtype: str, tiny_weights: ModelWeights) -> None:
    """The same float32 weights: results differ by rounding alone, and the stored K and V nearly nowhere."""
    tokens = random_tokens(11, LENGTH, VOCAB)
    benches = [Bench(make_backend(name, tiny_weights, kv_dtype=kv_dtype)) for name in ("reference", "cpu")]
    reference, native = (bench.hidden(bench.sequence(tokens), [5]) for bench in benches)
    allowed = {"fp32": 1e-5, "fp16": 2e-3, "int8": 3e-2, "int4": 0.3}[kv_dtype]
    assert np.abs(reference - native).max() <= allowed * np.abs(reference).max()
    geometry = benches[0].backend.geometry  # float32 scales behind the elements differ in their last bits, as fp32 elements do
    for start in (SEAL_BYTES, SEAL_BYTES + geometry.run_bytes):
        elements = [bench.backend.arena.memory[:5, start : start + geometry.element_run_bytes] for bench in benches]
        assert (elements[0] != elements[1]).mean() < (1.0 if kv_dtype == "fp32" else 0.02)


@pytest.mark.skipif(not HAVE_CPU, reason="the native part is not built")
@kv_dtypes
def test_seals_and_digests_are_twins(kv_dtype: str, tiny_weights: ModelWeights) -> None:
    """The same steps leave the same seals, byte by byte, and the same payload has the same digests in both backends."""
    tokens = random_tokens(12, LENGTH, VOCAB)
    benches = [Bench(make_backend(name, tiny_weights, kv_dtype=kv_dtype), next_nonce=5000) for name in ("reference", "cpu")]
    for bench in benches:
        bench.hidden(bench.sequence(tokens, extra_pages=1), [5, 1])
    assert same_bits(benches[0].seals().copy(), benches[1].seals().copy())
    benches[1].backend.arena.memory[:] = benches[0].backend.arena.memory
    full = np.arange(LENGTH // 8, dtype=np.int32)
    assert same_bits(*(bench.backend.seal_digests(full) for bench in benches))
    assert same_bits(benches[0].seals().copy(), benches[1].seals().copy())
