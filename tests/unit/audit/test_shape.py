"""Batch numerics are not called corruption: the noise of batch shapes is measured without reuse, and small moves prove nothing."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any, cast

from kvseal.audit.canary import Aviary
from kvseal.audit.client import Client, Reply
from kvseal.audit.compare import Difference, Kind, sureness
from kvseal.audit.findings import Confidence
from kvseal.audit.probes.base import Scene
from kvseal.audit.probes.shape import MOST_SHAPE_NATS, shape_floor
from kvseal.audit.target import Target
from kvseal.audit.wire import parse_json


@dataclass
class _Server:
    """Gives token n+1 after n; a token sent in the prompt is worth `move` nats less than one generated. `reuses` ignores the switch."""

    move: float = 0.1
    reuses: bool = False
    bodies: list[Any] = field(default_factory=list)

    async def post(self, path: str, body: Any, *, root: bool = False) -> Reply:
        if path == "/tokenize":
            return self._reply({"tokens": list(range(len(body["content"].split())))})
        self.bodies.append(body)
        first, shift = body["prompt"][-1] + 1, self.move if body["max_tokens"] == 8 else 0.0
        content = [
            {"id": first + n, "top_logprobs": [{"id": first + n, "logprob": -0.5 - shift}, {"id": 0, "logprob": -2.0}]}
            for n in range(body["max_tokens"])
        ]
        usage = {"prompt_tokens_details": {"cached_tokens": 5 if self.reuses else 0}}
        return self._reply({"choices": [{"logprobs": {"content": content}}], "usage": usage})

    @staticmethod
    def _reply(body: Any) -> Reply:
        return Reply(200, json.dumps(body).encode())


def _floor(server: _Server, engine: str = "llamacpp", context_tokens: int = 512) -> float | None:
    draw = random.Random(1)
    target = Target("m", engine=engine, context_tokens=context_tokens, completions=True)
    return asyncio.run(shape_floor(Scene(cast(Client, server), target, Aviary(draw), draw)))


def test_the_move_between_one_by_one_and_at_once_is_measured_without_reuse() -> None:
    server = _Server(move=0.1)
    floor = _floor(server)
    assert floor is not None and abs(floor - 0.1) < 1e-9
    assert len(server.bodies) == 6 and all(body["cache_prompt"] is False for body in server.bodies)
    assert server.bodies[1]["prompt"][: len(server.bodies[0]["prompt"])] == server.bodies[0]["prompt"]


def test_no_server_may_excuse_more_than_the_most() -> None:
    assert _floor(_Server(move=3.0)) == MOST_SHAPE_NATS


def test_nothing_is_measured_where_reuse_cannot_be_switched_off() -> None:
    assert _floor(_Server(reuses=True)) is None
    assert _floor(_Server(), engine="vllm") is None
    assert _floor(_Server(), context_tokens=32) is None


def test_small_moves_prove_nothing() -> None:
    small, large = Difference(Kind.DIFFERENT, move=0.2), Difference(Kind.DIFFERENT, move=4.0)
    assert sureness([small, small], 0.0) is Confidence.SUSPECTED
    assert sureness([small, large], 0.0) is Confidence.PROVEN
    assert sureness([large], 0.0) is Confidence.LIKELY
    assert sureness([large, large], 0.1) is Confidence.LIKELY


def test_a_reply_of_rubbish_is_no_measurement() -> None:
    class Rubbish(_Server):
        async def post(self, path: str, body: Any, *, root: bool = False) -> Reply:
            return Reply(200, b'{"tokens": [1, "x"], "choices": [{"logprobs": {"content": [{"id": "a"}]}}]}')

    assert parse_json(b"[") is None and _floor(Rubbish()) is None
