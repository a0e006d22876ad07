"""Rows that read the same pages read them together: the same bits as alone (L13); a broken seal ends those who hold the page (L12)."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from conformance.forward import BACKENDS, OTHER_SCOPE, Bench, Sequence_, make_backend, same_bits
from golden.small_models import random_tokens

from kvseal.exec.backend import SealCheck
from kvseal.exec.weights.types import ModelWeights

VOCAB = 96
PAGE = 16
PARTITION = 128


def branch(bench: Bench, trunk: Sequence_, shared: int, length: int, seed: int) -> Sequence_:
    """A sequence whose first `shared` tokens (whole pages) are the trunk's pages, and whose next ones but the last are computed."""
    tokens = [*trunk.tokens[:shared], *random_tokens(seed, length - shared, VOCAB)]
    own = bench.sequence(tokens[shared:])
    grown = Sequence_(tokens, array("Q", [*trunk.stamps[: 2 * shared // PAGE], *own.stamps]), done=shared)
    if length - shared > 1:
        assert not bench.step((grown, length - shared - 1)).breaks
    return grown


def family(bench: Bench) -> list[Sequence_]:
    """Two trunks with branches at several depths, one that stands alone, and one of another scope with the same text."""
    first, second = (bench.sequence(random_tokens(seed, length, VOCAB)) for seed, length in ((1, 401), (2, 289)))
    stranger = bench.sequence(first.tokens[:300], scope=OTHER_SCOPE)
    for trunk in (first, second, stranger):
        assert not bench.step((trunk, len(trunk.tokens) - 1)).breaks
    shapes = [
        (first, 256, 300, 11),
        (first, 384, 385, 12),
        (first, 128, 145, 13),
        (second, 256, 257, 14),
        (first, 384, 390, 15),
        (first, 112, 280, 16),
    ]
    branches = [branch(bench, *shape) for shape in shapes]
    return [branches[0], stranger, branches[1], first, branches[2], second, branches[3], branches[4], branches[5]]


def last_state_alone(bench: Bench, tokens: list[int]) -> np.ndarray:
    return bench.hidden(bench.sequence(tokens), [])[-1:]


@pytest.mark.parametrize("name", BACKENDS[-1:])  # the reference reads each row by itself
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("windowed", [False, True])
def test_rows_in_company_equal_rows_alone(
    name: str, kv_dtype: str, windowed: bool, tiny_weights: ModelWeights, window_weights: ModelWeights
) -> None:
    bench = Bench(make_backend(name, window_weights if windowed else tiny_weights, kv_dtype=kv_dtype, page_tokens=PAGE, pages=320))
    rows = family(bench)
    output = bench.step(*((row, 1) for row in rows))
    assert not output.breaks
    for index, row in enumerate(rows):
        assert same_bits(output.hidden[index : index + 1], last_state_alone(bench, row.tokens)), index


def test_many_rows_share_one_page(tiny_weights: ModelWeights) -> None:
    """More than one unit holds, and neighbours that decode nothing shared or are in prefill."""
    bench = Bench(make_backend(BACKENDS[-1], tiny_weights, kv_dtype="fp16", page_tokens=PAGE, pages=1200))
    trunk = bench.sequence(random_tokens(1, 300, VOCAB))
    assert not bench.step((trunk, 299)).breaks
    rows = [branch(bench, trunk, 256, 258 + seed % 3, 100 + seed) for seed in range(40)]
    chunk, lonely = bench.sequence(random_tokens(5, 40, VOCAB)), bench.sequence(random_tokens(6, 20, VOCAB))
    assert not bench.step((lonely, 19)).breaks
    output = bench.step((chunk, 39), *((row, 1) for row in rows), (lonely, 1), hidden=1)
    assert not output.breaks
    for index, row in enumerate([Sequence_(chunk.tokens[:39], chunk.stamps), *rows, lonely]):
        assert same_bits(output.hidden[index : index + 1], last_state_alone(bench, row.tokens)), index


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_broken_shared_page_ends_those_who_hold_it_and_no_other(name: str, layer: int, tiny_weights: ModelWeights) -> None:
    bench = Bench(make_backend(name, tiny_weights, kv_dtype="fp16", page_tokens=PAGE, pages=320))
    rows = family(bench)
    holders = {0, 2, 3, 7}  # of the page at position 9 of the first trunk
    page = int(rows[3].stamps[2 * 9])
    bench.seals()[page, layer]["nonce"] ^= 1
    output = bench.step(*((row, 1) for row in rows))
    assert {(found.row, found.page, found.ordinal, found.layer, found.check) for found in output.breaks} == {
        (row, page, 9, layer, SealCheck.NONCE) for row in holders
    }
    for index in set(range(len(rows))) - holders:
        assert same_bits(output.hidden[index : index + 1], last_state_alone(bench, rows[index].tokens)), index
