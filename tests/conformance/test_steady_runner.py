"""The native backend's runner against the plain one on the same backend: every result equal, whatever rows ask for."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import numpy as np
import pytest

from kvseal.core.batch import Batch, Row
from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import SamplingParams
from kvseal.exec.backends.cpu import CPUBackend
from kvseal.exec.backends.cpu_steady import SteadyRunner
from kvseal.exec.loader import load_model
from kvseal.exec.runner import Runner
from kvseal.kv.geometry import KVGeometry

PAGES, PAGE_TOKENS, ROWS = 64, 16, 9


class Table:
    def __init__(self, first_page: int, pages: int, nonce: int) -> None:
        self.scope = Scope(bytes(range(16)))
        self.valid_tokens = 0
        self.stamps = array("Q", [x for page in range(first_page, first_page + pages) for x in (page, nonce + page)])


class Bench:
    """One backend and rows that go on step by step."""

    def __init__(self, path: Path, seed: int) -> None:
        weights = load_model(path)
        spec = weights.spec
        geometry = KVGeometry(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, page_tokens=PAGE_TOKENS)
        self.backend = CPUBackend(weights, geometry, pages=PAGES, threads=2)
        self.nonces = np.arange(1000, 1000 + PAGES, dtype=np.uint64)
        rng = random.Random(seed)
        self.tables = [Table(7 * row, 7, 1000) for row in range(ROWS)]
        self.histories = [array("I", [rng.randrange(40_000) for _ in range(rng.randrange(5, 30))]) for _ in range(ROWS)]
        self.prompts = [len(history) for history in self.histories]
        self.params = [PARAMS[row % len(PARAMS)] for row in range(ROWS)]

    def rows(self, *, whole: bool) -> tuple[Row, ...]:
        found = []
        for index, history in enumerate(self.histories):
            start = 0 if whole else len(history) - 1
            tokens = history[:] if whole else (history[-1],)
            name, params = RequestId(str(index)), self.params[index]
            found.append(Row(name, tokens, start, self.tables[index], params, True, history, self.prompts[index]))
        return tuple(found)


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.2, top_k=30, frequency_penalty=0.7, repetition_penalty=1.2, seed=9, logprobs=0),
    SamplingParams(temperature=0.0, stop_token_ids=frozenset({5}), min_tokens=4, logit_bias={9: 3.0}),
]


@pytest.fixture(scope="module")
def benches(demo_model_path: Path) -> tuple[Bench, Bench]:
    return Bench(demo_model_path, 1), Bench(demo_model_path, 1)


def test_the_steady_runner_gives_what_the_plain_one_gives(benches: tuple[Bench, Bench]) -> None:
    one, other = benches
    plain = Runner(one.backend, one.backend.sampler())
    steady = SteadyRunner(other.backend.stepper(), Runner(other.backend, other.backend.sampler()))
    digested = 0
    for step in range(24):
        results = []
        for bench, runner in ((one, plain), (other, steady)):
            results.append(runner.run(Batch(step, bench.rows(whole=step == 0)), bench.nonces))
        assert results[0] == results[1]
        for index, result in enumerate(results[0].rows):
            assert result.token is not None
            digested += len(result.page_digests)
            one.histories[index].append(result.token)
            other.histories[index].append(result.token)
    assert digested >= 9, "pages were filled on the way"


def test_a_broken_row_is_broken_in_both_and_alone(benches: tuple[Bench, Bench]) -> None:
    one, other = benches
    for bench in benches:
        bench.tables[3].stamps[0] = 7 * 3
        bench.tables[3].stamps[1] += 1
    plain = Runner(one.backend, one.backend.sampler()).run(Batch(1, one.rows(whole=False)), one.nonces)
    others = Runner(other.backend, other.backend.sampler())
    steady = SteadyRunner(other.backend.stepper(), others).run(Batch(1, other.rows(whole=False)), other.nonces)
    for a, b in zip(plain.rows, steady.rows, strict=True):
        assert (a.broken is None) == (b.broken is None)
        assert (a[:5], str(a.broken)) == (b[:5], str(b.broken))
    assert [row.broken is not None for row in steady.rows] == [index == 3 for index in range(ROWS)]


def test_other_steps_are_left_alone(benches: tuple[Bench, Bench]) -> None:
    bench = benches[1]
    stepper = bench.backend.stepper()
    before = bench.backend.arena.memory.copy()
    chunk = bench.rows(whole=False)[0]._replace(samples=False)
    prompt = bench.rows(whole=False)[0]._replace(prompt_tokens=10**6)
    for rows in ((), (chunk,), (prompt,), (*bench.rows(whole=False), chunk)):
        assert stepper.decode(rows, bench.nonces) is None
    assert np.array_equal(bench.backend.arena.memory, before)


@pytest.mark.parametrize("field, value", [("tokens", (10**6,)), ("tokens", (-1,)), ("start", -1)])
def test_nonsense_is_refused_before_anything_runs(benches: tuple[Bench, Bench], field: str, value: object) -> None:
    bench = benches[1]
    row = bench.rows(whole=False)[0]._replace(prompt_tokens=-2, **{field: value})
    with pytest.raises(ValueError, match=r"outside the vocabulary|negative"):
        bench.backend.stepper().decode((row,), bench.nonces)
    with pytest.raises(ValueError, match="one entry per page"):
        bench.backend.stepper().decode((row,), bench.nonces[:-1].copy())
