"""Requests that come with pages: they go on where those end, give way when others have a better right, and give everything back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvseal.core.batch import Batch, Row
from kvseal.core.errors import ContextLengthExceeded, DeadlineExceeded, LawBroken, Overloaded, Unavailable
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Refused
from kvseal.core.request import Request, SamplingParams
from kvseal.kv.manager import Grant
from kvseal.lab.rig import GREEDY, SCOPE, Answer, Rig, truth
from kvseal.sched.receiving import HandoffScheduler
from kvseal.sched.sequence import Received


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + at * 104_729) % 4000 for at in range(tokens)]


class Arrivals(Rig):
    """A rig whose prompts may have been computed beforehand, as another node would."""

    def __init__(self, **options: Any) -> None:
        super().__init__(scheduler_class=HandoffScheduler, **options)
        assert isinstance(self.scheduler, HandoffScheduler)
        self.node: HandoffScheduler = self.scheduler

    def computed(self, name: str, tokens: Sequence[int], valid_tokens: int) -> tuple[Grant, int | None]:
        """A grant of the first `valid_tokens` tokens, and what follows if these are all."""
        grant = self.kv.admit(RequestId(f"handoff-{name}"), SCOPE, tokens, first_tokens=valid_tokens, reuse=False)
        assert grant is not None
        row = Row(RequestId(name), tokens[:valid_tokens], 0, grant.table, GREEDY, valid_tokens == len(tokens), tokens, len(tokens))
        (out,) = self.runner.run(Batch(1, (row,)), self.kv.ledger_nonces).rows
        self.kv.commit(grant, list(tokens[:valid_tokens]), valid_tokens, out.page_digests)
        grant.cached_tokens = valid_tokens
        return grant, out.token

    def arrive(self, name: str, tokens: Sequence[int], output_tokens: int = 8, *, valid_tokens: int | None = None, **fields: Any) -> Answer:
        grant, token = self.computed(name, tokens, len(tokens) if valid_tokens is None else valid_tokens)
        given = {"sampling": GREEDY, **fields}
        request = Request(request_id=RequestId(name), prompt_tokens=tuple(tokens), max_output_tokens=output_tokens, scope=SCOPE, **given)
        answer = self.answers[name] = Answer()
        answer.outcome = self.node.arrived(request, grant, () if token is None else (token,))
        return answer

    def all_back(self) -> None:
        self.engine.check()
        usage = self.kv.usage()
        assert usage.leased == usage.draining == 0 and usage.evictable == usage.sealed


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 11, 12, 13])
def test_the_second_token_is_computed_in_the_first_step(tokens: int) -> None:
    rig = Arrivals()
    answer = rig.arrive("a", prompt(1, tokens), 6)
    rig.step()
    assert answer.tokens == truth(prompt(1, tokens), 6)[:2], "the first one is told as it came"
    rig.run()
    assert answer.tokens == truth(prompt(1, tokens), 6) and answer.cached_tokens == tokens
    assert isinstance(answer.outcome, Completed) and answer.outcome.usage.completion_tokens == 6
    rig.all_back()


@pytest.mark.parametrize("valid_tokens", [4, 8])
def test_without_a_first_token_the_rest_of_the_prompt_is_computed(valid_tokens: int) -> None:
    rig = Arrivals()
    answer = rig.arrive("a", prompt(1, 11), 6, valid_tokens=valid_tokens)
    rig.run()
    assert answer.tokens == truth(prompt(1, 11), 6) and answer.cached_tokens == valid_tokens
    assert rig.scheduler.counters.prompt_tokens == 11
    rig.all_back()


def test_those_for_whom_there_is_no_place_wait_with_their_pages() -> None:
    rig = Arrivals(max_running=2)
    answers = [rig.arrive(f"r{number}", prompt(number, 10), 5) for number in range(5)]
    held = rig.kv.usage()
    rig.step()
    assert rig.scheduler.running == 2 and rig.kv.usage().leased >= held.leased
    assert [len(answer.tokens) for answer in answers] == [2, 2, 1, 1, 1]
    rig.run()
    assert [answer.tokens for answer in answers] == [truth(prompt(number, 10), 5) for number in range(5)]
    assert not rig.scheduler.counters.recomputed_tokens
    rig.all_back()


def test_those_who_run_are_given_the_pages_of_those_who_wait() -> None:
    rig = Arrivals(pages=14, max_running=1)
    first = rig.arrive("first", prompt(1, 9), 24)
    others = [rig.arrive(f"r{number}", prompt(number, 10), 5) for number in range(2, 5)]
    assert rig.kv.available_pages == 2
    rig.run()
    assert first.tokens == truth(prompt(1, 9), 24)
    assert [answer.tokens for answer in others] == [truth(prompt(number, 10), 5) for number in range(2, 5)], "computed again, to the bit"
    assert not rig.scheduler.counters.preemptions
    rig.all_back()


def test_the_first_in_line_is_given_them_when_nobody_runs() -> None:
    rig = Arrivals(pages=12)
    first = rig.submit("first", prompt(1, 30), 8)
    others = [rig.arrive(f"r{number}", prompt(number, 14), 5) for number in (2, 3)]
    rig.run()
    assert first.tokens == truth(prompt(1, 30), 8)
    assert [answer.tokens for answer in others] == [truth(prompt(number, 14), 5) for number in (2, 3)]
    rig.all_back()


def test_leaving_and_being_late_give_everything_back() -> None:
    rig = Arrivals(max_running=1)
    rig.arrive("runs", prompt(1, 10), 30)
    leaves = rig.arrive("leaves", prompt(2, 10), 5)
    late = rig.arrive("late", prompt(3, 10), 5, deadline_s=0.05)
    rig.step()
    rig.cancel("leaves")
    rig.run()
    assert isinstance(leaves.outcome, Cancelled) and leaves.tokens == truth(prompt(2, 10), 1)
    assert isinstance(late.outcome, Failed) and isinstance(late.outcome.error, DeadlineExceeded)
    rig.all_back()


def test_a_first_token_that_ends_the_answer_ends_it() -> None:
    rig = Arrivals()
    only = rig.arrive("only", prompt(1, 10), 1)
    stop = truth(prompt(2, 10), 1)[0]
    stops = rig.arrive("stops", prompt(2, 10), 9, sampling=SamplingParams(temperature=0.0, stop_token_ids=frozenset({stop})))
    rig.step()
    assert isinstance(only.outcome, Completed) and only.outcome.reason is FinishReason.LENGTH
    assert isinstance(stops.outcome, Completed) and stops.outcome.reason is FinishReason.STOP
    assert rig.scheduler.counters.steps == 0, "nothing was left to compute"
    rig.all_back()


def test_refused_with_pages_gives_them_back() -> None:
    rig = Arrivals(max_running=1, max_queued=0)
    long = rig.arrive("long", prompt(1, 10), 4000)
    assert isinstance(long.outcome, Refused) and isinstance(long.outcome.error, ContextLengthExceeded)
    rig.arrive("runs", prompt(2, 10), 30)
    rig.step()
    more = rig.arrive("more", prompt(3, 10), 5)
    assert isinstance(more.outcome, Refused) and isinstance(more.outcome.error, Overloaded)
    rig.run()
    rig.all_back()


def test_who_has_pages_waits_for_nobody_elses_prefill() -> None:
    rig = Arrivals(pages=256, chunk_tokens=16)
    rig.submit("computes", prompt(1, 200), 4)
    rig.step()
    rig.arrive("arrives", prompt(1, 200), 4)
    rig.step()
    assert len(rig.answers["arrives"].tokens) == 2
    rig.run()
    assert rig.answers["computes"].tokens == rig.answers["arrives"].tokens == truth(prompt(1, 200), 4)
    rig.all_back()


def test_when_no_page_can_be_had_any_more_it_fails_and_says_so() -> None:
    rig = Arrivals(pages=8)
    answer = rig.arrive("a", prompt(1, 12), 8)
    lost = rig.kv.pool.reserve(rig.kv.available_pages, SCOPE)
    assert lost is not None
    for page in lost.stamps[::2]:
        rig.kv.pool.doom(page)
    lost.release()
    rig.node.held_elsewhere = True
    rig.step()
    assert not answer.outcome, "a hand-off holds pages that come back"
    rig.node.held_elsewhere = False
    rig.step()
    assert isinstance(answer.outcome, Failed) and isinstance(answer.outcome.error, Unavailable)
    assert rig.kv.usage().leased == 0


def test_it_goes_on_in_its_own_pages_alone() -> None:
    rig = Arrivals(max_running=1)
    rig.arrive("runs", prompt(1, 10), 30)
    rig.step()
    rig.arrive("a", prompt(2, 10), 5)
    sequence = rig.node._open[RequestId("a")]
    assert type(sequence.state) is Received
    other, _ = rig.computed("other", prompt(3, 10), 10)
    with pytest.raises(LawBroken, match="L11"):
        sequence.admit(other)
    rig.kv.drop(other)
    rig.run()
    rig.all_back()
