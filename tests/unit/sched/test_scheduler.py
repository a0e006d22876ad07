"""The scheduler in a whole engine on the oracle model: every path to an end, and exactness on all of them."""

from __future__ import annotations

import pytest

from kvseal.core.batch import Batch, BatchResult, RowResult
from kvseal.core.errors import (
    BrokenSeal,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LawBroken,
    Overloaded,
    SamplingFailed,
    Unavailable,
)
from kvseal.core.events import TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.laws import Law
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Refused
from kvseal.core.request import SamplingParams
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig, truth
from kvseal.sched.policy import MAX_OVERTAKEN, LengthHistory


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + at * 104_729) % 4000 for at in range(tokens)]


# --- exact (L13) ---


@pytest.mark.parametrize("chunk_tokens", [1, 3, 16, 512])
def test_batched_and_chunked_is_alone_and_whole(chunk_tokens: int) -> None:
    rig = Rig(pages=128, chunk_tokens=chunk_tokens)
    prompts = [prompt(i, 3 + 5 * i) for i in range(8)]
    answers = [rig.submit(str(i), each, 12) for i, each in enumerate(prompts)]
    rig.run()
    assert [answer.tokens for answer in answers] == [truth(each, 12) for each in prompts]


@pytest.mark.parametrize("tokens", [3, 4, 5, 7, 8, 9, 16, 17])
def test_a_hit_answers_like_a_miss(tokens: int) -> None:
    rig = Rig()
    cold = rig.answer("cold", prompt(1, tokens))
    warm = rig.answer("warm", prompt(1, tokens))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == (tokens - 1) // 4 * 4  # at least one token is computed again
    assert cold.tokens == warm.tokens == truth(prompt(1, tokens))


def optimist(**options: int) -> Rig:
    """A rig that has only ever seen requests of one token, so it admits too many and must preempt."""
    rig = Rig(**options)
    rig.scheduler._admission.lengths = LengthHistory(prior=(1,) * 500)
    return rig


def test_preempted_is_never_preempted() -> None:
    rig = optimist(pages=20)
    prompts = [prompt(i, 6) for i in range(4)]
    answers = [rig.submit(str(i), each, 40, sampling=stopping()) for i, each in enumerate(prompts)]
    rig.run()
    assert rig.scheduler.counters.preemptions > 0
    assert rig.scheduler.counters.recomputed_tokens > 0
    assert [answer.tokens for answer in answers] == [truth(each, 40) for each in prompts]


def stopping(token: int = 4_095, **fields: object) -> SamplingParams:
    """With a stop token the scheduler cannot know the length; this one is never sampled unless said so."""
    return SamplingParams(temperature=0.0, stop_token_ids=frozenset({token}), **fields)  # type: ignore[arg-type]


# --- ends ---


def test_stop_token_ends_and_is_emitted() -> None:
    whole = truth(prompt(3, 9), 10)
    answer = Rig().answer("a", prompt(3, 9), 10, sampling=stopping(whole[4]))
    assert answer.tokens == whole[: whole.index(whole[4]) + 1]
    assert answer.outcome == Completed(FinishReason.STOP, answer.outcome.usage, whole[4])  # type: ignore[union-attr]


def test_min_tokens_passes_a_stop_token_by() -> None:
    whole = truth(prompt(3, 9), 10)
    first = Rig().answer("a", prompt(3, 9), 10, sampling=stopping(whole[0]))
    later = Rig().answer("a", prompt(3, 9), 10, sampling=stopping(whole[0], min_tokens=1))
    assert len(first.tokens) == 1
    assert len(later.tokens) > 1 and later.tokens[0] != whole[0]  # the sampler rules it out as well


def test_budget_ends_with_length_and_usage() -> None:
    outcome = Rig().answer("a", prompt(4, 9), 3).outcome
    assert isinstance(outcome, Completed) and outcome.reason is FinishReason.LENGTH
    assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens, outcome.usage.cached_tokens) == (9, 3, 0)


@pytest.mark.parametrize("output_tokens, fits", [(54, True), (55, True), (56, False)])
def test_what_never_fits_is_refused_before_anything_moves(output_tokens: int, fits: bool) -> None:
    rig = Rig(pages=16)  # 64 tokens
    answer = rig.submit("a", prompt(5, 9), output_tokens)
    assert (answer.outcome is None) is fits
    if not fits:
        assert isinstance(answer.outcome, Refused) and isinstance(answer.outcome.error, ContextLengthExceeded)
        assert not rig.engine.has_work and rig.kv.usage().free == 16
    rig.run()


def test_nonsense_is_refused_and_counted() -> None:
    rig = Rig()
    answer = rig.submit("a", [5_000])
    assert isinstance(answer.outcome, Refused) and isinstance(answer.outcome.error, InvalidRequest)
    assert rig.engine.stats().outcomes["refused"] == 1


def test_full_line_is_refused_with_a_time() -> None:
    rig = Rig(max_running=1, max_queued=2)
    waiting = [rig.submit(str(i), prompt(i, 5), 3) for i in range(3)]
    refused = rig.submit("late", prompt(9, 5), 3)
    assert [answer.outcome for answer in waiting] == [None] * 3
    assert isinstance(refused.outcome, Refused) and isinstance(refused.outcome.error, Overloaded)
    assert 1 <= (refused.outcome.error.retry_after_s or 0) <= 60
    rig.run()
    assert isinstance(rig.answer("again", prompt(9, 5), 3).outcome, Completed)


def test_the_same_id_twice_is_our_bug() -> None:
    rig = Rig()
    rig.submit("a", [1])
    with pytest.raises(LawBroken, match="L11"):
        rig.submit("a", [1])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_finished_from_above_is_completed_and_gives_everything_back(steps: int) -> None:
    rig = Rig(chunk_tokens=4)
    answer = rig.submit("a", prompt(6, 10), 30)
    for _ in range(steps):
        rig.step()
    rig.engine.finish(RequestId("a"))
    rig.engine.finish(RequestId("a"))
    rig.run()
    assert isinstance(answer.outcome, Completed) and answer.outcome.reason is FinishReason.STOP
    assert answer.outcome.usage.completion_tokens == len(answer.tokens)
    assert rig.engine.stats().outcomes["completed"] == 1 and rig.engine.stats().outcomes["cancelled"] == 0
    usage = rig.kv.usage()
    assert usage.free + usage.evictable == usage.total


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_gives_everything_back_in_every_state(steps: int) -> None:
    rig = Rig(chunk_tokens=4)
    answer = rig.submit("a", prompt(6, 10), 30)
    other = rig.submit("b", prompt(7, 10), 10)
    for _ in range(steps):
        rig.step()
    rig.cancel("a")
    rig.cancel("a")
    rig.engine.check()
    rig.run()
    assert isinstance(answer.outcome, Cancelled)
    assert answer.tokens == truth(prompt(6, 10), 30)[: len(answer.tokens)]
    assert other.tokens == truth(prompt(7, 10), 10)
    usage = rig.kv.usage()
    assert usage.leased == usage.draining == 0


def test_cancel_in_flight_drains_until_the_step_is_over() -> None:
    rig = Rig()
    answer = rig.submit("a", prompt(6, 10), 30)
    batch = rig.scheduler.schedule()
    rig.cancel("a")
    assert rig.kv.usage().draining == 3
    result = rig.runner.run(batch, rig.kv.ledger_nonces)
    rig.scheduler.apply(result)
    assert rig.kv.usage().free == 64
    assert answer.tokens == []


@pytest.mark.parametrize("steps", [0, 3])
def test_deadline_fails_waiting_and_running(steps: int) -> None:
    rig = Rig()
    answer = rig.submit("a", prompt(6, 10), 50, deadline_s=1.0)
    for _ in range(steps):
        rig.step()
    rig.clock.advance(1.0)
    rig.run()
    assert isinstance(answer.outcome, Failed) and isinstance(answer.outcome.error, DeadlineExceeded)
    assert rig.kv.usage().leased == 0


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    rig = Rig()
    for i in range(70):
        rig.answer(str(i), [i], 1, deadline_s=100.0)
    late = rig.submit("late", prompt(1, 4), 30, deadline_s=1e6)
    rig.clock.advance(0.5)
    rig.step()
    assert len(rig.scheduler._deadlines) < 10
    rig.clock.advance(200.0)
    rig.run()
    assert isinstance(late.outcome, Completed)
    rig.submit("last", [1], 20, deadline_s=1e7)
    rig.clock.advance(2e6)  # past the deadline of one that has ended
    rig.run()
    assert isinstance(rig.answers["last"].outcome, Completed)


# --- laws ---


def result_of(batch: Batch, **changes: object) -> BatchResult:
    rows = tuple(RowResult(row.request_id, token=7, page_digests=(bytes(16),) * (row.end // 4 - row.start // 4)) for row in batch.rows)
    return BatchResult(**{"step": batch.step, "rows": rows, **changes})  # type: ignore[arg-type]


def two_rows() -> tuple[Rig, Batch]:
    rig = Rig()
    rig.submit("a", prompt(1, 5))
    rig.submit("b", prompt(2, 5))
    return rig, rig.scheduler.schedule()


def test_results_must_be_those_of_the_batch() -> None:
    rig, batch = two_rows()
    good = result_of(batch)
    for bad in (
        BatchResult(batch.step + 1, good.rows),
        BatchResult(batch.step, good.rows[:1]),
        BatchResult(batch.step, good.rows[::-1]),
        BatchResult(batch.step, (good.rows[0], RowResult(RequestId("nobody"), token=7))),
    ):
        with pytest.raises(LawBroken, match="L6"):
            rig.scheduler.apply(bad)
    rig.scheduler.apply(good)
    with pytest.raises(LawBroken, match="L6"):
        rig.scheduler.apply(good)


def test_a_row_that_samples_must_bring_a_token() -> None:
    rig, batch = two_rows()
    rows = tuple(RowResult(row.request_id, page_digests=(bytes(16),)) for row in batch.rows)
    with pytest.raises(LawBroken, match="L6"):
        rig.scheduler.apply(BatchResult(batch.step, rows))


def test_one_step_at_a_time() -> None:
    rig, _ = two_rows()
    with pytest.raises(LawBroken, match="L8"):
        rig.scheduler.schedule()


def test_broken_seal_fails_its_request_alone_and_its_token_is_never_emitted() -> None:
    rig, batch = two_rows()
    broken = BrokenSeal(Law.L3, page=0, ordinal=0, layer=0, check="nonce")
    good = result_of(batch)
    rig.scheduler.apply(BatchResult(batch.step, (RowResult(RequestId("a"), token=7, broken=broken), good.rows[1])))
    stats = rig.engine.stats()
    assert stats.broken_seals == {"L3": 1} and stats.outcomes["failed"] == 1 and stats.running == 1
    assert stats.output_tokens == 1


def test_broken_page_of_a_request_cancelled_in_that_step_is_quarantined() -> None:
    rig, batch = two_rows()
    page = batch.rows[0].table.stamps[0]
    rig.cancel("a")
    broken = BrokenSeal(Law.L3, page=page, ordinal=0, layer=0, check="nonce")
    rig.scheduler.apply(BatchResult(batch.step, (RowResult(RequestId("a"), broken=broken), result_of(batch).rows[1])))
    stats = rig.engine.stats()
    assert stats.pages_quarantined == 1 and stats.pages_draining == 0 and stats.running == 1


def test_broken_seal_of_a_cancelled_request_is_still_counted() -> None:
    rig, batch = two_rows()
    rig.cancel("a")
    broken = BrokenSeal(Law.L3, page=0, ordinal=0, layer=0, check="nonce")
    rig.scheduler.apply(BatchResult(batch.step, (RowResult(RequestId("a"), broken=broken), result_of(batch).rows[1])))
    assert rig.engine.stats().broken_seals == {"L3": 1}
    assert rig.engine.stats().outcomes == {"completed": 0, "refused": 0, "cancelled": 1, "failed": 0}


def test_failed_sampling_fails_its_request_alone() -> None:
    rig, batch = two_rows()
    failed = RowResult(RequestId("a"), failed=SamplingFailed("not finite"))
    rig.scheduler.apply(BatchResult(batch.step, (failed, result_of(batch).rows[1])))
    assert rig.engine.stats().outcomes["failed"] == 1 and rig.scheduler.running == 1


def test_one_decoder_that_ends_or_breaks_in_flight_leaves_the_others_as_they_were() -> None:
    for kind in ("cancelled", "broken"):
        rig = Rig()
        answers = {name: rig.submit(name, prompt(index, 9), 12) for index, name in enumerate("abc")}
        for _ in range(3):
            rig.step()
        batch = rig.scheduler.schedule()
        assert all(len(row.tokens) == 1 for row in batch.rows), "all decode"
        result = rig.runner.run(batch, rig.kv.ledger_nonces)
        if kind == "cancelled":
            rig.cancel("b")
        else:
            row = batch.rows[1]
            broken = BrokenSeal(Law.L3, page=row.table.stamps[0], ordinal=0, layer=0, check="nonce")
            result = BatchResult(result.step, (result.rows[0], RowResult(row.request_id, broken=broken), result.rows[2]))
        told = rig.scheduler.apply(result)
        assert [event.tokens for event in told if isinstance(event, TokensEvent)] == [result.rows[0][1:2], result.rows[2][1:2]]
        rig.run()
        for index, name in ((0, "a"), (2, "c")):
            whole, told_later = truth(prompt(index, 9), 12), answers[name].tokens
            assert len(told_later) == 11 and sorted([*told_later, result.rows[index].token]) == sorted(whole)


# --- order, sharing, pages ---


def test_priority_first_then_arrival() -> None:
    rig = Rig(max_running=1)
    order: list[str] = []
    for name, priority in (("low", 5), ("first", 0), ("second", 0), ("high", -3)):
        rig.submit(name, prompt(len(name), 4), 1, priority=priority)
    while rig.engine.has_work:
        order += [event.request_id for event in rig.step() if not hasattr(event, "tokens")]
    assert order == ["high", "first", "second", "low"]


def test_better_class_unblocks_a_blocked_line() -> None:
    rig = Rig(pages=8)
    rig.submit("runs", prompt(1, 8), 12)
    rig.step()
    rig.submit("large", prompt(2, 20), 8)
    rig.step()
    assert rig.scheduler.waiting == 1
    rig.submit("small", prompt(3, 2), 1, priority=-5)
    rig.step()
    assert isinstance(rig.answers["small"].outcome, Completed)
    rig.run()


def test_choices_share_one_prefill() -> None:
    rig = Rig(pages=256)
    answers = [rig.submit(str(i), prompt(1, 200), 4) for i in range(4)]
    rig.step()
    assert (rig.scheduler.running, rig.scheduler.waiting) == (1, 3)
    rig.run()
    assert [answer.cached_tokens for answer in answers] == [0, 196, 196, 196]
    assert [answer.tokens for answer in answers] == [truth(prompt(1, 200), 4)] * 4


def test_sharing_is_given_up_when_too_many_pass() -> None:
    rig = Rig(pages=512)
    rig.submit("first", prompt(1, 300), 2)
    shares = rig.submit("shares", prompt(1, 300), 2)
    for i in range(20):
        rig.submit(f"passes{i}", prompt(10 + i, 2), 2)
    rig.step()
    assert rig.scheduler.running == 1 + MAX_OVERTAKEN
    rig.run()
    assert shares.tokens == truth(prompt(1, 300), 2)


def test_one_prefill_is_waited_for_and_no_other() -> None:
    rig = Rig(pages=512, chunk_tokens=250)
    first = rig.submit("first", prompt(1, 240), 2)
    shares = rig.submit("shares", prompt(1, 240) + prompt(2, 240), 2)
    rig.step()
    assert rig.scheduler.waiting == 1
    rig.cancel("first")  # whoever it waited for is gone, so it starts by itself
    longer = rig.submit("longer", prompt(1, 240) + prompt(2, 240) + prompt(3, 8), 2, priority=-1)
    rig.run()
    assert first.tokens == truth(prompt(1, 240), 2)[:1]
    assert shares.tokens == truth(prompt(1, 240) + prompt(2, 240), 2)
    assert longer.tokens == truth(prompt(1, 240) + prompt(2, 240) + prompt(3, 8), 2)


def test_sharing_waits_only_for_what_is_not_computed_or_cached() -> None:
    rig = Rig(pages=512, chunk_tokens=100)
    rig.answer("cached", prompt(1, 90), 2)
    rig.submit("first", prompt(1, 90) + prompt(2, 60), 2)
    same = rig.submit("same", prompt(1, 90) + prompt(3, 5), 2)
    rig.step()
    assert rig.scheduler.waiting == 0 and same.tokens  # what they share is cached already
    rig.submit("long", prompt(4, 150), 2)
    rig.step()
    late = rig.submit("late", prompt(4, 40) + prompt(5, 20), 2)
    rig.step()
    assert late.cached_tokens == 40 and late.tokens  # computed in the first chunk, though the prefill still ran
    rig.run()


def test_prefill_gives_way_to_those_before_it() -> None:
    rig = optimist(pages=24, chunk_tokens=16)
    old = rig.submit("old", prompt(1, 8), 60, sampling=stopping())
    rig.step()
    young = rig.submit("young", prompt(2, 70), 4, sampling=stopping())
    rig.step()
    hog = rig.kv.pool.reserve(rig.kv.available_pages, SCOPE)
    assert hog is not None
    for _ in range(3):
        rig.step()
    assert rig.scheduler.counters.preemptions > 0 and rig.scheduler.running == 1
    hog.release()
    rig.run()
    assert old.tokens == truth(prompt(1, 8), 60) and young.tokens == truth(prompt(2, 70), 4)


def test_no_sharing_across_scopes_or_for_prompt_logprobs() -> None:
    rig = Rig(pages=512)
    other = rig.submit("a", prompt(1, 100), 2)
    mine = rig.submit("b", prompt(1, 100), 2, scope=OTHER_SCOPE)
    logged = rig.submit("c", prompt(1, 100), 2, sampling=SamplingParams(temperature=0.0, prompt_logprobs=0))
    rig.submit("d", prompt(1, 12) + prompt(2, 50), 2)  # shares too little to be worth a step
    rig.step()
    assert rig.scheduler.waiting == 0
    rig.run()
    assert mine.cached_tokens == logged.cached_tokens == other.cached_tokens == 0
    assert mine.tokens == other.tokens == logged.tokens


def test_prompt_logprobs_are_complete_whatever_the_cache_and_the_chunks() -> None:
    def logged(rig: Rig) -> tuple[object, ...]:
        return rig.answer("logged", prompt(1, 30), 6, sampling=SamplingParams(temperature=0.0, prompt_logprobs=1)).prompt_logprobs

    whole = logged(Rig())
    assert len(whole) == 30 and whole[0] is None and None not in whole[1:]
    warm = Rig(chunk_tokens=7)
    warm.answer("before", prompt(1, 30))
    assert logged(warm) == whole


def test_prompt_logprobs_survive_preemption() -> None:
    sampling = stopping(prompt_logprobs=0)
    rig = optimist(pages=20, chunk_tokens=8)
    answers = [rig.submit(str(i), prompt(i, 14), 30, sampling=sampling) for i in range(3)]
    rig.run()
    assert rig.scheduler.counters.preemptions > 0
    for i, answer in enumerate(answers):
        assert answer.tokens == truth(prompt(i, 14), 30)
        assert len(answer.prompt_logprobs) == 14


def test_logprobs_come_with_their_tokens() -> None:
    answer = Rig().answer("a", prompt(1, 5), 4, sampling=SamplingParams(temperature=0.0, logprobs=2))
    assert [one.token for one in answer.logprobs] == answer.tokens


def test_first_in_order_always_progresses_in_the_smallest_pool() -> None:
    rig = optimist(pages=8, chunk_tokens=4)
    answers = [rig.submit(str(i), prompt(i, 12), 20, sampling=stopping()) for i in range(6)]
    rig.run()
    assert [answer.tokens for answer in answers] == [truth(prompt(i, 12), 20) for i in range(6)]


def test_lost_pages_fail_the_request_that_needs_them_instead_of_hanging() -> None:
    rig = Rig(pages=8)
    running = rig.submit("a", prompt(1, 10), 20)
    rig.step()
    lease = rig.kv.pool.reserve(5, SCOPE)
    assert lease is not None
    for page in lease.stamps[::2]:
        rig.kv.pool.doom(page)
    lease.release()
    waits = rig.submit("b", prompt(2, 10), 2)
    rig.run()
    assert isinstance(running.outcome, Failed) and type(running.outcome.error) is Unavailable
    assert isinstance(waits.outcome, Completed)
    refused = rig.submit("c", prompt(3, 10), 20)
    assert isinstance(refused.outcome, Refused)


def test_draining_pages_are_waited_for() -> None:
    rig = Rig(pages=8)
    running = rig.submit("a", prompt(1, 10), 20)
    rig.step()
    lease = rig.kv.pool.reserve(5, SCOPE)
    assert lease is not None
    ticket = rig.kv.pool.ticket(lease.stamps)
    lease.release()
    for _ in range(5):
        rig.step()
    assert running.outcome is None and rig.kv.usage().draining == 5
    ticket.release()
    rig.run()
    assert running.tokens == truth(prompt(1, 10), 20)


def test_waiting_request_that_lost_its_pages_fails_or_waits() -> None:
    rig = Rig(pages=8)
    lease = rig.kv.pool.reserve(8, SCOPE)
    assert lease is not None
    ticket = rig.kv.pool.ticket(lease.stamps)
    lease.release()
    answer = rig.submit("a", prompt(1, 10), 2)
    rig.step()
    assert answer.outcome is None
    ticket.expire()
    rig.step()
    rig.step()
    assert isinstance(answer.outcome, Failed)


def test_long_prefill_shrinks_to_the_pages_there_are() -> None:
    rig = Rig(pages=24, chunk_tokens=40)
    first = rig.submit("first", prompt(1, 70), 4, sampling=stopping())
    rig.step()
    hog = rig.kv.pool.reserve(rig.kv.available_pages - 2, SCOPE)
    assert hog is not None
    rig.step()
    assert rig.scheduler._running[0].computed_tokens == 48
    hog.release()
    rig.run()
    assert first.tokens == truth(prompt(1, 70), 4)


def test_events_wait_for_whoever_takes_them() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3])
    rig.cancel("a")
    assert rig.engine.has_work
    assert [event.request_id for event in rig.scheduler.take_events()] == ["a"]
    assert not rig.engine.has_work


def test_many_cancelled_in_line_cost_no_memory() -> None:
    rig = Rig(max_running=1, max_queued=10_000)
    rig.submit("runs", prompt(1, 4), 20)
    rig.step()
    for i in range(1_000):
        rig.submit(str(i), [1, 2, 3], 2)
    for i in range(990):
        rig.cancel(str(i))
    assert rig.scheduler.waiting == 10
    assert len(rig.scheduler._line._heap) < 200
    rig.run(checked=False)
    assert rig.engine.stats().outcomes == {"completed": 11, "refused": 0, "cancelled": 990, "failed": 0}


def test_wall_of_random_loads_is_exact() -> None:
    rig = optimist(pages=40, chunk_tokens=16, max_running=8)
    loads = [(prompt(i % 5, 3 + (i * 37) % 60), 1 + (i * 13) % 40) for i in range(24)]
    answers = [rig.submit(str(i), each, output, sampling=stopping()) for i, (each, output) in enumerate(loads)]
    rig.run()
    for answer, (each, output) in zip(answers, loads, strict=True):
        assert answer.tokens == truth(each, output, sampling=stopping())
