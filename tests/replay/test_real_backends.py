"""The mechanisms of D5/D11, B3, F1 and K5 again, against the backends that serve: the row breaks, its neighbour does not change by a bit.
And the whole engine on both: batched, chunked, preempted and cached is alone and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden.small_models import cases, write_folder

from kvseal.core.batch import Batch, BatchResult, Row
from kvseal.core.clock import ManualClock
from kvseal.core.config import EngineConfig
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import Request, SamplingParams
from kvseal.exec.backend import Backend
from kvseal.exec.backends.reference import ReferenceBackend
from kvseal.exec.loader import load_model
from kvseal.exec.runner import Runner
from kvseal.exec.weights.types import ModelWeights
from kvseal.kv.block_table import BlockTable
from kvseal.kv.capacity import Capacity
from kvseal.kv.geometry import KVGeometry
from kvseal.kv.manager import Grant, KVManager
from kvseal.lab.rig import GREEDY, OTHER_SCOPE, SCOPE
from kvseal.node.build import assemble, start_report
from kvseal.sched.policy import LengthHistory

from .rigging import stale_copy

PAGES, PAGE_TOKENS = 12, 8


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    folder = tmp_path_factory.mktemp("tiny")
    write_folder(folder, next(case for case in cases() if case["name"] == "llama-biases"))
    return load_model(folder)


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest, weights: ModelWeights) -> Backend:
    spec = weights.spec
    geometry = KVGeometry(
        layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, page_tokens=PAGE_TOKENS, weights_digest=weights.digest
    )
    if request.param == "reference":
        return ReferenceBackend(weights, geometry, pages=PAGES)
    from kvseal.exec.backends.cpu import CPUBackend

    return CPUBackend(weights, geometry, pages=PAGES, weight_format="fp32", threads=2)


class Bench:
    """Cache and runner over one backend; rows by hand."""

    def __init__(self, backend: Backend) -> None:
        capacity = Capacity.derive(model_context_tokens=64, pool_pages=PAGES, page_tokens=PAGE_TOKENS)
        self.kv = KVManager(backend.geometry, pool_pages=PAGES, capacity=capacity, secret=b"bench")
        self.runner = Runner(backend)
        self.vocab = backend.spec.vocab_size

    def prompt(self, seed: int, tokens: int) -> list[int]:
        return [(seed * 7919 + at * 104_729) % self.vocab for at in range(tokens)]

    def admit(self, name: str, tokens: list[int], *, scope: Scope = SCOPE, reuse: bool = True) -> Grant:
        grant = self.kv.admit(RequestId(name), scope, tokens, first_tokens=len(tokens), reuse=reuse)
        assert grant is not None
        return grant

    def compute(self, *rows: Row) -> BatchResult:
        return self.runner.run(Batch(1, rows), self.kv.ledger_nonces)

    def computed(self, name: str, tokens: list[int], *, scope: Scope = SCOPE) -> Grant:
        grant = self.admit(name, tokens, scope=scope)
        start = grant.table.valid_tokens
        result = self.compute(row(name, grant, tokens, start)).rows[0]
        assert result.broken is None
        self.kv.commit(grant, tokens[start:], len(tokens), result.page_digests)
        return grant

    def neighbour(self) -> tuple[Row, int | None]:
        """A healthy row, and its token when it is alone."""
        tokens = self.prompt(77, 9)
        alone = self.admit("alone", tokens, scope=OTHER_SCOPE)
        token = self.compute(row("alone", alone, tokens, 0)).rows[0].token
        self.kv.drop(alone)
        grant = self.admit("neighbour", tokens, scope=OTHER_SCOPE)
        return row("neighbour", grant, tokens, 0), token

    def breaks(self, bad: Row) -> str:
        """The check that stops `bad`, in a batch between two others."""
        healthy, token = self.neighbour()
        first, second = self.compute(bad, healthy).rows
        assert first.broken is not None and first.token is None and not first.page_digests
        assert second.broken is None and second.token == token
        return first.broken.check


def row(name: str, grant: Grant, tokens: list[int], start: int, *, table: BlockTable | None = None) -> Row:
    return Row(RequestId(name), tokens[start:], start, table or grant.table, GREEDY, True, tokens, len(tokens))


def test_a_remembered_table_reads_nothing_of_the_next_owner(backend: Backend) -> None:
    bench = Bench(backend)
    tokens = bench.prompt(1, 20)
    grant = bench.computed("old", tokens)
    table = stale_copy(grant)
    bench.kv.drop(grant)
    bench.kv.purge(SCOPE)
    bench.computed("next", bench.prompt(2, 30), scope=OTHER_SCOPE)
    assert bench.breaks(row("old", grant, [*tokens, 3], 20, table=table)) == "nonce"


def test_pages_published_before_their_forward_are_not_read(backend: Backend) -> None:
    bench = Bench(backend)
    tokens = bench.prompt(1, 20)
    stranger = bench.computed("stranger", bench.prompt(5, 60), scope=OTHER_SCOPE)
    bench.kv.drop(stranger)
    bench.kv.purge(OTHER_SCOPE)
    grant = bench.admit("early", tokens)
    assert bench.breaks(row("early", grant, tokens, 16)) == "nonce"


def test_a_shared_prefix_is_not_written(backend: Backend) -> None:
    bench = Bench(backend)
    prefix = bench.prompt(1, 16)
    before = bench.computed("first", [*prefix, 1])
    memory = backend.arena.memory[before.table.stamps[0]].copy()
    grant = bench.admit("second", [*prefix, 2])
    assert grant.cached_tokens == 16
    assert bench.breaks(row("second", grant, [2, 3], 0)) == "reused"
    assert (backend.arena.memory[before.table.stamps[0]] == memory).all()


def test_another_scope_is_not_read(backend: Backend) -> None:
    bench = Bench(backend)
    tokens = bench.prompt(1, 17)
    theirs = bench.computed("theirs", tokens)
    mine = bench.admit("mine", tokens, scope=OTHER_SCOPE)
    table = BlockTable(OTHER_SCOPE, PAGE_TOKENS)
    table.extend(theirs.table.stamps[:4])
    table.extend(mine.table.stamps[:2])
    assert bench.breaks(row("mine", mine, tokens, 16, table=table)) == "scope"


def answers(backend: Backend, *, chunk_tokens: int, running: int, optimist: bool) -> list[list[int]]:
    config = EngineConfig(model=Path("tiny"), chunk_tokens=chunk_tokens, max_running=running)
    capacity = Capacity.derive(model_context_tokens=64, pool_pages=PAGES, page_tokens=PAGE_TOKENS)
    report = start_report(
        config, backend.spec, backend.geometry, capacity, weights_format="fp32", weights_bytes=0, threads=1, instruction_set=""
    )
    engine = assemble(config, backend, capacity, report, clock=ManualClock())
    if optimist:
        engine._scheduler._admission.lengths = LengthHistory(prior=(1,) * 100)
    vocab = backend.spec.vocab_size
    found: dict[str, list[int]] = {}
    for index in range(8):
        shared = [(at * 37) % vocab for at in range(16 if index % 2 else 0)]
        own = [(index * 911 + at * 53) % vocab for at in range(3 + 2 * index)]
        sampling = SamplingParams(temperature=0.8, seed=index, stop_token_ids=frozenset({vocab - 1}))
        request = Request(
            request_id=RequestId(str(index)), prompt_tokens=(*shared, *own), max_output_tokens=24, scope=SCOPE, sampling=sampling
        )
        found[request.request_id] = []
        assert engine.submit(request) is None
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensEvent):
                found[event.request_id] += event.tokens
        engine.check()
    if optimist:
        assert engine.stats().preemptions > 0
    return list(found.values())


def test_whole_engine_is_exact(backend: Backend) -> None:
    alone = answers(backend, chunk_tokens=512, running=1, optimist=False)
    assert all(alone)
    for chunk_tokens, optimist in ((512, False), (7, False), (16, True)):
        assert answers(backend, chunk_tokens=chunk_tokens, running=8, optimist=optimist) == alone
