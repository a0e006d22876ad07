"""Two real nodes in one process: every way through a hand-off, and every way out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvseal.core.errors import ContextLengthExceeded, DeadlineExceeded, KVTransferFailed
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Cancelled, Completed, Failed, Refused
from kvseal.core.request import SamplingParams
from kvseal.handoff.messages import PROTOCOL_VERSION
from kvseal.handoff.proof import PageFault
from kvseal.kv.seal import SealCheck
from kvseal.lab.pair import Heard, Pair
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig, truth
from kvseal.node import peer_messages as p
from kvseal.node.node_engine import NodeEngine

from .fleets import prompt


def answered(pair: Pair, name: str, tokens: list[int], output: int = 6, **fields: object) -> Heard:
    heard = pair.submit(name, tokens, output, **fields)  # type: ignore[arg-type]
    pair.run()
    return heard


# --- when all is well ---


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("chunk_tokens", [8, 512])
def test_the_same_tokens_whatever_the_length(tokens: int, chunk_tokens: int) -> None:
    pair = Pair(prefill={"chunk_tokens": chunk_tokens})
    heard = answered(pair, "request-1", prompt(1, tokens))
    assert isinstance(heard.outcome, Completed) and heard.tokens == truth(prompt(1, tokens), 6)
    assert heard.outcome.usage.cached_tokens == 0
    assert pair.decode.stats().handoff["pages"] == -(-tokens // 8)
    assert pair.decode.stats().recomputed_tokens == 0 and pair.decode.steps == 5, "the second token is computed in the first step"
    pair.settled()


def test_sampled_tokens_and_logprobs_too() -> None:
    sampling = SamplingParams(temperature=0.8, seed=7, top_k=50, logprobs=2, repetition_penalty=1.2)
    alone = Rig(pages=40).answer("alone", prompt(2, 40), 9, sampling=sampling)
    heard = answered(Pair(), "request-1", prompt(2, 40), 9, sampling=sampling)
    assert heard.tokens == alone.tokens


def test_pages_go_while_later_chunks_are_computed() -> None:
    pair = Pair(prefill={"chunk_tokens": 16})
    heard = pair.submit("request-1", prompt(3, 120), 4)
    while not heard.tokens:
        pair.turn()
    assert pair.transport(pair.decode).landed >= 8  # Of fifteen, before the last chunk's have even been announced.
    pair.run()
    pair.settled()


def test_a_prefix_that_is_there_is_not_sent_again() -> None:
    pair = Pair()
    answered(pair, "request-1", prompt(4, 50))
    moved = pair.decode.stats().handoff["pages"]
    heard = answered(pair, "request-2", [*prompt(4, 50), *prompt(5, 30)])
    assert heard.tokens == truth([*prompt(4, 50), *prompt(5, 30)], 6)
    assert pair.decode.stats().handoff["pages"] - moved == 10 - 6
    assert heard.cached_tokens == 48  # What the prefill node did not compute again.
    answered(pair, "request-3", prompt(4, 50), scope=OTHER_SCOPE)
    assert pair.decode.stats().handoff["pages"] - moved == 10 - 6 + 7  # Another tenant finds nothing (L4).
    pair.settled()


def test_an_answer_is_brought_back_for_the_next_turn() -> None:
    pair = Pair()
    first = answered(pair, "request-1", prompt(6, 30), 20)
    turn = (*prompt(6, 30), *first.tokens)
    pair.prefill.take(p.Take("back-1-of-1", SCOPE, turn, pair.decode.incarnation, 10.0))
    pair.decode.take(p.Give("back-1-of-1", SCOPE, turn, pair.prefill.incarnation, 10.0))
    pair.run()
    assert pair.prefill.kv.probe(SCOPE, turn) == 48
    second = [*turn, *prompt(7, 25)]
    heard = answered(pair, "request-2", second)
    assert heard.tokens == truth(second, 6) and heard.cached_tokens == 48
    pair.settled()


def test_an_answer_that_finds_no_room_is_not_waited_for() -> None:
    """Its pages on the node that answered would be held as long, and a deadline that passes is an alarm."""
    pair = Pair(prefill={"pages": 8})
    first = answered(pair, "request-1", prompt(6, 30), 20)
    turn = (*prompt(6, 30), *first.tokens)
    held = pair.prefill.kv.admit(RequestId("busy"), OTHER_SCOPE, prompt(9, 50), first_tokens=50)
    assert held is not None
    pair.prefill.take(p.Take("back-1-of-1", SCOPE, turn, pair.decode.incarnation, 10.0))
    pair.decode.take(p.Give("back-1-of-1", SCOPE, turn, pair.prefill.incarnation, 10.0))
    began_s = pair.clock.now_s()
    pair.run(checked=False)
    assert pair.clock.now_s() - began_s < 1.0
    assert pair.prefill.stats().handoff["failed_no_room"] == pair.decode.stats().handoff["failed_no_room"] == 1
    pair.prefill.kv.drop(held)
    pair.settled()


# --- limits ---


def test_what_can_never_be_held_is_refused_on_either_side_and_nothing_is_left() -> None:
    for small in ("prefill", "decode"):
        pair = Pair(**{small: {"pages": 6}})  # type: ignore[arg-type]
        heard = pair.submit("request-1", prompt(8, 60), 6)
        pair.run()
        assert isinstance(heard.outcome, Refused) and isinstance(heard.outcome.error, ContextLengthExceeded), small
        pair.settled()


def test_those_who_run_are_never_starved_by_those_who_wait() -> None:
    """A decode node so small that what has arrived must give way to what runs: everybody still gets the right answer."""
    pair = Pair(decode={"pages": 14}, prefill={"pages": 64})
    prompts = [prompt(60 + number, 50) for number in range(6)]
    heard = [pair.submit(f"request-{number}", tokens, 30) for number, tokens in enumerate(prompts)]
    pair.run()
    assert [one.tokens for one in heard] == [truth(tokens, 30) for tokens in prompts]
    pair.settled()


# --- failures ---


def lose_everything(_node: NodeEngine, _relay: p.Relay) -> list[p.Relay]:
    return []


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_a_network_that_carries_nothing(on_failure: str) -> None:
    pair = Pair(on_failure=on_failure)
    pair.filter = lose_everything
    heard = pair.submit("request-1", prompt(9, 40), 6)
    for _ in range(20):
        pair.turn()
    pair.decode.take(p.HandoffLost(pair.decode_id("request-1")))
    pair.run()
    if on_failure == "recompute":
        assert heard.tokens == truth(prompt(9, 40), 6) and isinstance(heard.outcome, Completed)
        assert pair.decode.stats().handoff["recomputed"] == 1
    else:
        assert isinstance(heard.outcome, Failed) and isinstance(heard.outcome.error, KVTransferFailed) and heard.tokens == []
    pair.settled()


def test_another_version_fails_at_its_first_message() -> None:
    def newer(_node: NodeEngine, relay: p.Relay) -> list[p.Relay]:
        return [p.Relay(relay.handoff, relay.peer, relay.body[:3] + bytes([PROTOCOL_VERSION + 1]) + relay.body[4:])]

    pair = Pair()
    pair.filter = newer
    heard = answered(pair, "request-1", prompt(10, 40))
    assert heard.tokens == truth(prompt(10, 40), 6)
    assert pair.decode.stats().handoff["failed_version"] == 1
    pair.settled()


def test_a_deadline_while_the_pages_are_on_their_way() -> None:
    pair = Pair()
    pair.transport(pair.decode).frozen = True
    heard = pair.submit("request-1", prompt(11, 40), 6, deadline_s=0.5)
    pair.run()
    assert isinstance(heard.outcome, Failed) and isinstance(heard.outcome.error, DeadlineExceeded)
    pair.settled()


def test_the_clock_jumps() -> None:
    pair = Pair()
    heard = pair.submit("request-1", prompt(12, 40), 6)
    pair.turn()
    pair.clock.advance(1e7)
    pair.run()
    assert isinstance(heard.outcome, Completed) and heard.tokens == truth(prompt(12, 40), 6)
    pair.settled()


def test_either_side_restarts_in_the_middle() -> None:
    for role in ("prefill", "decode"):
        pair = Pair(prefill={"chunk_tokens": 8})
        heard = pair.submit("request-1", prompt(13, 60), 6)
        for _ in range(4):
            pair.turn()
        pair.restart(role)
        pair.run()
        if role == "prefill":
            assert heard.tokens == truth(prompt(13, 60), 6) and isinstance(heard.outcome, Completed)
        else:
            assert isinstance(heard.outcome, Failed)
        pair.settled()


def test_a_client_that_leaves_before_anything_has_moved() -> None:
    pair = Pair()
    heard = pair.submit("request-1", prompt(14, 40), 6)
    pair.cancel("request-1")
    pair.run()
    assert isinstance(heard.outcome, Cancelled) and heard.tokens == []
    pair.settled()


# --- the last page ---


def test_a_last_page_that_its_holder_finds_broken_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    monkeypatch.setattr(pair.prefill._sending, "close_tail", lambda scope, stamp, ordinal, filled: PageFault(ordinal, 0, SealCheck.NONCE))
    heard = answered(pair, "request-1", prompt(15, 41))
    assert heard.tokens == truth(prompt(15, 41), 6)
    assert pair.prefill.stats().handoff["sent_failed_seal"] == 1 and pair.decode.stats().handoff["recomputed"] == 1
    pair.settled()


def test_pages_that_went_with_the_request_take_the_last_one_along(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def gone(*_: object) -> Iterator[None]:
        yield None

    pair = Pair()
    monkeypatch.setattr("kvseal.node.node_engine.reading", gone)
    heard = answered(pair, "request-1", prompt(16, 41))
    assert heard.tokens == truth(prompt(16, 41), 6)
    heard = answered(pair, "request-2", prompt(17, 40))
    assert heard.tokens == truth(prompt(17, 40), 6)
    assert pair.prefill.stats().handoff["sent_failed_seal"] == 2
    pair.settled()


@pytest.mark.parametrize("token", [None, 2**32 - 1])
@pytest.mark.parametrize("tokens", [40, 41])
def test_without_a_token_that_can_be_gone_on_with_the_last_page_is_computed_again(
    token: int | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    sealed = pair.prefill._sending.sealed

    def forgetful(*given: Any, **named: Any) -> None:
        sealed(*given, **{**named, "next_token": token})

    monkeypatch.setattr(pair.prefill._sending, "sealed", forgetful)
    heard = answered(pair, "request-1", prompt(18, tokens))
    assert isinstance(heard.outcome, Completed) and heard.tokens == truth(prompt(18, tokens), 6)
    counts = pair.decode.stats().handoff
    assert counts["received"] == 1 and counts["recomputed"] == 0
    pair.settled()


def test_what_it_took_is_counted() -> None:
    pair = Pair()
    answered(pair, "request-1", prompt(19, 41))
    stats = pair.decode.stats()
    assert sum(count for _, count in stats.handoff_seconds) == 1 and stats.handoff_seconds_sum > 0
    assert stats.handoff["fences"] == 1 and stats.handoff["fence_waits"] == 0 and stats.fence_s >= 0
