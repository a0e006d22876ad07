"""A whole engine on the oracle model, small enough to take apart.

Owns `Rig`, in which every part can be replaced by a broken one, and `Answer`, what a client would have seen. Deterministic: manual clock,
fixed secret. Never used by the server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvseal.core.batch import TokenLogprobs
from kvseal.core.clock import ManualClock
from kvseal.core.config import EngineConfig
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Outcome
from kvseal.core.request import Request, SamplingParams
from kvseal.exec.runner import Runner
from kvseal.kv.capacity import Capacity
from kvseal.kv.manager import KVManager
from kvseal.lab.oracle import OracleBackend, oracle_geometry, oracle_spec
from kvseal.node.build import start_report
from kvseal.node.engine import Engine
from kvseal.sched.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0)
SCOPE = Scope(bytes(range(16)))
OTHER_SCOPE = Scope(bytes(range(16, 32)))


@dataclass(slots=True)
class Answer:
    """What the client of one request saw."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached_tokens: int = 0
    outcome: Outcome | None = None


class Rig:
    """`context_tokens` None: as much as the pool holds. The classes may be broken on purpose. `over`: a second scheduler over the cache
    and arena of another rig."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_tokens: int = 4,
        layers: int = 2,
        vocab_size: int = 4096,
        chunk_tokens: int = 512,
        max_running: int = 64,
        max_queued: int = 1024,
        context_tokens: int | None = None,
        backend_class: type[OracleBackend] = OracleBackend,
        scheduler_class: type[Scheduler] = Scheduler,
        manager_class: type[KVManager] = KVManager,
        runner_class: type[Runner] = Runner,
        over: Rig | None = None,
    ) -> None:
        geometry = oracle_geometry(layers=layers, page_tokens=page_tokens)
        spec = oracle_spec(geometry, vocab_size=vocab_size, context_tokens=context_tokens or pages * page_tokens)
        config = EngineConfig(model=Path("oracle"), backend="reference", chunk_tokens=chunk_tokens, max_running=max_running)
        capacity = Capacity.derive(model_context_tokens=spec.context_tokens, pool_pages=pages, page_tokens=page_tokens)
        self.clock = ManualClock()
        self.backend: OracleBackend = over.backend if over else backend_class(spec, geometry, pages)
        self.kv: KVManager = over.kv if over else manager_class(geometry, pool_pages=pages, capacity=capacity, secret=b"rig")
        self.scheduler = scheduler_class(
            self.kv,
            self.clock,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            max_queued=max_queued,
            page_tokens=page_tokens,
        )
        report = start_report(
            config,
            spec,
            geometry,
            capacity,
            weights_format="none",
            weights_bytes=0,
            threads=1,
            instruction_set="none",
        )
        self.runner = runner_class(self.backend)
        self.engine = Engine(
            report=report, kv=self.kv, scheduler=self.scheduler, runner=self.runner, backend=self.backend, clock=self.clock
        )
        self.answers: dict[str, Answer] = {}

    def submit(self, name: str, prompt: Iterable[int], output_tokens: int = 8, *, scope: Scope = SCOPE, **fields: Any) -> Answer:
        """The answer fills while the rig steps; a refusal is its outcome at once. `fields` go into `Request`."""
        request = Request(
            request_id=RequestId(name),
            prompt_tokens=tuple(prompt),
            max_output_tokens=output_tokens,
            scope=scope,
            **{"sampling": GREEDY, **fields},
        )
        answer = self.answers[name] = Answer()
        answer.outcome = self.engine.submit(request)
        return answer

    def cancel(self, name: str) -> None:
        self.engine.cancel(RequestId(name))

    def step(self) -> list[Event]:
        """One engine step; its events are added to the answers."""
        events = self.engine.step()
        self.clock.advance(0.01)
        for event in events:
            answer = self.answers[event.request_id]
            if isinstance(event, TokensEvent):
                answer.tokens += event.tokens
                answer.logprobs += event.logprobs
                answer.prompt_logprobs = answer.prompt_logprobs or event.prompt_logprobs
                answer.cached_tokens = event.cached_tokens
            elif isinstance(event, EndedEvent):
                answer.outcome = event.outcome
        return events

    def run(self, *, checked: bool = True, most_steps: int = 10_000) -> None:
        """Steps until nothing is open. `checked` proves all laws after every step. Raises `TimeoutError` when it does not end."""
        for _ in range(most_steps):
            if not self.engine.has_work:
                return
            self.step()
            if checked:
                self.engine.check()
        raise TimeoutError(f"requests are open after {most_steps} steps")

    def answer(self, name: str, prompt: Iterable[int], output_tokens: int = 8, *, scope: Scope = SCOPE, **fields: Any) -> Answer:
        """`submit` and `run`."""
        answer = self.submit(name, prompt, output_tokens, scope=scope, **fields)
        self.run()
        return answer


def truth(prompt: Iterable[int], output_tokens: int = 8, **fields: Any) -> list[int]:
    """What the oracle says to a prompt when it is alone in a fresh engine, computed in one piece."""
    tokens = tuple(prompt)
    rig = Rig(pages=-(-(len(tokens) + output_tokens) // 4) + 1)
    return rig.answer("alone", tokens, output_tokens, **fields).tokens
