"""Limits: is the advertised context real, and is what goes over it refused?

Sends prompts just under, at, just over and far over the limit, between pool and context, as streams and not, to both endpoints. Expected is
an answer or a 4xx that names the limit. Silent truncation is found three ways: a prompt count that is too small, a planted fact that
cannot be recalled, and an answer whose logprobs do not move when a far part of the prompt changes. The last needs no clever model: bits
that do not depend on a part of the prompt were computed without it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from kvseal.audit.backoff import TurnedAway
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Cost, Depth, Probe, Scene, exhibit, hung
from kvseal.audit.probes.limit_findings import found_accepted, found_truncation, judge_failure, judge_inside, say_served, short_count
from kvseal.audit.probes.patience import MOST_ASKS, ask_patiently
from kvseal.audit.probes.truncation import CONTROL_TOKENS, whole_prompt_is_read
from kvseal.audit.target import Target, name_of, numbers_in
from kvseal.audit.wire import Answer, End

ASSUMED_CONTEXT_TOKENS = 8_192
LEAST_CONTEXT_TOKENS = 64
_SMALL_TOKENS = 64
_FAR_FACTOR = 4
_FAR_TOKENS = 600_000  # Far-over prompts stop here: more text is a test of the HTTP server, not of the engine.
MOST_PROMPT_TOKENS = 4_000_000
"""No longer prompt is ever made: a server may promise any number."""


def cost(target: Target, depth: Depth, concurrency: int) -> Cost:
    limit = target.context_tokens or ASSUMED_CONTEXT_TOKENS
    kinds = max(1, len(target.kinds))
    over = 2 * kinds  # As stream and not.
    refused = Cost(3 * over, over * (2 * limit + limit // 20 + _far(limit) + 64))  # Between, just over, and far over.
    within = 2 * 2 * kinds + 6  # Both totals, as stream and not; and the long prompt, changed and not.
    inside = Cost(within, within * limit)
    silent = Cost(3 * MOST_ASKS, 6 * limit)  # At most one prompt in each of three places is silent.
    control = Cost(5, 5 * (CONTROL_TOKENS + 16))
    return refused + inside + silent + control + Cost(4, 4 * (_SMALL_TOKENS + 8))


async def run(scene: Scene, result: ProbeResult) -> None:
    if scene.target.context_tokens is None:
        await _learn_limit(scene, result)
    limit = scene.target.context_tokens
    if limit is None:
        result.unproven.append("no context length is advertised or named in an error, so limits could not be tested: give --context")
        return
    gauge = scene.target.gauge
    if not gauge.known:
        result.unproven.append("the server counts tokens nowhere, so prompts could not be sized to the limit")
        return
    if limit < LEAST_CONTEXT_TOKENS + (0 if gauge.exact else gauge.slack(limit)):
        result.unproven.append(f"{scene.target.said_by} promises {limit} tokens: prompts so short cannot be sized to the limit")
        return
    if still := " and ".join(name_of(chat) for chat in scene.target.kinds if chat not in scene.target.streamed):
        result.unproven.append(f"streams do not work for {still}, so prompts at and over the limit were sent there without streaming only")
    await _measure_pace(scene)
    try:
        counts_ok = await _inside(scene, result, limit)
        await _between(scene, result, limit)
        await _over(scene, result, limit)
        if counts_ok and _fits(scene, result, limit):
            await whole_prompt_is_read(scene, result, limit)
    except TurnedAway as refused:
        if refused.answer.status == 503 and scene.alone_s:
            _found_takes_server(scene, result, refused.answer)
        raise
    await _alive(scene, result)


def _fits(scene: Scene, result: ProbeResult, tokens: int, *, booked: bool = True) -> bool:
    """May a prompt of `tokens` be made and sent? If not, the result says why, once for each reason. What is refused costs no tokens, so a
    prompt over the limit is not `booked`."""
    if tokens > MOST_PROMPT_TOKENS:
        why = f"prompts of {tokens} tokens are longer than any that an audit sends ({MOST_PROMPT_TOKENS})"
    elif booked and not scene.client.budget.affords(tokens + 8):
        why = f"prompts of about {tokens} tokens do not fit in what is left of the budget; raise it with --budget tokens=N"
    else:
        return True
    result.unproven += [] if why in result.unproven else [why]
    return False


def _far(limit: int) -> int:
    return min(_FAR_FACTOR * limit, max(2 * limit, min(limit + _FAR_TOKENS, _FAR_TOKENS)), MOST_PROMPT_TOKENS)


def _text(scene: Scene, tokens: int, chat: bool) -> str:
    return scene.target.gauge.text(tokens, scene.draw, chat=chat)


async def _measure_pace(scene: Scene) -> None:
    """How long a small prompt takes on the idle server; stays 0 where it is not answered."""
    chat = scene.target.plain
    first = await scene.client.ask(scene.ask(_text(scene, 32, chat), tokens=32, max_tokens=4, label="small prompt before"))
    scene.alone_s = max(scene.alone_s, first.total_s if first.ok else 0.0)


async def _learn_limit(scene: Scene, result: ProbeResult) -> None:
    """Sends ever longer prompts until the server names its limit in an error."""
    for tokens in (6_000, 24_000, 100_000, 400_000):
        answer = await scene.client.ask(
            scene.ask(_text(scene, tokens, scene.target.plain), tokens=tokens, max_tokens=1, label="looking for the limit")
        )
        if answer.end is End.REFUSED and 400 <= answer.status < 500:
            near = [n for n in numbers_in(answer.error_message) if 64 <= n < tokens]
            if near:
                scene.target.context_tokens, scene.target.said_by = max(near), "the text of its refusal"
                return
            result.unproven.append(f"a prompt of {tokens} tokens was refused without naming a limit")
            return
        if not answer.ok:
            result.unproven.append(f"a prompt of {tokens} tokens ended as {answer.end.value} (status {answer.status})")
            return
        if short_count(scene, answer, tokens):
            found_truncation(result, answer, tokens)
            return


def _ways(scene: Scene) -> list[tuple[bool, bool]]:
    """The values of `Ask.stream` and `Ask.chat` to try: without streaming first, so that a stream that hangs hides nothing else."""
    return [(stream, chat) for stream, chat in product((False, True), scene.target.kinds) if not stream or chat in scene.target.streamed]


async def _inside(scene: Scene, result: ProbeResult, limit: int) -> bool:
    """Prompt plus output of limit-1 and of exactly limit must work, as streams and not, and be counted as sent. False: the counts cannot be
    trusted."""
    judged: list[tuple[Answer, bool]] = []
    for (stream, chat), total in product(_ways(scene), (limit - 1, limit)):
        if not _fits(scene, result, limit):
            break
        tokens = total - 1 - (0 if scene.target.gauge.exact else scene.target.gauge.slack(total))
        label = f"prompt of {tokens}, {total} with output"
        ask = scene.ask(_text(scene, tokens, chat), tokens=tokens, max_tokens=1, chat=chat, stream=stream, label=label)
        patient = await ask_patiently(scene, ask, tokens)
        scene.listen([patient.answer], result)
        judged.append((patient.answer, judge_inside(scene, result, patient, limit, tokens)))
        if hung(patient.answer):  # Each further one would take the whole time limit, and hold the server.
            break
    say_served(result, judged, limit)
    return not any(answer.ok and short_count(scene, answer, answer.ask.prompt_tokens) for answer, _ in judged)


async def _between(scene: Scene, result: ProbeResult, limit: int) -> None:
    """Between the pool and the context: the incident that this auditor was made for."""
    pool = scene.target.pool_tokens
    if pool is None:
        result.unproven.append("the size of the KV pool is not published, so a pool smaller than the context could not be aimed at")
        return
    if pool >= limit:
        result.proved.append(f"the KV pool ({pool} tokens) is not smaller than the advertised context ({limit})")
        return
    result.find(
        Finding(
            "limits.pool-below-context",
            Grade.LIMIT,
            Confidence.SUSPECTED if scene.target.said_by == "--context" else Confidence.PROVEN,
            "the advertised context is larger than the KV pool",
            f"{scene.target.said_by} promises {limit} tokens; {scene.target.pool_said_by} says that the pool holds"
            f" {pool}. No request of the"
            " promised length can ever be computed.",
            "Lower the context (or enlarge the pool) until the pool holds one request of the advertised length.",
            sources=("https://github.com/sgl-project/sglang/issues/30233", "https://github.com/vllm-project/vllm/issues/39734"),
        )
    )
    tokens = (pool + limit) // 2
    if not scene.target.gauge.exact and tokens - scene.target.gauge.slack(tokens) <= pool:
        result.unproven.append("pool and context lie too close for prompts between them, by what is known of how this server counts tokens")
        return
    if not _fits(scene, result, tokens, booked=False):
        return
    for stream, chat in _ways(scene):
        ask = scene.ask(_text(scene, tokens, chat), tokens=tokens, max_tokens=1, chat=chat, stream=stream, label="between pool and context")
        patient = await ask_patiently(scene, replace(ask, prompt_tokens=0), tokens)
        patient.answer.ask = ask
        scene.listen([patient.answer], result)
        if patient.answer.ok:
            found_accepted(scene, result, patient.answer, tokens, pool, "the KV pool")
        else:
            judge_failure(scene, result, patient, pool, inside=False)
            if hung(patient.answer):
                return


async def _over(scene: Scene, result: ProbeResult, limit: int) -> None:
    """Over the limit by one, and by far: refused with a 4xx that names the limit, or it is a finding."""
    refused = 0
    slack = 0 if scene.target.gauge.exact else scene.target.gauge.slack(limit)
    for tokens in (limit + 1 + slack, max(limit + 1 + slack, _far(limit))):
        if not _fits(scene, result, tokens, booked=False):
            return
        for stream, chat in _ways(scene):
            label = f"over the limit of {limit}"
            ask = scene.ask(_text(scene, tokens, chat), tokens=tokens, max_tokens=8, chat=chat, stream=stream, label=label)
            patient = await ask_patiently(scene, replace(ask, prompt_tokens=0), tokens)  # A refusal costs no tokens: do not book them.
            answer = patient.answer
            answer.ask = ask
            scene.listen([answer], result)
            if answer.ok:
                found_accepted(scene, result, answer, tokens, limit, "the advertised context")
                continue
            judge_failure(scene, result, patient, limit, inside=False)
            refused += 400 <= answer.status < 500
            if hung(answer):
                return
    if refused and not result.findings:
        result.proved.append(f"{refused} prompts over the limit were refused with a 4xx, none was answered")


async def _alive(scene: Scene, result: ProbeResult) -> None:
    """After all that, a small prompt must still be answered."""
    ask = scene.ask(_text(scene, _SMALL_TOKENS, scene.target.plain), tokens=_SMALL_TOKENS, label="small prompt after")
    answer = await scene.client.ask(ask)
    if hung(answer):  # A machine that has no time for a while is no server that hangs for good.
        answer = await scene.client.ask(ask)
    if answer.ok:
        result.proved.append("a small prompt is still answered after the oversize ones")
    elif hung(answer) or answer.end is End.CUT or answer.status >= 500:
        _found_takes_server(scene, result, answer)


def _found_takes_server(scene: Scene, result: ProbeResult, answer: Answer) -> None:
    """`answer` is what a small prompt got afterwards."""
    result.find(
        Finding(
            "limits.hang-takes-server",
            Grade.HANG,
            Confidence.PROVEN,
            "after prompts at and over the limit, small ones are not answered either",
            f"A small prompt ended as {answer.end.value}, status {answer.status} ({answer.note or answer.error_message[:160]});"
            f" before, it took {scene.alone_s:.2f} s.",
            "One request that cannot fit must not stop the others.",
            (exhibit(answer),),
            ("https://github.com/vllm-project/vllm/issues/39734",),
        )
    )


PROBE = Probe("limits", "Limits: the advertised context is real, and what goes over it is refused", cost, run)
