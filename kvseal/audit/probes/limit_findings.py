"""What is wrong with an answer to a prompt at or over the limit: the findings of the limits probe.

Owns their wording and when each is due. Asks nothing.
"""

from __future__ import annotations

from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Scene, exhibit, hung
from kvseal.audit.probes.patience import Patient
from kvseal.audit.target import numbers_in
from kvseal.audit.wire import Answer, End


def judge_failure(scene: Scene, result: ProbeResult, patient: Patient, limit: int, *, inside: bool) -> None:
    """Records what is wrong when a prompt at (`inside`) or over the limit got no answer; a proper refusal is not wrong."""
    where, answer = "at" if inside else "over", patient.answer
    if patient.undecided:
        result.unproven.append(patient.undecided)
        return
    refused = 400 <= answer.status < 500
    finding = _refused(scene, answer, limit, inside) if refused else _not_refused(scene, patient, limit, where)
    if finding is not None:
        result.find(finding)


def _not_refused(scene: Scene, patient: Patient, limit: int, where: str) -> Finding | None:
    """No answer, and no 4xx either."""
    answer = patient.answer
    about = f"{answer.ask.prompt_tokens} prompt tokens against a limit of {limit}"
    if hung(answer):
        return Finding(
            "limits.hang",
            Grade.HANG,
            Confidence.LIKELY,
            f"a prompt {where} the limit is never answered",
            f"{about}: {answer.note or 'nothing came'}; {_due(patient)}",
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
    return Finding(
        "limits.broken-answer",
        Grade.LIMIT,
        Confidence.PROVEN,
        f"a prompt {where} the limit breaks the connection or the answer",
        f"{about}: {answer.end.value}, {answer.note or answer.error_message[:200]}.",
        "Refuse with a 4xx and an error body.",
        (exhibit(answer),),
    )


def _due(patient: Patient) -> str:
    if patient.reckoned_s is None:
        return "nor are shorter prompts answered any more."
    return f"by shorter prompts asked right after it, {patient.reckoned_s:.1f} s would be due."


def _refused(scene: Scene, answer: Answer, limit: int, inside: bool) -> Finding | None:
    """A 4xx: wrong where the prompt is within the advertised limit, and where it does not name the limit."""
    said = repr(answer.error_message[:200])
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
    return any(abs(number - known) <= 16 for number in numbers_in(answer.error_message) for known in (limit, *scene.target.limits()))


def refused_near(scene: Scene, answer: Answer, limit: int, margin: int) -> bool:
    """A 4xx that names a limit within `margin` of the advertised one: honest enough, engines keep a few tokens for themselves."""
    if answer.end is not End.REFUSED or not 400 <= answer.status < 500:
        return False
    return any(limit - margin <= number < limit for number in numbers_in(answer.error_message))


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
