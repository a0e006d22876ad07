"""Aborts: a client that hangs up costs nobody anything.

Hangs up before, during and after prefill and in the middle of decoding, at random times, beside neighbours whose answers are known; retries
at once; and looks whether pages and slots come back, by metrics where they are offered and by the wait of the next request where not.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from kvseal.audit.compare import Kind, compare, sureness
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Cost, Depth, Probe, Scene, exhibit
from kvseal.audit.prompts import filler
from kvseal.audit.statistics import median
from kvseal.audit.target import Target, read_metrics
from kvseal.audit.wire import Answer, Ask, End

_NEIGHBOUR_TOKENS = 48
_VICTIM_TOKENS = 96
_LONG_TOKENS = 256
_SETTLE_S = 8.0
_QUIET_TRIES = 8
_IDLE_ASKS = 5
_CHUNKS = 8  # After so many pieces we hang up: enough to tell how fast they come.
_LEAD = 3
_MOST_TRIES = 9
_LOOKS = 6  # At the metrics, in one try.


def cost(target: Target, depth: Depth, concurrency: int) -> Cost:
    rounds, neighbours = _rounds(depth), _neighbours(concurrency)
    requests = 2 * neighbours + rounds * (2 * neighbours + 2) + _MOST_TRIES * ((_QUIET_TRIES + 1) * concurrency + 1 + _LOOKS) + 8
    tokens = requests * (200 + _VICTIM_TOKENS) + _MOST_TRIES * concurrency * _LONG_TOKENS
    return Cost(requests + 20, tokens)


def _rounds(depth: Depth) -> int:
    return 3 + 3 * int(depth)


def _neighbours(concurrency: int) -> int:
    return max(1, concurrency // 2)


async def run(scene: Scene, result: ProbeResult) -> None:
    if not scene.target.streams:
        result.unproven.append("streams do not work here, so a client cannot hang up in the middle of one")
        return
    before = await read_metrics(scene.client) if scene.target.metrics else None
    small = scene.ask(filler(8, scene.draw).lstrip(), tokens=24, max_tokens=1, stream=True, logprobs=False, label="small request")
    idle_s = await _idle_s(scene, small)  # Before anybody hangs up: afterwards nobody knows whether the server is idle.
    await _neighbours_undisturbed(scene, result)
    if idle_s is None:
        result.unproven.append("small requests are not answered as streams, so nobody can tell who waits for a place after hang-ups")
    else:
        await _slots_come_back(scene, result, small, idle_s)
    if before is not None:
        await _pages_come_back(scene, result, before.busy(), before.held())
    else:
        result.unproven.append("no metrics are offered, so whether pages come back could only be judged by waiting times")


async def _neighbours_undisturbed(scene: Scene, result: ProbeResult) -> None:
    asks = [
        scene.ask(
            filler(12 + 9 * index, scene.draw).lstrip(), tokens=64, max_tokens=_NEIGHBOUR_TOKENS, stream=True, label="neighbour, alone"
        )
        for index in range(_neighbours(scene.concurrency))
    ]
    alone: list[Answer] = []
    for ask in asks:
        first, second = await scene.client.ask(ask), await scene.client.ask(ask)
        if first.ok and second.ok and compare(first, second).kind in (Kind.SAME, Kind.NUMERICS):
            alone.append(first)
    if not alone:
        result.unproven.append("no neighbour's answer is repeatable, so a change could not be noticed")
        return
    checked, silent = 0, []
    for number in range(_rounds(scene.depth)):
        answers = await _one_round(scene, number, alone)
        scene.listen(answers, result)
        checked += _judge(scene, result, alone, answers)
        silent += [answer for answer in answers[:-1] if answer.end is End.TIMEOUT and answers[-1].ok][:1]
    _judge_silent(result, silent, [answer.total_s for answer in alone])
    if not any(f.grade in (Grade.CORRUPTION, Grade.LEAK) for f in result.findings):
        result.proved.append(f"{checked} answers beside and after hung-up requests were those of the quiet server")


async def _one_round(scene: Scene, number: int, alone: list[Answer]) -> list[Answer]:
    """Neighbours run; a victim hangs up at some stage; it retries within 60 ms; then the neighbours once more, alone."""
    canary = scene.aviary.new(f"aborted request {number}")
    prompt = f"The code words are {canary.text}. {filler(120, scene.draw).lstrip()} The code words are"
    victim = scene.ask(prompt, tokens=160, max_tokens=_VICTIM_TOKENS, stream=True, tenant=1, label=f"hangs up, stage {number % 4}")
    at_random_s = scene.draw.uniform(0.0, 2.0 * max(0.02, scene.alone_s))
    stages = (
        replace(victim, cancel_after_s=0.002),
        replace(victim, cancel_after_s=at_random_s),
        replace(victim, cancel_after_chunks=1),
        replace(victim, cancel_after_chunks=scene.draw.randint(2, 12)),
    )
    running = [asyncio.create_task(scene.client.ask(replace(answer.ask, label="neighbour of one that hangs up"))) for answer in alone]
    try:
        await asyncio.sleep(scene.draw.uniform(0.0, 0.02))
        await scene.client.ask(stages[number % 4])
        await asyncio.sleep(scene.draw.uniform(0.0, 0.06))
        retry = await scene.client.ask(replace(victim, max_tokens=8, label="retry at once"))
        beside = list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    after = [await scene.client.ask(replace(answer.ask, label="neighbour, afterwards")) for answer in alone]
    return [*beside, *after, retry]


def _judge(scene: Scene, result: ProbeResult, alone: list[Answer], answers: list[Answer]) -> int:
    known = {answer.ask.prompt: answer for answer in alone}
    checked = 0
    for answer in answers:
        reference = known.get(answer.ask.prompt)
        if reference is None:
            continue
        if answer.ok:
            checked += 1
            difference = compare(reference, answer, scene.floor)
            if difference.kind is Kind.DIFFERENT:
                result.find(
                    Finding(
                        "aborts.neighbour-changed",
                        Grade.CORRUPTION,
                        sureness([difference], scene.floor),
                        "somebody's answer changes when another client hangs up",
                        f"{difference} (noise floor {scene.floor:.3g} nats).",
                        "Free pages only when nothing is in flight on them.",
                        (exhibit(reference, "on the quiet server"), exhibit(answer)),
                        ("https://github.com/sgl-project/sglang/issues/24527", "https://github.com/vllm-project/vllm/pull/45357"),
                    )
                )
        elif answer.end not in (End.CANCELLED, End.TIMEOUT) and answer.status not in (429, 503):
            said = f"It ended as {answer.end.value}, status {answer.status}: {answer.error_message or answer.note}"
            result.find(_killed(Grade.HONESTY, said, answer))
    return checked


def _judge_silent(result: ProbeResult, silent: list[Answer], alone_s: list[float]) -> None:
    """`silent` holds one neighbour of each round in which one was never answered though the request that was sent after the hang-up was.
    Once may be a machine that had no time for a moment; twice is a habit, unless the neighbours are slow by themselves."""
    if not silent:
        return
    timed_out_s = silent[0].total_s
    often = f"in {len(silent)} rounds a neighbour was not answered within {timed_out_s:.0f} s (alone it takes {max(alone_s):.1f} s)"
    if len(silent) < 2 or 2 * (len(alone_s) + 2) * max(alone_s) > timed_out_s:
        result.unproven.append(f"{often}, which may be mere slowness: audit again on a quieter machine, or with more --timeout")
        return
    result.find(_killed(Grade.HANG, f"{often.capitalize()}, while a later request was.", silent[-1]))


def _killed(grade: Grade, said: str, answer: Answer) -> Finding:
    return Finding(
        "aborts.neighbour-killed",
        grade,
        Confidence.LIKELY,
        "a request fails when another client hangs up",
        said,
        "An abort ends one request.",
        (exhibit(answer),),
    )


async def _idle_s(scene: Scene, small: Ask) -> float | None:
    """How long a small request takes while nothing else runs, by the median; None where none is answered."""
    answers = [await scene.client.ask(small) for _ in range(_IDLE_ASKS)]
    served_s = [answer.total_s for answer in answers if answer.ok]
    return median(served_s) if served_s else None


@dataclass(frozen=True, slots=True)
class _Try:
    """What one round of hang-ups showed. `rest_s`: so long would the long answers still have run; `waited_s`: so long did somebody wait for
    a place after one of them had hung up; `counted`: the server itself still counted them as running after a quarter of that time (None: it
    does not say, or nobody looked)."""

    rest_s: float
    waited_s: float
    counted: bool | None
    waiter: Answer

    def tells(self, idle_s: float) -> bool:
        return self.rest_s > max(4 * idle_s, 0.05)

    def blocked(self, idle_s: float) -> bool:
        return bool(self.counted) or self.waited_s >= _patience_s(idle_s, self.rest_s)


def _patience_s(idle_s: float, rest_s: float) -> float:
    """A place that comes back does so well before the answer that held it would have ended."""
    return max(4 * idle_s, idle_s + 0.25 * rest_s)


async def _slots_come_back(scene: Scene, result: ProbeResult, small: Ask, idle_s: float) -> None:
    """Fills all places that we may use with long answers, hangs up on all, and looks who waits for a place, until it is clear.

    A machine without time makes a request slow now and then, and may let one through quickly: so the tries that say "blocked" must lead
    those that say "free" by `_LEAD`, or the other way round. `small` and `idle_s` were measured before anybody hung up.
    """
    told: list[_Try] = []
    lead, settle_s = 0, idle_s
    for number in range(_MOST_TRIES):
        await _quiet(scene, small, idle_s, settle_s)
        one = await _hang_up_on_all(scene, small, idle_s)
        if one.tells(idle_s):
            told.append(one)
            lead += 1 if one.blocked(idle_s) else -1
            settle_s = one.rest_s if one.blocked(idle_s) else idle_s
        if abs(lead) >= _LEAD or (number + 1 >= 2 * _LEAD and not told):
            break
    blocked = [one for one in told if one.blocked(idle_s)]
    if lead <= -_LEAD:
        result.proved.append("after all long requests hung up, the next small one is answered without waiting for them")
        if all(one.counted is None for one in told):
            result.unproven.append(
                f"if the server has more places than the {scene.concurrency} requests that may be sent at once, only its metrics could show"
                " whether it goes on for clients that have gone, and they do not say"
            )
    elif lead >= _LEAD:
        result.find(_keeps_generating(scene.concurrency, blocked, len(told), idle_s))
    else:
        said = f"in {len(blocked)} of {len(told)} tries that could tell somebody waited long after the hang-ups"
        result.unproven.append(f"{said}: whether the server goes on for clients that have gone stays open; a quieter machine would tell")


async def _hang_up_on_all(scene: Scene, small: Ask, idle_s: float) -> _Try:
    async def timed(ask: Ask) -> tuple[float, Answer]:
        answer = await scene.client.ask(ask)
        return time.monotonic(), answer

    before = await _busy(scene)
    long = [
        scene.ask(filler(24, scene.draw).lstrip(), tokens=48, max_tokens=_LONG_TOKENS, stream=True, logprobs=False, label="long, hangs up")
        for _ in range(scene.concurrency)
    ]
    ended = await asyncio.gather(*(timed(replace(ask, cancel_after_chunks=_CHUNKS)) for ask in long))
    gone = [answer for _, answer in ended if answer.end is End.CANCELLED and answer.first_s is not None]
    rest_s = median([(answer.total_s - (answer.first_s or 0.0)) / (_CHUNKS - 1) for answer in gone] or [0.0]) * _LONG_TOKENS
    hung_up_s = time.monotonic()
    after = await scene.client.ask(replace(small, label="small request after all hung up"))
    waits = [(_waited_s(answer, end_s, ended), answer) for end_s, answer in ended]
    waited_s, waiter = max([*waits, (after.total_s, after)], key=lambda wait: wait[0])
    patience_s = _patience_s(idle_s, rest_s)
    counted = await _still_counted(scene, before, len(gone), hung_up_s + patience_s) if waited_s < patience_s else None
    return _Try(rest_s, waited_s, counted, waiter)


def _waited_s(answer: Answer, end_s: float, ended: list[tuple[float, Answer]]) -> float:
    """From the last hang-up of another one until `answer` began to come (it never did: until it was given up); 0 where none was before."""
    first_s = end_s - answer.total_s + (answer.total_s if answer.first_s is None else answer.first_s)
    return min((first_s - other_s for other_s, other in ended if other.end is End.CANCELLED and other_s < first_s), default=0.0)


async def _busy(scene: Scene) -> float | None:
    return (await read_metrics(scene.client)).busy() if scene.target.metrics else None


async def _still_counted(scene: Scene, before: float | None, gone: int, until_s: float) -> bool | None:
    """Does the server count at least half of those that hung up as busy, at every look until `until_s`? None: it counts nobody."""
    for look in range(_LOOKS, 0, -1):
        now = await _busy(scene)
        if before is None or now is None or not gone:
            return None
        if now - before < max(1.0, gone / 2):
            return False
        await scene.client.sleep(max(0.0, until_s - time.monotonic()) / look)
    return True


def _keeps_generating(concurrency: int, blocked: list[_Try], told: int, idle_s: float) -> Finding:
    waited_s, rest_s = median([one.waited_s for one in blocked]), median([one.rest_s for one in blocked])
    counted = sum(one.counted is True for one in blocked)
    said = f", and in {counted} the server's metrics went on counting them" if counted else ""
    return Finding(
        "aborts.keeps-generating",
        Grade.HONESTY,
        Confidence.LIKELY,
        "the server goes on generating for clients that hung up",
        f"After {concurrency} long requests hung up, a place was waited for {waited_s:.2f} s (median) in {len(blocked)} of {told} tries"
        f"{said}; idle a small request takes {idle_s:.2f} s, and the long ones would have run for about {rest_s:.2f} s.",
        "Notice the disconnect within a step, also for queued requests.",
        (exhibit(blocked[-1].waiter),),
        ("https://github.com/vllm-project/vllm/issues/54947", "https://github.com/ggml-org/llama.cpp/issues/24496"),
    )


async def _quiet(scene: Scene, small: Ask, idle_s: float, rest_s: float) -> None:
    """Waits as long as those that hung up would have run (`rest_s`, within bounds), and until as many small requests at once as we may send
    are answered quickly: every place is free. Gives up after a while."""
    await scene.client.sleep(min(rest_s, _SETTLE_S))
    for _ in range(_QUIET_TRIES):
        answers = await scene.client.ask_all([small] * scene.concurrency)
        if max(answer.total_s for answer in answers) < max(0.05, 2 * scene.concurrency * idle_s):
            return
        await asyncio.sleep(0.25)


async def _pages_come_back(scene: Scene, result: ProbeResult, busy_before: float | None, held_before: float | None) -> None:
    """Polls the metrics until nothing runs and no page is held, for a few seconds."""
    began_s = time.monotonic()
    busy = held = None
    while time.monotonic() - began_s < min(_SETTLE_S, scene.client.settings.timeout_s):
        samples = await read_metrics(scene.client)
        busy, held = samples.busy(), samples.held()
        if (busy or 0.0) <= (busy_before or 0.0) and (held or 0.0) <= (held_before or 0.0) + 1e-9:
            break
        await asyncio.sleep(0.25)
    if busy is None and held is None:
        result.unproven.append("the metrics name neither running requests nor held pages as far as this auditor knows")
    elif (busy or 0.0) > (busy_before or 0.0) or (held or 0.0) > (held_before or 0.0) + 1e-9:
        result.find(
            Finding(
                "aborts.pages-lost",
                Grade.LIMIT,
                Confidence.LIKELY,
                "what aborted requests held does not come back",
                f"{time.monotonic() - began_s:.0f} s after the last request the server's metrics count {busy} busy"
                f" requests (before: {busy_before})"
                f" and {held} held KV (before: {held_before}). If nobody else uses the server, this memory is lost until it restarts.",
                "Every way out of a request must release its pages exactly once.",
                sources=("https://github.com/vllm-project/vllm/pull/41269",),
            )
        )
    else:
        result.proved.append("by the server's metrics all requests are gone and their pages came back")


PROBE = Probe("aborts", "Aborts: hanging up disturbs nobody and gives everything back", cost, run)
