"""The router over real processes: the same tokens as one node, whoever dies or freezes; every request ends, every page comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from kvseal.core.errors import ContextLengthExceeded, DeadlineExceeded, EngineDied
from kvseal.core.events import TokensEvent
from kvseal.core.outcome import Cancelled, Completed, Failed, Refused
from kvseal.lab.rig import truth

from .fleets import Fleet, config, prompt, read, request

PROMPTS = {seed: prompt(seed, 70 + 9 * seed) for seed in range(6)}


@pytest.fixture(scope="module")
def truths() -> dict[int, list[int]]:
    return {seed: truth(tokens, 6) for seed, tokens in PROMPTS.items()}


@pytest.fixture(scope="module")
def fleet(truths: dict[int, list[int]]) -> Iterator[Fleet]:
    """Steps take 30 ms, so that there is a middle to everything."""
    slow = [config(role, number, model="oracle-slow") for role, number in (("prefill", 0), ("decode", 0), ("decode", 1))]
    made = Fleet(*slow, frozen_after_s=2.0)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def settled(fleet: Fleet) -> Iterator[None]:
    yield
    for node in fleet.router.fleet.nodes:
        if node.pid is not None:
            os.kill(node.pid, signal.SIGCONT)
    fleet.run(fleet.until(lambda: all(fleet.router.fleet.usable(node) for node in fleet.router.fleet.nodes)))
    fleet.run(fleet.settled())
    assert fleet.router.open_requests == 0


def test_the_same_tokens_as_one_node(fleet: Fleet, truths: dict[int, list[int]]) -> None:
    async def ask() -> None:
        answers = await asyncio.gather(*(read(fleet.router.submit(request(f"a{seed}", PROMPTS[seed]))) for seed in range(4)))
        assert [answer.tokens for answer in answers] == [truths[seed] for seed in range(4)]
        assert all(isinstance(answer.outcome, Completed) for answer in answers)
        assert fleet.router.counters["split"] == 4 and (await fleet.router.stats()).handoff["received"] >= 4

    fleet.run(ask())


def test_a_known_prefix_goes_where_it_lives(fleet: Fleet, truths: dict[int, list[int]]) -> None:
    async def ask() -> None:
        first = await read(fleet.router.submit(request("b1", PROMPTS[0])))
        counts = fleet.router.counters.copy()
        second = await read(fleet.router.submit(request("b2", PROMPTS[0])))
        assert first.tokens == second.tokens == truths[0]
        assert fleet.router.counters - counts == {"direct": 1} and second.cached_tokens == 64

    fleet.run(ask())


def test_what_no_node_could_hold_is_refused(fleet: Fleet) -> None:
    answer = fleet.run(read(fleet.router.submit(request("long", prompt(1, 1020), 5))))
    assert isinstance(answer.outcome, Refused) and isinstance(answer.outcome.error, ContextLengthExceeded)
    assert answer.outcome.error.details["max_servable_tokens"] == 1024


def test_one_token_needs_no_second_node(fleet: Fleet, truths: dict[int, list[int]]) -> None:
    answer = fleet.run(read(fleet.router.submit(request("one", PROMPTS[5], 1))))
    assert answer.tokens == truths[5][:1] and isinstance(answer.outcome, Completed)


@pytest.mark.parametrize("after_tokens", [0, 1, 3])
def test_a_client_that_leaves(fleet: Fleet, after_tokens: int) -> None:
    async def ask() -> None:
        stream = fleet.router.submit(request(f"leaves-{after_tokens}", prompt(40 + after_tokens, 90), 40))
        seen = 0
        while seen < after_tokens:
            seen += isinstance(await anext(stream), TokensEvent)
        stream.cancel()
        assert isinstance((await read(stream)).outcome, Cancelled)

    fleet.run(ask())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_node_that_dies_or_freezes(fleet: Fleet, truths: dict[int, list[int]], how: signal.Signals) -> None:
    async def ask() -> None:
        stream = fleet.router.submit(request(f"prefill-{how}", [3, *PROMPTS[4]]))
        await asyncio.sleep(0.05)
        os.kill(fleet.node("prefill-0").pid or 0, how)
        answer = await read(stream)
        assert isinstance(answer.outcome, Completed)
        again = await read(fleet.router.submit(request(f"prefill-{how}-again", [3, *PROMPTS[4]])))
        assert answer.tokens == again.tokens and len(answer.tokens) == 6

    fleet.run(ask())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decode_node_that_dies_or_freezes_before_a_token(fleet: Fleet, truths: dict[int, list[int]], how: signal.Signals) -> None:
    async def ask() -> None:
        stream = fleet.router.submit(request(f"decode-{how}", [4, *PROMPTS[3]]))
        (one,) = fleet.router._requests.values()
        assert one.decode_node is not None
        os.kill(one.decode_node.pid or 0, how)
        answer = await read(stream)
        if one.attempt == 1:  # The first token came from the other node before the death was seen.
            assert isinstance(answer.outcome, Failed) and isinstance(answer.outcome.error, EngineDied) and len(answer.tokens) == 1
        else:
            assert isinstance(answer.outcome, Completed) and len(answer.tokens) == 6

    fleet.run(ask())


def test_a_decode_node_that_dies_after_a_token(fleet: Fleet) -> None:
    async def ask() -> None:
        stream = fleet.router.submit(request("mid", [5, *PROMPTS[2]], 40))
        for _ in range(3):
            await anext(stream)
        (one,) = fleet.router._requests.values()
        assert one.decode_node is not None
        os.kill(one.decode_node.pid or 0, signal.SIGKILL)
        answer = await read(stream)
        assert isinstance(answer.outcome, Failed) and isinstance(answer.outcome.error, EngineDied)

    fleet.run(ask())


def test_a_deadline_holds_even_for_a_frozen_node(fleet: Fleet) -> None:
    async def ask() -> None:
        stream = fleet.router.submit(request("late", [6, *PROMPTS[2]], 400, deadline_s=1.0))
        await anext(stream)
        (one,) = fleet.router._requests.values()
        assert one.decode_node is not None
        os.kill(one.decode_node.pid or 0, signal.SIGSTOP)
        answer = await read(stream)
        assert isinstance(answer.outcome, Failed) and isinstance(answer.outcome.error, DeadlineExceeded)

    fleet.run(ask())
