"""What is wrong with an answer to a prompt at or over the limit: the findings of the limits probe.

Owns their wording and when each is due, and what may be claimed of those that were served. Asks nothing.
"""

from __future__ import annotations

from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Scene, exhibit, hung
from kvseal.audit.probes.patience import Patient
from kvseal.audit.target import numbers_in
from kvseal.audit.wire import Answer, End

_KEPT_TOKENS = 16
"""Engines keep a few tokens of the context for themselves."""


def judge_inside(scene: Scene, result: ProbeResult, patient: Patient, limit: int, tokens: int) -> bool:
    """Records what is wrong with the answer to a prompt of `tokens` that is within the limit. True when nothing is: it was served whole, or
    refused for one of the few tokens that engines keep for themselves."""
    answer = patient.answer
    if answer.ok and short_count(scene, answer, tokens):
        found_truncation(result, answer, tokens)
    elif answer.ok and _empty(answer):
        _found_empty(result, answer, tokens, limit, "the advertised context", over=False)
    elif answer.ok and _without_end(scene, answer):
        why = f"the stream gave finish_reason {answer.finish_reason!r} and stopped without [DONE], which other streams of this server say"
        result.find(_broken(answer, "at", f"{tokens} prompt tokens against a limit of {limit}: {why}."))
    elif answer.ok or _refused_near(answer, limit):
        return True
    else:
        judge_failure(scene, result, patient, limit, inside=True)
    return False


def say_served(result: ProbeResult, judged: list[tuple[Answer, bool]], limit: int) -> None:
    """What the prompts at the limit prove, each way apart; counted in full is only what the server did count."""
    counted = []
    for stream, how in ((False, "without streaming"), (True, "as streams")):
        mine = [(answer, good) for answer, good in judged if answer.ask.stream is stream]
        served = [answer for answer, good in mine if good and answer.ok]
        uncounted = [answer for answer in served if answer.prompt_tokens is None]
        if uncounted:
            asked = " although usage was asked for (stream_options.include_usage)" if stream else ""
            result.unproven.append(
                f"{len(uncounted)} prompts of the advertised length ({limit} tokens with the output) are answered {how} but not counted"
                f"{asked}: whether they were read in full, the count cannot tell"
            )
        elif served and all(good for _, good in mine):
            counted.append(how)
    if counted:
        how = " and ".join(counted)
        result.proved.append(f"prompts of the advertised length ({limit} tokens with the output) are answered and counted in full, {how}")


def judge_failure(scene: Scene, result: ProbeResult, patient: Patient, limit: int, *, inside: bool) -> None:
    """Records what is wrong when a prompt at (`inside`) or over the limit got no answer; a proper refusal is not wrong."""
    where, answer = "at" if inside else "over", patient.answer
    if patient.undecided:
        result.unproven.append(patient.undecided)
        return
    refused = 400 <= answer.status < 500 or (inside and answer.error_in_stream and not _names_near(answer, limit))
    finding = _refused(scene, answer, limit, inside) if refused else _not_refused(scene, patient, limit, where)
    if finding is not None:
        result.find(finding)


def _not_refused(scene: Scene, patient: Patient, limit: int, where: str) -> Finding | None:
    """No answer, and no 4xx either."""
    answer = patient.answer
    about, began = f"{answer.ask.prompt_tokens} prompt tokens against a limit of {limit}", _began(answer)
    if hung(answer):
        return Finding(
            "limits.hang",
            Grade.HANG,
            Confidence.LIKELY,
            f"the answer to a prompt {where} the limit never ends" if began else f"a prompt {where} the limit is never answered",
            f"{about}: {answer.note or 'nothing came'}{began}; {_due(patient)}",
            "Refuse at admission what can never fit; a request must not wait for room that cannot come.",
            (exhibit(answer),),
            ("https://github.com/vllm-project/vllm/issues/35541",),
        )
    if answer.status >= 500:
        return Finding(
            "limits.server-error",
            Grade.LIMIT,
            Confidence.PROVEN,
            f"a prompt {where} the limit gives {answer.status}",
            f"{about} gave {answer.status}. Clients and routers retry a 5xx; a limit is a 4xx.",
            "Answer 400 with both numbers.",
            (exhibit(answer),),
            ("https://github.com/ikawrakow/ik_llama.cpp/pull/2420",),
        )
    if answer.error_in_stream:
        return Finding(
            "limits.late-refusal",
            Grade.HONESTY,
            Confidence.PROVEN,
            "a refusal comes inside a stream that began with status 200",
            f"{about}: status 200, then an error event.",
            "Validate and admit before the first byte, so that a refusal is a 4xx.",
            (exhibit(answer),),
        )
    return _broken(answer, where, f"{about}: {answer.end.value}, {answer.note or answer.error_message[:200]}.")


def _broken(answer: Answer, where: str, proof: str) -> Finding:
    return Finding(
        "limits.broken-answer",
        Grade.LIMIT,
        Confidence.PROVEN,
        f"a prompt {where} the limit breaks the connection or the answer",
        proof,
        "Serve what is advertised, with its finish reason and its end." if where == "at" else "Refuse with a 4xx and an error body.",
        (exhibit(answer),),
    )


def _without_end(scene: Scene, answer: Answer) -> bool:
    """A stream that stops after its finish reason, where this server ends others with [DONE]: what came last was lost."""
    others = (other for other in scene.client.answers if other.ask.stream and other is not answer)
    return answer.ask.stream and not answer.done_seen and any(other.ok and other.done_seen for other in others)


def _began(answer: Answer) -> str:
    """What had come of an answer that did not end; empty where nothing had."""
    if not answer.text and answer.finish_reason is None:
        return ""
    return f", after {len(answer.text)} letters and finish_reason {answer.finish_reason!r}"


def _due(patient: Patient) -> str:
    if patient.reckoned_s is None:
        return "nor are shorter prompts answered any more."
    return f"by shorter prompts asked right after it, {patient.reckoned_s:.1f} s would be due."


def _refused(scene: Scene, answer: Answer, limit: int, inside: bool) -> Finding | None:
    """A 4xx: wrong where the prompt is within the advertised limit, and where it does not name the limit."""
    said = repr(answer.error_message[:200]) + (" (an error event in a stream that began with status 200)" if answer.error_in_stream else "")
    if inside:
        return Finding(
            "limits.advertised-not-servable",
            Grade.LIMIT,
            Confidence.PROVEN if scene.target.gauge.exact else Confidence.LIKELY,
            "a prompt of the advertised length is refused",
            f"{scene.target.said_by} promises {limit} tokens, yet {answer.ask.prompt_tokens} prompt tokens with max_tokens"
            f" {answer.ask.max_tokens} were refused: {said}.",
            "Advertise what can be served.",
            (exhibit(answer),),
            ("https://github.com/sgl-project/sglang/issues/4048",),
        )
    if answer.status in (413, 429) or _names_limit(scene, answer, limit):
        return None
    return Finding(
        "limits.unnamed",
        Grade.HONESTY,
        Confidence.PROVEN,
        "the refusal of an oversize prompt does not name the limit",
        f"Status {answer.status} with the message {said}.",
        "Name the limit and the size of the request in the message.",
        (exhibit(answer),),
    )


def _names_limit(scene: Scene, answer: Answer, limit: int) -> bool:
    """Does the message hold a number that is one of the limits, within the few tokens that engines keep for themselves?"""
    return any(
        abs(number - known) <= _KEPT_TOKENS for number in numbers_in(answer.error_message) for known in (limit, *scene.target.limits())
    )


def _refused_near(answer: Answer, limit: int) -> bool:
    """A 4xx that names a limit just below the advertised one: honest enough."""
    return answer.end is End.REFUSED and 400 <= answer.status < 500 and _names_near(answer, limit)


def _names_near(answer: Answer, limit: int) -> bool:
    return any(limit - _KEPT_TOKENS <= number < limit for number in numbers_in(answer.error_message))


def _sure(scene: Scene) -> Confidence:
    """A limit that only the user stated may be a mistake of the user's."""
    if scene.target.said_by == "--context":
        return Confidence.SUSPECTED
    return Confidence.PROVEN if scene.target.gauge.exact else Confidence.LIKELY


def short_count(scene: Scene, answer: Answer, tokens: int) -> bool:
    if answer.prompt_tokens is None:
        return False
    return answer.prompt_tokens < tokens - scene.target.gauge.slack(tokens) - (0 if scene.target.gauge.exact else tokens // 20)


def found_truncation(result: ProbeResult, answer: Answer, tokens: int) -> None:
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


def found_accepted(scene: Scene, result: ProbeResult, answer: Answer, tokens: int, limit: int, what: str) -> None:
    if short_count(scene, answer, tokens):
        found_truncation(result, answer, tokens)
        return
    if not answer.text and not answer.completion_tokens:
        _found_empty(result, answer, tokens, limit, what, over=True)
        return
    result.find(
        Finding(
            "limits.over-limit-accepted",
            Grade.LIMIT,
            _sure(scene),
            f"a prompt over {what} gets status 200",
            f"{tokens} prompt tokens against a limit of {limit}: answered with {answer.completion_tokens} tokens, usage says"
            f" {answer.prompt_tokens} prompt tokens. Either the limit is not what is advertised, or part of the prompt was not read, or the"
            " answer was computed from memory that this request never wrote.",
            "Refuse before anything is reserved.",
            (exhibit(answer),),
            ("https://github.com/sgl-project/sglang/issues/30233",),
        )
    )


def _empty(answer: Answer) -> bool:
    """Nothing was generated, and not since the model had nothing to say: then the reason is stop."""
    return not answer.text and not answer.steps and not answer.completion_tokens and answer.finish_reason != "stop"


def _found_empty(result: ProbeResult, answer: Answer, tokens: int, limit: int, what: str, *, over: bool) -> None:
    """Within the limit, where the server does not count, the one token that was asked for may be half a letter: then it is suspected."""
    result.find(
        Finding(
            "limits.empty-answer",
            Grade.LIMIT,
            Confidence.PROVEN if over or answer.completion_tokens == 0 else Confidence.SUSPECTED,
            f"{'an oversize prompt' if over else 'a prompt of the advertised length'} gets status 200 and no text",
            f"{tokens} prompt tokens against a limit of {limit} ({what}): status 200, finish_reason {answer.finish_reason!r}, nothing"
            " generated.",
            "A request that was not computed is an error, not an empty answer.",
            (exhibit(answer),),
            ("https://github.com/sgl-project/sglang/issues/33507",),
        )
    )
