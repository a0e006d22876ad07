"""An engine without a model or a cache: it answers each prompt with the prompt's own tokens, over and over.

Owns a double of `node.engine.Engine` for tests of what stands above the engine (process, client, HTTP). Holds no pages, so it proves
nothing about them. Deterministic: output token i is prompt token i modulo the prompt's length.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvseal.core.batch import TokenLogprobs
from kvseal.core.clock import Clock, MonotonicClock
from kvseal.core.config import EngineConfig
from kvseal.core.errors import ContextLengthExceeded, DeadlineExceeded
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused, Usage
from kvseal.core.request import Request
from kvseal.node.report import EngineStats, StartReport

VOCAB_SIZE = 49_152
CONTEXT_TOKENS = 8_192


@dataclass(slots=True)
class _Open:
    request: Request
    deadline_at_s: float | None
    output: list[int] = field(default_factory=list)


class EchoEngine:
    """`pace_s` is how long each step takes."""

    def __init__(self, config: EngineConfig, *, pace_s: float = 0.0, clock: Clock | None = None) -> None:
        self.report = _report(config)
        self.card = None
        self.steps = 0
        self._clock = clock or MonotonicClock()
        self._pace_s = pace_s
        self._step_at_s = self._clock.now_s()
        self._open: dict[RequestId, _Open] = {}
        self._ended: list[Event] = []
        self._outcomes: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._output_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._ended)

    def submit(self, request: Request) -> Refused | None:
        served = self.report.served_context_tokens
        if request.budget_tokens > served:
            self._outcomes["refused"] += 1
            return Refused(
                ContextLengthExceeded.of(
                    prompt_tokens=len(request.prompt_tokens),
                    max_output_tokens=request.max_output_tokens,
                    max_servable_tokens=served,
                    pool_tokens=self.report.pool_tokens,
                )
            )
        at_s = None if request.deadline_s is None else self._clock.now_s() + request.deadline_s
        self._open[request.request_id] = _Open(request, at_s)
        self._prompt_tokens += len(request.prompt_tokens)
        return None

    def cancel(self, request_id: RequestId) -> None:
        if request_id in self._open:
            self._end(request_id, Cancelled(self._usage(self._open[request_id])))

    def finish(self, request_id: RequestId) -> None:
        if request_id in self._open:
            self._end(request_id, Completed(FinishReason.STOP, self._usage(self._open[request_id])))

    def step(self) -> list[Event]:
        now_s = self._clock.now_s()
        if now_s - self._step_at_s < self._pace_s:
            return []
        self._step_at_s = now_s
        self.steps += 1
        events: list[Event] = []
        for request_id, one in list(self._open.items()):
            if one.deadline_at_s is not None and now_s > one.deadline_at_s:
                self._end(request_id, Failed(DeadlineExceeded("the request's deadline passed before it was complete")))
            else:
                events.append(self._next(one))
        events += self._ended
        self._ended = []
        return events

    def stats(self) -> EngineStats:
        pages = self.report.pool_pages
        return EngineStats(
            pages_total=pages,
            pages_free=pages,
            pages_leased=0,
            pages_sealed=0,
            pages_draining=0,
            pages_quarantined=0,
            running=len(self._open),
            waiting=0,
            steps=self.steps,
            last_step_age_s=self._clock.now_s() - self._step_at_s if self.steps else None,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=0,
            queried_tokens=self._prompt_tokens,
            preemptions=0,
            recomputed_tokens=0,
            evicted_pages=0,
            outcomes=dict(self._outcomes),
        )

    def close(self) -> None:
        self._open.clear()

    def _next(self, one: _Open) -> TokensEvent:
        request, index = one.request, len(one.output)
        prompt, sampling = request.prompt_tokens, request.sampling
        token = prompt[index % len(prompt)]
        one.output.append(token)
        self._output_tokens += 1
        if token in sampling.stop_token_ids and index >= sampling.min_tokens:
            self._end(request.request_id, Completed(FinishReason.STOP, self._usage(one), token))
        elif len(one.output) == request.max_output_tokens:
            self._end(request.request_id, Completed(FinishReason.LENGTH, self._usage(one)))
        certain = () if sampling.logprobs is None else (_certain(token, sampling.logprobs),)
        whole: tuple[TokenLogprobs | None, ...] = ()
        if sampling.prompt_logprobs is not None and index == 0:
            whole = (None, *(_certain(each, sampling.prompt_logprobs) for each in prompt[1:]))
        return TokensEvent(request.request_id, (token,), certain, whole)

    def _usage(self, one: _Open) -> Usage:
        return Usage(len(one.request.prompt_tokens), len(one.output), 0)

    def _end(self, request_id: RequestId, outcome: Outcome) -> None:
        del self._open[request_id]
        self._outcomes[type(outcome).__name__.lower()] += 1
        self._ended.append(EndedEvent(request_id, outcome))


def _certain(token: int, alternatives: int) -> TokenLogprobs:
    return TokenLogprobs(token, 0.0, ((token, 0.0),) if alternatives else ())


def _report(config: EngineConfig) -> StartReport:
    page_tokens = config.page_tokens
    pool_tokens = config.pool_tokens or 8 * CONTEXT_TOKENS
    pages = pool_tokens // page_tokens
    served = min(config.context_tokens or CONTEXT_TOKENS, CONTEXT_TOKENS, pages * page_tokens)
    return StartReport(
        model_name=config.model.name,
        family="echo",
        backend="echo",
        instruction_set="none",
        weights_format="none",
        weights_bytes=0,
        threads=1,
        kv_dtype=config.kv_dtype,
        kv_format=f"{1:016x}",
        page_tokens=page_tokens,
        kv_token_bytes=1,
        kv_token_formula="nothing is kept",
        pool_pages=pages,
        pool_tokens=pages * page_tokens,
        pool_bytes=pages * page_tokens,
        model_context_tokens=CONTEXT_TOKENS,
        served_context_tokens=served,
        context_reason="the model's own limit",
        full_length_requests=pages * page_tokens // served,
        max_running=config.max_running,
        max_queued=config.max_queued,
        chunk_tokens=config.chunk_tokens,
        wipe_pages=config.wipe_pages,
        vocab_size=VOCAB_SIZE,
        eos_tokens=(2,),
        bos_token=1,
    )
