"""Cross-request leak: does one request's text, or its very answer, come out of another?

Two independent oracles. Canaries: unguessable sentences that tenant A sends and that nobody else may ever hear, searched in every output,
logprob alternative and error message. Known answers: greedy prompts are asked on the quiet server first; later, beside and after other
people's requests, each must get its own answer again (never that of another, never one that depends on others beyond numerics).
Needs no clever model: a cache that holds another's tokens changes the bits of an answer, whatever the model makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvseal.audit.compare import LEAST_MOVE, Difference, Kind, blind_spot, compare, largest_move, sureness
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Cost, Depth, Probe, Scene, exhibit
from kvseal.audit.prompts import filler
from kvseal.audit.statistics import zero_upper_bound
from kvseal.audit.target import Target
from kvseal.audit.wire import Answer, Ask

_WORDS = 160  # Of a planting prompt, when the pool is not known.
_MOST_WORDS = 1_000
_OUTPUT_TOKENS = 24
_WHY = " Small moves can come of the shape of a batch; large ones come of foreign, missing or stale KV."
_CUES = (
    "The code words are",
    "Remember the code words:",
    "one two three",
    "Hello",
    "The code words are these, in the order in which they were given:",
    "a",
)


def cost(target: Target, depth: Depth, concurrency: int) -> Cost:
    rounds, sessions = _rounds(depth), _sessions(concurrency)
    known = len(_CUES) + concurrency
    requests = 3 * known + rounds * (2 * sessions + 2 * known + 6)
    return Cost(
        requests, rounds * 2 * sessions * (_plant_words(target, concurrency) + 40 + _OUTPUT_TOKENS) + requests * (100 + _OUTPUT_TOKENS)
    )


def _rounds(depth: Depth) -> int:
    return 2 * int(depth)


def _sessions(concurrency: int) -> int:
    return max(4, min(16, 2 * concurrency))


def _plant_words(target: Target, concurrency: int) -> int:
    """Long enough that what runs at once overfills the pool one and a half times, within reason: every second request in flight plants."""
    wanted = _WORDS if target.pool_tokens is None else int(3 * target.pool_tokens / concurrency)
    limit = min((*target.limits(), 1 << 30))
    return max(48, min(wanted, _MOST_WORDS, limit - 144))  # Canary words may be several tokens, and a template comes on top.


@dataclass(slots=True)
class _Known:
    """A prompt and its answer on the quiet server. `steady` is False when the server itself does not repeat it alone; `moved` then says by
    how much the logprobs of one and the same position differ (None: nobody knows)."""

    ask: Ask
    alone: Answer
    again: Answer
    steady: bool = True
    moved: float | None = None


async def run(scene: Scene, result: ProbeResult) -> None:
    known = await known_answers(scene, result, _CUES, scene.concurrency)
    if not known:
        result.unproven.append("no small prompt was answered twice on the quiet server, so nothing could be compared")
        return
    _judge_unsteady(result, known)
    heard = compared = 0
    try:
        for _ in range(_rounds(scene.depth)):
            asks, answers = await _crowd(scene, known)
            heard += sum(answer.ok for answer in answers)
            scene.listen(answers, result)
            compared += _judge(scene, result, known, asks, answers, beside=True)
            after, late = await _afterwards(scene, known)
            heard += sum(answer.ok for answer in late)
            scene.listen(late, result)
            compared += _judge(scene, result, known, after, late, beside=False)
            if any(finding.grade is Grade.LEAK for finding in result.findings):
                break
    finally:  # A budget that ends in the middle takes away nothing of what was shown before.
        _conclude(scene, result, known, heard, compared)


def _conclude(scene: Scene, result: ProbeResult, known: list[_Known], heard: int, compared: int) -> None:
    if heard and not result.findings:
        result.proved.append(
            f"{heard} answers beside and after {len(scene.aviary.canaries)} planted canaries held none of them (a leak in more than"
            f" {100 * zero_upper_bound(heard):.1f} % of such answers would have shown, 95 % sure)"
        )
        if compared:
            result.proved.append(
                f"{compared} greedy answers beside and after others were those of the quiet server (noise floor {scene.floor:.3g} nats)"
            )
    if not scene.target.logprobs.get(scene.target.plain):
        result.unproven.append("the server gives no logprobs, so a foreign token that was likely but not chosen could not be seen")
    result.unproven += blind_spot(scene.floor)
    unsteady = sum(not one.steady for one in known)
    if unsteady:
        result.unproven.append(
            f"{unsteady} of {len(known)} prompts are not repeated by the server even alone, and could not serve as known answers"
        )
    result.unproven.append(
        "a leak that only shows at higher load than this audit was allowed, or only to a cleverer reading of logprobs, would be missed"
    )


async def known_answers(scene: Scene, result: ProbeResult, cues: tuple[str, ...], others: int) -> list[_Known]:
    """Answers of the quiet server, each asked twice: `cues`, and `others` short random prompts. Also sets the floor of noise."""
    known: list[_Known] = []
    prompts = [*cues, *(filler(6 + 5 * index, scene.draw).lstrip() for index in range(others))]
    for index, prompt in enumerate(prompts):
        chat = scene.target.kinds[index % len(scene.target.kinds)]
        ask = scene.ask(prompt, tokens=64, max_tokens=_OUTPUT_TOKENS, chat=chat, label="known prompt, alone")
        ask = replace(ask, tenant=scene.other_tenant(0))
        first, second = await scene.client.ask(ask), await scene.client.ask(ask)
        if not first.ok or not second.ok:
            continue
        scene.alone_s = max(scene.alone_s, first.total_s)
        difference = compare(first, second)
        if difference.kind is Kind.DIFFERENT:  # Perhaps only the first one is odd (cold): the reuse probe looks into that.
            first, second = second, await scene.client.ask(ask)
            difference = compare(first, second) if second.ok else difference
        steady = difference.kind in (Kind.SAME, Kind.NUMERICS)
        known.append(_Known(ask, first, second, steady, None if steady else largest_move(first, second)))
        if (move := largest_move(first, second)) is not None and difference.kind is not Kind.DIFFERENT:
            scene.floor = max(scene.floor, move)
    return known


async def _crowd(scene: Scene, known: list[_Known]) -> tuple[list[Ask], list[Answer]]:
    """Everything at once: tenant A's sessions with canaries, and the known prompts of tenant B between them."""
    asks: list[Ask] = []
    planting = [_plant(scene, number) for number in range(_sessions(scene.concurrency))]
    listening = [replace(one.ask, label="known prompt, in the crowd", stream=index % 2 == 1) for index, one in enumerate(known)]
    for index in range(max(len(planting), len(listening))):
        asks += planting[index : index + 1] + listening[index : index + 1]
    return asks, await scene.client.ask_all(asks)


def _plant(scene: Scene, number: int, stream: bool = False) -> Ask:
    """A session of tenant A: a canary said again and again, and the cue to say it once more."""
    canary = scene.aviary.new(f"tenant A, session {number}")
    said = f"The code words are {canary.text}. "
    words = _plant_words(scene.target, scene.concurrency)
    between = filler(max(8, words // 4 - 12), scene.draw).lstrip() + ". "
    prompt = (said + between) * 4 + "The code words are"
    chat = scene.target.kinds[number % len(scene.target.kinds)]
    return scene.ask(prompt, tokens=words + 40, max_tokens=_OUTPUT_TOKENS, chat=chat, label="plants a canary", stream=stream)


async def _afterwards(scene: Scene, known: list[_Known]) -> tuple[list[Ask], list[Answer]]:
    """One after the other: long prompt of A, then a tiny one of B in what may be the same slot; A aborted, B at once; A over the limit."""
    asks: list[Ask] = []
    answers: list[Answer] = []
    for index, one in enumerate(known):
        before = _plant(scene, index, stream=True) if index < 3 else None
        if before is not None and index == 1:
            before = replace(before, cancel_after_chunks=2, label="plants a canary, hangs up")
        if before is not None and index == 2 and (limit := scene.target.context_tokens) is not None and limit <= 40_000:
            long = scene.target.gauge.text(limit + 64, scene.draw, chat=before.chat)
            before = replace(
                before, prompt=f"{before.prompt} {long}", max_tokens=4, prompt_tokens=0, label="plants a canary, over the limit"
            )
        if before is not None:
            asks.append(before)
            answers.append(await scene.client.ask(before))
        ask = replace(one.ask, label="known prompt, afterwards")
        asks.append(ask)
        answers.append(await scene.client.ask(ask))
    return asks, answers


def _judge(scene: Scene, result: ProbeResult, known: list[_Known], asks: list[Ask], answers: list[Answer], *, beside: bool) -> int:
    """Each known prompt must have got its own answer; returns how many were compared."""
    own = {(one.ask.prompt, one.ask.chat): one for one in known}
    compared: list[tuple[Answer, _Known, Difference]] = []
    for ask, answer in zip(asks, answers, strict=True):
        one = own.get((ask.prompt, ask.chat))
        if one is None or not answer.ok or not one.steady:
            continue
        compared.append((answer, one, compare(one.alone, answer, scene.floor)))
    for answer, _one, difference in compared:
        if difference.kind in (Kind.DIFFERENT, Kind.UNKNOWN) and (other := _whose(answer, own)) is not None:
            result.find(_wrong_row(answer, other))
    broken = [entry for entry in compared if entry[2].kind is Kind.DIFFERENT]
    if broken:
        answer, one, difference = broken[0]
        when = "beside" if beside else "after"
        result.find(
            Finding(
                f"leak.changed-{when}-others",
                Grade.CORRUPTION,
                sureness([entry[2] for entry in broken], scene.floor),
                f"an answer depends on what was asked {when} it",
                f"{len(broken)} of {len(compared)} known prompts got another answer {when} other people's requests than"
                " on the quiet server:"
                f" {difference} (noise floor {scene.floor:.3g} nats).{_WHY}",
                "Look for reuse before clearing, wrong row, missing fences.",
                (exhibit(one.alone, "on the quiet server"), exhibit(answer, f"{when} others")),
            )
        )
    unknown = [entry for entry in compared if entry[2].kind is Kind.UNKNOWN]
    if len(unknown) > 1 and len(unknown) >= len(compared) / 2:
        answer, one, _ = unknown[0]
        result.find(
            Finding(
                f"leak.changed-{'beside' if beside else 'after'}-others",
                Grade.CORRUPTION,
                Confidence.SUSPECTED,
                "answers change beside others, and the server gives no logprobs to say why",
                f"{len(unknown)} of {len(compared)} known prompts got another text than on the quiet server.",
                "Audit again with logprobs enabled.",
                (exhibit(one.alone, "on the quiet server"), exhibit(answer)),
            )
        )
    return len(compared)


def _judge_unsteady(result: ProbeResult, known: list[_Known]) -> None:
    """A quiet server that gives other logprobs for one prompt each time reads something besides the prompt. (Mere sampling does not: the
    token differs then, but what each token was worth does not.)"""
    moved = [one for one in known if not one.steady and one.moved is not None and one.moved > 2 * LEAST_MOVE]
    if len(moved) > 1 and 2 * len(moved) >= len(known):
        worst = max(moved, key=lambda one: one.moved or 0.0)
        result.find(
            Finding(
                "leak.unsteady-alone",
                Grade.CORRUPTION,
                Confidence.LIKELY,
                "the quiet server does not repeat its own answers",
                f"{len(moved)} of {len(known)} greedy prompts, asked three times with nothing else running, got"
                " logprobs that differ by up to"
                f" {worst.moved:.3g} nats at one and the same position. Something besides the prompt goes into the answer.",
                "Look for stale cache contents that are read past the end of a sequence.",
                (exhibit(worst.alone, "once"), exhibit(worst.again, "again")),
                ("https://github.com/waybarrios/vllm-mlx/pull/385",),
            )
        )


def _whose(answer: Answer, own: dict[tuple[str | tuple[int, ...], bool], _Known]) -> _Known | None:
    """The other known prompt whose quiet answer this is, if it is long enough to be no accident."""
    key = (answer.ask.prompt, answer.ask.chat)
    mine = own[key].alone.text
    for other_key, other in own.items():
        text = other.alone.text
        if other_key != key and len(text) >= 16 and text != mine and answer.text == text and not mine.startswith(text[:16]):
            return other
    return None


def _wrong_row(answer: Answer, other: _Known) -> Finding:
    return Finding(
        "leak.wrong-row",
        Grade.LEAK,
        Confidence.PROVEN,
        "a request got the answer of another request",
        f"The answer to one prompt is, letter for letter, what the quiet server answers to another one ({len(answer.text)} characters).",
        "Look at which row of the batch is given to which request, and at caches of whole answers.",
        (exhibit(answer, "the answer received"), exhibit(other.alone, "whose answer it is")),
        ("https://github.com/tenstorrent/tt-xla/pull/4190", "https://github.com/vllm-project/vllm/issues/13408"),
    )


PROBE = Probe("leak", "Leak: nobody hears anybody else's canary or answer", cost, run)
