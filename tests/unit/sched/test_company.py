"""Who begins alike goes together when pages are short, and nobody waits for ever because of it."""

from __future__ import annotations

import random

import pytest

from kvseal.core.ids import RequestId, Scope
from kvseal.core.request import Request
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig, truth
from kvseal.sched import policy
from kvseal.sched.company import Company
from kvseal.sched.line import WaitingLine
from kvseal.sched.sequence import Sequence

PAGE_TOKENS = 4


def sequence(name: str, tokens: list[int], arrival: int = 1, scope: Scope = SCOPE) -> Sequence:
    request = Request(request_id=RequestId(name), prompt_tokens=tuple(tokens), max_output_tokens=1, scope=scope)
    return Sequence(request, arrival, policy.order_key(arrival, 0))


def test_the_closest_are_those_who_share_the_most() -> None:
    company = Company(PAGE_TOKENS)
    one, near, far = sequence("one", [1] * 40), sequence("near", [1] * 20 + [2] * 20), sequence("far", [1] * 9)
    other, short = sequence("other", [1] * 40, scope=OTHER_SCOPE), sequence("short", [1] * 7)
    company.enter(one)
    company.leave(one)
    assert company.closest(one) is None
    for each in (other, short, far, near):
        company.enter(each)
    assert company.closest(one) is near
    company.leave(near)
    assert company.closest(one) is far
    company.leave(far)
    assert company.closest(one) is None, "two whole pages at least, in the same scope"
    assert company.closest(short) is None
    company.leave(other)
    company.leave(short)
    assert not company._waiting


def test_a_line_forgets_whoever_leaves_from_the_middle() -> None:
    line = WaitingLine(PAGE_TOKENS)
    waiting = [sequence(str(i), [i] * 8, i + 1) for i in range(300)]
    for each in waiting:
        line.push(each)
    assert (len(line), line.tokens) == (300, 2400)
    order = waiting[:]
    random.Random(3).shuffle(order)
    for index, each in enumerate(order[:290]):
        line.take(each)
        if index % 3 == 0:  # preempted, or set aside and put back
            line.push(each)
            line.take(each)
    left = sorted(order[290:], key=lambda one: one.key)
    assert (len(line), line.tokens) == (10, 80)
    found = []
    while (first := line.first()) is not None:
        found.append(first)
        line.take(first)
    assert found == left and len(line._heap) < 100 and not line.company._waiting


def groups(count: int, members: int, head: int, tail: int) -> list[list[int]]:
    """Prompts of `members` requests for each of `count` heads, shuffled."""
    prompts = [
        [(1 + group * 7919 + at * 31) % 4_000 for at in range(head)] + [(member * 104_729 + at * 17 + group) % 4_000 for at in range(tail)]
        for group in range(count)
        for member in range(members)
    ]
    random.Random(5).shuffle(prompts)
    return prompts


def test_a_shuffled_batch_computes_each_head_once_or_hardly_more() -> None:
    rig = Rig(pages=40, chunk_tokens=64, max_running=8, max_queued=1_000)  # 160 tokens; the heads alone are 12 x 40
    answers = [rig.submit(str(i), prompt, 1) for i, prompt in enumerate(groups(12, 10, 40, 8))]
    rig.run(checked=False)
    assert sum(answer.cached_tokens or 0 for answer in answers) >= 0.85 * 12 * 9 * 40
    assert all(answer.outcome is not None for answer in answers)


def test_with_pages_for_all_the_order_is_that_of_arrival() -> None:
    rig = Rig(pages=1_200, chunk_tokens=48, max_running=1, max_queued=1_000)
    prompts = groups(4, 4, 40, 8)
    answers = [rig.submit(str(i), prompt, 1) for i, prompt in enumerate(prompts)]
    ended: list[int] = []
    while rig.engine.has_work:
        rig.step()
        ended += [i for i, answer in enumerate(answers) if answer.outcome is not None and i not in ended]
    assert ended == sorted(ended)
    assert [answer.tokens for answer in answers] == [truth(prompt, 1) for prompt in prompts]


@pytest.mark.parametrize("later, passes", [(policy.COMPANY_ARRIVALS, True), (policy.COMPANY_ARRIVALS + 1, False)])
def test_nobody_is_passed_by_company_from_far_behind(later: int, passes: bool) -> None:
    assert policy.may_pass(policy.order_key(1 + later, 0), policy.order_key(1, 0)) is passes


def test_a_lower_class_never_passes_with_company() -> None:
    rig = Rig(pages=24, chunk_tokens=64, max_running=1, max_queued=100)
    hot = [7] * 40
    rig.submit("leader", hot + [1] * 8, 1)
    rig.step()
    rig.submit("same-start", hot + [2] * 8, 1, priority=5)
    rig.submit("better", [9] * 48, 1, priority=0)
    order: list[str] = []
    while rig.engine.has_work:
        rig.step()
        order += [name for name, answer in rig.answers.items() if answer.outcome is not None and name not in order]
    assert order.index("better") < order.index("same-start")
