"""Requests on the real engine, in this process, and what came of them.

Owns runs: submit, step until all have ended, keep outputs, times and counts. Greedy, and the end of a text is ignored: a request produces
as many tokens as its `Ask` says. A request that ends in any other way raises `RunFailed`, and the run has no score. Never looks inside
the engine but through its statistics and a watcher that it was built with.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from kvseal.bench.suite.command import Context
from kvseal.bench.suite.workloads import Ask
from kvseal.core.batch import Batch, BatchResult
from kvseal.core.config import EngineConfig
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Completed
from kvseal.core.request import Request, SamplingParams
from kvseal.exec.backend import UInt64
from kvseal.node.build import STEP_TARGET_S, build_engine
from kvseal.node.engine import Computes, Engine
from kvseal.node.models import resolve_model

ENDING_BIAS = 100.0

MayStart = Callable[[Ask, Sequence[Ask], int], bool]


class RunFailed(Exception):
    """A request did not complete as it should: there is no score."""


class Watcher:
    """Stands between scheduler and runner and sees every step."""

    def __init__(self) -> None:
        self._inner: Computes | None = None
        self.on_step: Callable[[Batch, float], None] | None = None
        """Called after each step with its batch and its seconds."""

    def around(self, inner: Computes) -> Computes:
        self._inner = inner
        return self

    @property
    def inner(self) -> Computes:
        if self._inner is None:
            raise RuntimeError("the watcher has no runner yet")
        return self._inner

    def run(self, batch: Batch, ledger_nonces: UInt64) -> BatchResult:
        began_s = time.perf_counter()
        result = self.inner.run(batch, ledger_nonces)
        if self.on_step is not None:
            self.on_step(batch, time.perf_counter() - began_s)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Of one run."""

    seconds: float
    cpu_seconds: float
    outputs: tuple[tuple[int, ...], ...]
    """In the order of the requests."""
    token_times_s: tuple[tuple[float, ...], ...]
    """When each token came, from the start of the run."""
    prompt_tokens: int
    cached_tokens: int
    steps: int
    preemptions: int
    recomputed_tokens: int

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def request_rate(self) -> float:
        return len(self.outputs) / self.seconds


class Rig:
    """One engine and its runs. Use as a context manager."""

    def __init__(self, context: Context, *, step_s: float | None = STEP_TARGET_S, **options: int) -> None:
        """`options`: fields of `EngineConfig`: pool_tokens, chunk_tokens, max_running, context_tokens, ..."""
        self.watcher = Watcher()
        config = EngineConfig(model=resolve_model(context.model), threads=context.threads, **{"max_queued": 100_000, **options})  # type: ignore[arg-type]
        self.engine: Engine = build_engine(config, step_s=step_s, around=self.watcher.around)
        gc.freeze()  # as the engine process does
        self._numbers = count()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        self.engine.close()

    @property
    def settings(self) -> dict[str, str]:
        report = self.engine.report
        return {
            "model": report.model_name,
            "weights": report.weights_format,
            "cache": report.kv_dtype,
            "threads": str(report.threads),
            "instruction set": report.instruction_set,
            "page": f"{report.page_tokens} tokens",
            "chunk": f"{report.chunk_tokens} tokens",
        }

    def run(
        self,
        asks: Sequence[Ask],
        *,
        apart: bool = False,
        scope: Scope | None = None,
        hidden: bool = False,
        may_start: MayStart | None = None,
    ) -> Ran:
        """All at once, in order. They share prefixes with each other alone (or with whatever ran in `scope` before); `apart`: none does.

        `hidden`: the engine is told the longest length that it serves, and the output ends by a token that it cannot foresee.
        `may_start(ask, open ones, output tokens so far)`: holds the next request back, as a server that reserves memory would.
        """
        shared = scope or Scope(os.urandom(16))
        before, began_s, cpu_s = self.engine.stats(), time.perf_counter(), time.process_time()
        waiting = deque((index, self._request(ask, Scope(os.urandom(16)) if apart else shared, hidden)) for index, ask in enumerate(asks))
        places: dict[RequestId, int] = {}
        outputs: list[list[int]] = [[] for _ in asks]
        times: list[list[float]] = [[] for _ in asks]
        produced = 0
        while waiting or places:
            while waiting and (may_start is None or may_start(asks[waiting[0][0]], [asks[at] for at in places.values()], produced)):
                place, request = waiting.popleft()
                refused = self.engine.submit(request)
                if refused is not None:
                    raise RunFailed(f"a request was refused: {refused.error}")
                places[request.request_id] = place
            for event in self.engine.step():
                if isinstance(event, TokensEvent):
                    place = places[event.request_id]
                    outputs[place] += event.tokens
                    produced += len(event.tokens)
                    times[place] += [time.perf_counter() - began_s] * len(event.tokens)
                elif not isinstance(event.outcome, Completed) or len(outputs[places[event.request_id]]) != (
                    asks[places[event.request_id]].output_tokens
                ):
                    raise RunFailed(f"a request ended as {type(event.outcome).__name__} or with another length than was asked for")
                else:
                    del places[event.request_id]
        seconds, cpu_seconds, after = time.perf_counter() - began_s, time.process_time() - cpu_s, self.engine.stats()
        return Ran(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            outputs=tuple(map(tuple, outputs)),
            token_times_s=tuple(map(tuple, times)),
            prompt_tokens=after.prompt_tokens - before.prompt_tokens,
            cached_tokens=after.cached_tokens - before.cached_tokens,
            steps=after.steps - before.steps,
            preemptions=after.preemptions - before.preemptions,
            recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
        )

    def _request(self, ask: Ask, scope: Scope, hidden: bool) -> Request:
        request = Request(
            request_id=RequestId(f"bench-{next(self._numbers)}"),
            prompt_tokens=ask.prompt,
            max_output_tokens=ask.output_tokens,
            scope=scope,
            sampling=SamplingParams(temperature=0.0),
        )
        if not hidden:
            return request
        # The last of the vocabulary ends it: ruled out until the last token, and then certain to be chosen.
        ending = self.engine.report.vocab_size - 1
        sampling = SamplingParams(
            temperature=0.0, stop_token_ids=frozenset({ending}), min_tokens=ask.output_tokens - 1, logit_bias={ending: ENDING_BIAS}
        )
        longest = self.engine.report.served_context_tokens - len(ask.prompt)
        return replace(request, sampling=sampling, max_output_tokens=longest)


def check_equal(what: str, *runs: Ran) -> str:
    """Outputs of all runs, token for token; returns what may be said then. Raises `RunFailed`."""
    for other in runs[1:]:
        for index, (one, two) in enumerate(zip(runs[0].outputs, other.outputs, strict=True)):
            if one != two:
                at = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
                raise RunFailed(f"{what}: outputs of request {index} differ from token {at} on; no ratio counts")
    return f"outputs of {len(runs[0].outputs)} requests equal, token for token"
