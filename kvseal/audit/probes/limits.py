"""Limits: is the advertised context real, and is what goes over it refused?

Sends prompts just under, at, just over and far over the limit, between pool and context, as streams and not, to both endpoints. Expected is
an answer or a 4xx that names the limit. Silent truncation is found three ways: a prompt count that is too small, a planted fact that
cannot be recalled, and an answer whose logprobs do not move when a far part of the prompt changes. The last needs no clever model: bits
that do not depend on a part of the prompt were computed without it.
"""

from __future__ import annotations

from dataclasses import replace

from kvseal.audit.compare import largest_move
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Cost, Depth, Probe, Scene, exhibit, hung
from kvseal.audit.prompts import filler
from kvseal.audit.target import Target, numbers_in
from kvseal.audit.wire import Answer, End

ASSUMED_CONTEXT_TOKENS = 8_192
_FAR_FACTOR = 4
_MOST_PROMPT_TOKENS = 600_000  # Far-over prompts stop here: more text is a test of the HTTP server, not of the engine.
_CONTROL_TOKENS = 256
_PLACES = ("start", "middle", "end")


def cost(target: Target, depth: Depth, concurrency: int) -> Cost:
    limit = target.context_tokens or ASSUMED_CONTEXT_TOKENS
    kinds = max(1, len(target.kinds))
    over = 4 * 2 * kinds  # Over, far over, and between, as stream and not.
    refused = Cost(over, over // 4 * (limit + 1 + 2 * _far(limit)))
    inside = Cost(3 * kinds + 6, (3 * kinds + 6) * limit)
    return refused + inside + Cost(8, 8 * (_CONTROL_TOKENS + 16)) + Cost(8, 64)


async def run(scene: Scene, result: ProbeResult) -> None:
    if scene.target.context_tokens is None:
        await _learn_limit(scene, result)
    limit = scene.target.context_tokens
    if limit is None:
        result.unproven.append("no context length is advertised or named in an error, so limits could not be tested: give --context")
        return
    if not scene.target.gauge.known:
        result.unproven.append("the server counts tokens nowhere, so prompts could not be sized to the limit")
        return
    small = await scene.client.ask(scene.ask(_text(scene, 64, False), tokens=64, label="small prompt before"))
    scene.alone_s = max(scene.alone_s, small.total_s)
    counts_ok = await _inside(scene, result, limit)
    await _between(scene, result, limit)
    await _over(scene, result, limit)
    if counts_ok:
        await _whole_prompt_is_read(scene, result, limit)
    await _alive(scene, result)


def _far(limit: int) -> int:
    return min(_FAR_FACTOR * limit, max(2 * limit, min(limit + _MOST_PROMPT_TOKENS, _MOST_PROMPT_TOKENS)))


def _text(scene: Scene, tokens: int, chat: bool) -> str:
    return scene.target.gauge.text(tokens, scene.draw, chat=chat)


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
        if _short_count(scene, answer, tokens):
            _found_truncation(result, answer, tokens)
            return


async def _inside(scene: Scene, result: ProbeResult, limit: int) -> bool:
    """Prompt plus output of limit-1 and of exactly limit must work, and be counted as sent. False: the counts cannot be trusted."""
    good = True
    served = 0
    for chat in scene.target.kinds:
        for total in (limit - 1, limit):
            tokens = total - 1 - (0 if scene.target.gauge.exact else scene.target.gauge.slack(total))
            ask = scene.ask(
                _text(scene, tokens, chat), tokens=tokens, max_tokens=1, chat=chat, label=f"prompt of {tokens}, {total} with output"
            )
            answer = await scene.client.ask(ask)
            scene.listen([answer], result)
            if answer.ok and _short_count(scene, answer, tokens):
                _found_truncation(result, answer, tokens)
                good = False
            elif answer.ok:
                served += 1
            elif not _refused_near(scene, answer, limit, 16):
                _judge_failure(scene, result, answer, limit, inside=True)
    if served:
        result.proved.append(f"prompts of the advertised length ({limit} tokens with the output) are answered and counted in full")
    return good


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
            Confidence.PROVEN,
            "the advertised context is larger than the KV pool",
            f"{scene.target.said_by} promises {limit} tokens; {scene.target.pool_said_by} says that the pool holds"
            f" {pool}. No request of the"
            " promised length can ever be computed.",
            "Lower the context (or enlarge the pool) until the pool holds one request of the advertised length.",
            sources=("https://github.com/sgl-project/sglang/issues/30233", "https://github.com/vllm-project/vllm/issues/39734"),
        )
    )
    tokens = (pool + limit) // 2
    for stream in (False, True):
        ask = scene.ask(
            _text(scene, tokens, scene.target.plain), tokens=tokens, max_tokens=1, stream=stream, label="between pool and context"
        )
        answer = await scene.client.ask(ask)
        scene.listen([answer], result)
        if answer.ok:
            _found_accepted(scene, result, answer, tokens, pool, "the KV pool")
        else:
            _judge_failure(scene, result, answer, pool, inside=False)


async def _over(scene: Scene, result: ProbeResult, limit: int) -> None:
    """Over the limit by one, and by far: refused with a 4xx that names the limit, or it is a finding."""
    refused = 0
    slack = 0 if scene.target.gauge.exact else scene.target.gauge.slack(limit)
    for tokens in (limit + 1 + slack, _far(limit)):
        for chat in scene.target.kinds:
            for stream in (False, True):
                label = f"over the limit of {limit}"
                ask = scene.ask(_text(scene, tokens, chat), tokens=tokens, max_tokens=8, chat=chat, stream=stream, label=label)
                answer = await scene.client.ask(replace(ask, prompt_tokens=0))  # A refusal costs no tokens: do not book them.
                answer.ask = ask
                scene.listen([answer], result)
                if answer.ok:
                    _found_accepted(scene, result, answer, tokens, limit, "the advertised context")
                elif hung(answer):
                    _judge_failure(scene, result, answer, limit, inside=False)
                    return  # Each further one would take the whole time limit, and hold the server.
                else:
                    _judge_failure(scene, result, answer, limit, inside=False)
                    refused += 400 <= answer.status < 500
    if refused and not result.findings:
        result.proved.append(f"{refused} prompts over the limit were refused with a 4xx, none was answered")


def _judge_failure(scene: Scene, result: ProbeResult, answer: Answer, limit: int, *, inside: bool) -> None:
    where = "at" if inside else "over"
    tokens = answer.ask.prompt_tokens
    if hung(answer):
        result.find(
            Finding(
                "limits.hang",
                Grade.HANG,
                Confidence.LIKELY,
                f"a prompt {where} the limit is never answered",
                f"{tokens} prompt tokens against a limit of {limit}: nothing came within"
                f" {scene.client.settings.timeout_s:g} s (a small prompt"
                f" takes {scene.alone_s:.2f} s).",
                "Refuse at admission what can never fit; a request must not wait for room that cannot come.",
                (exhibit(answer),),
                ("https://github.com/vllm-project/vllm/issues/35541",),
            )
        )
    elif answer.status >= 500:
        result.find(
            Finding(
                "limits.server-error",
                Grade.LIMIT,
                Confidence.PROVEN,
                f"a prompt {where} the limit gives {answer.status}",
                f"{tokens} prompt tokens against a limit of {limit} gave {answer.status}. Clients and routers retry a"
                " 5xx; a limit is a 4xx.",
                "Answer 400 with both numbers.",
                (exhibit(answer),),
                ("https://github.com/ikawrakow/ik_llama.cpp/pull/2420",),
            )
        )
    elif answer.error_in_stream and answer.status == 200:
        result.find(
            Finding(
                "limits.late-refusal",
                Grade.HONESTY,
                Confidence.PROVEN,
                "a refusal comes inside a stream that began with status 200",
                f"{tokens} prompt tokens against a limit of {limit}: status 200, then an error event.",
                "Validate and admit before the first byte, so that a refusal is a 4xx.",
                (exhibit(answer),),
            )
        )
    elif answer.end in (End.CUT, End.MALFORMED, End.OVERSIZE):
        result.find(
            Finding(
                "limits.broken-answer",
                Grade.LIMIT,
                Confidence.PROVEN,
                f"a prompt {where} the limit breaks the connection or the answer",
                f"{tokens} prompt tokens against a limit of {limit}: {answer.end.value}, {answer.note}.",
                "Refuse with a 4xx and an error body.",
                (exhibit(answer),),
            )
        )
    elif inside and 400 <= answer.status < 500:
        result.find(
            Finding(
                "limits.advertised-not-servable",
                Grade.LIMIT,
                Confidence.PROVEN if scene.target.gauge.exact else Confidence.LIKELY,
                "a prompt of the advertised length is refused",
                f"{scene.target.said_by} promises {limit} tokens, yet {tokens} prompt tokens with max_tokens {answer.ask.max_tokens} were"
                f" refused: {answer.error_message[:200]!r}.",
                "Advertise what can be served.",
                (exhibit(answer),),
                ("https://github.com/sgl-project/sglang/issues/4048",),
            )
        )
    elif 400 <= answer.status < 500 and answer.status not in (413, 429) and not _names_limit(scene, answer, limit):
        result.find(
            Finding(
                "limits.unnamed",
                Grade.HONESTY,
                Confidence.PROVEN,
                "the refusal of an oversize prompt does not name the limit",
                f"Status {answer.status} with the message {answer.error_message[:200]!r}.",
                "Name the limit and the size of the request in the message.",
                (exhibit(answer),),
            )
        )


def _names_limit(scene: Scene, answer: Answer, limit: int) -> bool:
    """Does the message hold a number that is one of the limits, within the few tokens that engines keep for themselves?"""
    return any(abs(number - known) <= 16 for number in numbers_in(answer.error_message) for known in (limit, *scene.target.limits()))


def _refused_near(scene: Scene, answer: Answer, limit: int, margin: int) -> bool:
    """A 4xx that names a limit within `margin` of the advertised one: honest enough, engines keep a few tokens for themselves."""
    if answer.end is not End.REFUSED or not 400 <= answer.status < 500:
        return False
    return any(limit - margin <= number < limit for number in numbers_in(answer.error_message))


def _short_count(scene: Scene, answer: Answer, tokens: int) -> bool:
    if answer.prompt_tokens is None:
        return False
    return answer.prompt_tokens < tokens - scene.target.gauge.slack(tokens) - (0 if scene.target.gauge.exact else tokens // 20)


def _found_truncation(result: ProbeResult, answer: Answer, tokens: int) -> None:
    result.find(
        Finding(
            "limits.silent-truncation",
            Grade.LIMIT,
            Confidence.PROVEN,
            "a prompt is cut without a word",
            f"About {tokens} prompt tokens were sent; the answer is a 200 whose usage counts {answer.prompt_tokens}.",
            "Refuse with a 4xx. Truncation is a client's choice, and is then reported in the response.",
            (exhibit(answer),),
            ("https://github.com/ollama/ollama/issues/3839", "https://github.com/JustVugg/colibri/pull/506"),
        )
    )


def _found_accepted(scene: Scene, result: ProbeResult, answer: Answer, tokens: int, limit: int, what: str) -> None:
    if _short_count(scene, answer, tokens):
        _found_truncation(result, answer, tokens)
        return
    if not answer.text and not answer.completion_tokens:
        result.find(
            Finding(
                "limits.empty-answer",
                Grade.LIMIT,
                Confidence.PROVEN,
                "an oversize prompt gets status 200 and no text",
                f"{tokens} prompt tokens against a limit of {limit} ({what}): status 200, finish_reason"
                f" {answer.finish_reason!r}, nothing generated.",
                "A request that was not computed is an error, not an empty answer.",
                (exhibit(answer),),
                ("https://github.com/sgl-project/sglang/issues/33507",),
            )
        )
        return
    result.find(
        Finding(
            "limits.over-limit-accepted",
            Grade.LIMIT,
            Confidence.PROVEN if scene.target.gauge.exact else Confidence.LIKELY,
            f"a prompt over {what} gets status 200",
            f"{tokens} prompt tokens against a limit of {limit}: answered with {answer.completion_tokens} tokens, usage says"
            f" {answer.prompt_tokens} prompt tokens. Either the limit is not what is advertised, or part of the prompt was not read, or the"
            " answer was computed from memory that this request never wrote.",
            "Refuse before anything is reserved.",
            (exhibit(answer),),
            ("https://github.com/sgl-project/sglang/issues/30233",),
        )
    )


async def _whole_prompt_is_read(scene: Scene, result: ProbeResult, limit: int) -> None:
    """Changes the start, the middle and the end of a prompt near the limit; each must change the answer's logprobs."""
    control = await _differential(scene, result, min(_CONTROL_TOKENS, limit // 2))
    if control is None or min(control.moves.values()) <= max(20 * control.floor, 1e-6):
        result.unproven.append("a changed third did not move the answer to a short prompt enough, so the far test would prove nothing")
        return
    tokens = limit - 8 - (0 if scene.target.gauge.exact else scene.target.gauge.slack(limit))
    far = await _differential(scene, result, tokens)
    if far is None:
        result.unproven.append(f"the test prompts of {tokens} tokens were not all answered")
        return
    floor = max(control.floor, far.floor)
    unread = [place for place in _PLACES if far.moves[place] <= 2 * floor]
    read = [far.moves[place] for place in _PLACES if place not in unread]
    if not unread:
        result.proved.append(
            f"start, middle and end of a prompt of {tokens} tokens all change the answer (by {min(far.moves.values()):.3g} nats or more)"
        )
    elif not scene.target.logprobs.get(scene.target.plain):
        result.unproven.append(
            f"changes at {', '.join(unread)} of a prompt of {tokens} tokens left the text as it was; there are no logprobs to look closer"
        )
    elif not read or floor > 0.02 or min(*read, *control.moves.values()) < 20 * floor:
        result.unproven.append(f"changes at {', '.join(unread)} of a prompt of {tokens} tokens stayed within the noise of {floor:.3g} nats")
    else:
        moved = ", ".join(f"{place} {far.moves[place]:.3g}" for place in _PLACES)
        result.find(
            Finding(
                "limits.silent-truncation",
                Grade.LIMIT,
                Confidence.PROVEN if floor == 0.0 else Confidence.LIKELY,
                "part of a prompt is not read",
                f"A prompt of {tokens} tokens (limit {limit}) was changed at its start, middle and end. Largest change"
                " of a logprob, in nats:"
                f" {moved}; noise of this server {floor:.3g}. With {_CONTROL_TOKENS} tokens each change moved the answer by"
                f" {min(control.moves.values()):.3g} or more. The {' and the '.join(unread)} took no part in the"
                " answer, yet usage counts the whole.",
                "Refuse with a 4xx what does not fit.",
                tuple(exhibit(answer) for answer in far.answers[:2]),
                ("https://github.com/ollama/ollama/issues/3839", "https://github.com/ollama/ollama/issues/17427"),
            )
        )


class _Moves:
    """How far a change at each place moved the answer, and how far no change at all did (`floor`)."""

    def __init__(self, moves: dict[str, float], floor: float, answers: list[Answer]) -> None:
        self.moves, self.floor, self.answers = moves, floor, answers


async def _differential(scene: Scene, result: ProbeResult, tokens: int) -> _Moves | None:
    """One base prompt, asked twice, and one variant for each place, with another fact and another third of the filler there. None when an
    answer is missing."""
    gauge, chat = scene.target.gauge, scene.target.plain
    words = gauge.words_for(tokens, chat=chat)
    fact = scene.draw.sample(range(100, 1000), 2)
    cue = " remember this : the number of the house is"
    plain = f"{cue} {fact[0]} ."
    room = max(8, words - 4 * len(plain.split()) - len(cue.split()) - 24)  # Numbers take more than a token.
    parts, others = ([filler(room // 3, scene.draw) for _ in _PLACES] for _ in range(2))
    answers: dict[str, Answer] = {}
    for place in ("base", "again", *_PLACES):
        changed = [place == name for name in _PLACES]
        facts = [f"{cue} {fact[1]} ." if change else plain for change in changed]
        texts = [other if change else part for part, other, change in zip(parts, others, changed, strict=True)]
        prompt = (facts[0] + texts[0] + facts[1] + texts[1] + texts[2] + facts[2] + cue).lstrip()
        label = f"changed at {place}" if place in _PLACES else "unchanged"
        ask = scene.ask(prompt, tokens=tokens, max_tokens=4, chat=chat, label=label)
        answers[place] = await scene.client.ask(ask)
    scene.listen(list(answers.values()), result)
    if not all(answer.ok for answer in answers.values()):
        return None
    known = {name: _moved(answers["base"], answer) for name, answer in answers.items() if name != "base"}
    return _Moves({place: known[place] for place in _PLACES}, known["again"], [answers[place] for place in ("base", *_PLACES)])


def _moved(base: Answer, answer: Answer) -> float:
    """How far the answer moved, in nats; without logprobs a changed text counts as far, and the same text as not at all."""
    move = largest_move(base, answer)
    if move is None:
        return 10.0 if base.text != answer.text else 0.0
    return move


async def _alive(scene: Scene, result: ProbeResult) -> None:
    """After all that, a small prompt must still be answered."""
    answer = await scene.client.ask(scene.ask(_text(scene, 64, scene.target.plain), tokens=64, label="small prompt after"))
    if answer.ok:
        result.proved.append("a small prompt is still answered after the oversize ones")
    elif hung(answer) or answer.end is End.CUT:
        result.find(
            Finding(
                "limits.hang-takes-server",
                Grade.HANG,
                Confidence.PROVEN,
                "after prompts at and over the limit, small ones are not answered either",
                f"A prompt of 64 tokens ended as {answer.end.value} ({answer.note}); before, it took {scene.alone_s:.2f} s.",
                "One request that cannot fit must not stop the others.",
                (exhibit(answer),),
                ("https://github.com/vllm-project/vllm/issues/39734",),
            )
        )


PROBE = Probe("limits", "Limits: the advertised context is real, and what goes over it is refused", cost, run)
