"""The joining of two legs: one stream, one end, the same tokens from both or a fault."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvseal.core.errors import EngineDied, InvalidRequest, KVTransferFailed, Overloaded
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused, Usage
from kvseal.core.request import Request, SamplingParams
from kvseal.lab.pair import Heard
from kvseal.lab.rig import SCOPE
from kvseal.node.split_request import Next, SplitRequest

ID = RequestId("r")
DONE = Completed(FinishReason.LENGTH, Usage(5, 3, 4))


@dataclass(eq=False)
class Leg:
    request_id: RequestId = ID
    ended: bool = False
    cancels: list[int] = field(default_factory=list)

    def cancel(self) -> None:
        self.cancels.append(1)

    def finish(self) -> None:
        self.cancels.append(1)


def split(*, early: bool = True, stop: frozenset[int] = frozenset(), output: int = 3) -> tuple[SplitRequest, Heard, Leg, Leg]:
    request = Request(
        request_id=ID,
        prompt_tokens=(1, 2, 3, 4, 5),
        max_output_tokens=output,
        scope=SCOPE,
        sampling=SamplingParams(stop_token_ids=stop),
    )
    heard = Heard()
    one = SplitRequest(request, heard, [], early=early)
    one.begin()
    prefill, decode = Leg(), Leg()
    one.prefill, one.decode = prefill, decode
    return one, heard, prefill, decode


def tokens(*values: int, cached: int = 0) -> Event:
    return TokensEvent(ID, values, (), (), cached)


def end(outcome: Outcome) -> Event:
    return EndedEvent(ID, outcome)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("order", ["ppd", "pdp", "dpp"])
def test_whichever_comes_first(early: bool, order: str) -> None:
    one, heard, prefill, decode = split(early=early)
    of_prefill = [(prefill, tokens(7, cached=2)), (prefill, end(Completed(FinishReason.LENGTH, Usage(5, 1, 2))))]
    of_decode = [(decode, tokens(7)), (decode, tokens(8, 9)), (decode, end(DONE))]
    results = [one.event(*of_prefill.pop(0)) if each == "p" else [one.event(*item) for item in of_decode] for each in order]
    assert heard.tokens == [7, 8, 9]
    assert isinstance(heard.outcome, Completed)
    if order[0] == "p":
        assert heard.outcome.usage.cached_tokens == 2
    if order == "ppd":
        assert results[:2] == [Next.NOTHING, Next.PREFILLED]


def test_the_first_token_is_early_only_when_a_failure_means_recomputing() -> None:
    one, heard, prefill, _ = split(early=True)
    one.event(prefill, tokens(7))
    assert heard.tokens == [7]
    one, heard, prefill, decode = split(early=False)
    one.event(prefill, tokens(7, cached=3))
    assert heard.tokens == []
    one.event(decode, tokens(7))
    assert heard.tokens == [7] and heard.cached_tokens == 3


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("decode_first", [True, False])
def test_two_nodes_that_differ_are_a_fault(early: bool, decode_first: bool) -> None:
    one, heard, prefill, decode = split(early=early)
    events = [(prefill, tokens(7)), (decode, tokens(8))]
    results = [one.event(*event) for event in (reversed(events) if decode_first else events)]
    if early or not decode_first:
        assert results[-1] is Next.DONE and one.differed
        assert isinstance(heard.outcome, Failed) and isinstance(heard.outcome.error, KVTransferFailed)
    else:
        assert heard.tokens == [8]  # The other answer comes when nobody waits for it; it is not emitted.


def test_a_stop_token_at_once_is_the_end() -> None:
    for early in (True, False):
        one, heard, prefill, _ = split(early=early, stop=frozenset([7]))
        one.event(prefill, tokens(7))
        assert one.event(prefill, end(Completed(FinishReason.STOP, Usage(5, 1, 0), 7))) is Next.DONE
        assert heard.tokens == [7] and isinstance(heard.outcome, Completed)


@pytest.mark.parametrize("outcome", [Failed(EngineDied("x")), Refused(Overloaded("x")), Cancelled(Usage(5, 0, 0))])
def test_a_prefill_node_that_cannot_is_not_the_end(outcome: Outcome) -> None:
    one, heard, prefill, decode = split()
    assert one.event(prefill, end(outcome)) is Next.NOT_HANDED_OVER
    for event in (tokens(7), tokens(8), tokens(9), end(DONE)):
        one.event(decode, event)
    assert heard.tokens == [7, 8, 9] and isinstance(heard.outcome, Completed)
    assert heard.outcome.usage.cached_tokens == 4


def test_a_refusal_of_the_request_is_the_end() -> None:
    one, heard, prefill, _ = split()
    assert one.event(prefill, end(Refused(InvalidRequest("no")))) is Next.DONE
    assert isinstance(heard.outcome, Refused)


def test_placed_again_only_when_nothing_was_emitted() -> None:
    one, heard, prefill, decode = split()
    assert one.event(decode, end(Failed(EngineDied("x")))) is Next.PLACE_AGAIN
    one, heard, prefill, decode = split()
    one.event(prefill, tokens(7))
    assert one.event(decode, end(Failed(EngineDied("x")))) is Next.DONE
    assert isinstance(heard.outcome, Failed) and heard.tokens == [7]
    one, heard, prefill, decode = split()
    one.cancelled = True
    assert one.event(decode, end(Failed(EngineDied("x")))) is Next.DONE


def test_nothing_behind_the_end() -> None:
    one, heard, prefill, decode = split()
    one.event(decode, end(Failed(KVTransferFailed("x"))))
    assert one.event(prefill, tokens(7)) is Next.NOTHING and one.event(decode, tokens(7)) is Next.NOTHING
    assert heard.tokens == []


def test_legs_of_an_earlier_attempt_have_nothing_to_say() -> None:
    one, heard, prefill, _ = split()
    one.begin()
    assert one.event(prefill, tokens(7)) is Next.NOTHING and heard.tokens == []
