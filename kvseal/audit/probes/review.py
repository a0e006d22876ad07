"""The review: every answer of an audit, whichever probe asked for it, was whole or said that it was not.

Looks for silent failures: streams without an end, ids used twice, more tokens than asked for, finish reasons that are failures, 200 with an
error inside. Asks nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from kvseal.audit.compare import common_length
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Scene, exhibit
from kvseal.audit.target import FIRST_ASKS
from kvseal.audit.wire import Answer, End

TITLE = "Answers: every one of this audit was whole, or said that it was not"
_SURELY_WITHIN = 0.9  # Of the limit: sizes of prompts are estimates.
_TEMPLATE_TOKENS = 48
"""A chat template is at least reckoned to be so long."""
_MOST_TOKENS_A_WORD = 3
_GOOD_ENDS = (
    "stop", "length", "tool_calls", "content_filter", "function_call", "eos", "eos_token", "stop_sequence", "repetition", "end_turn",
    "max_tokens", "model_length",
)  # fmt: skip
_BAD_ENDS = re.compile(r"abort|cancel|error|fail|timeout|kill|crash", re.IGNORECASE)


def review(scene: Scene) -> ProbeResult:
    """Looks through every answer of the audit, of whichever probe."""
    result = ProbeResult("answers", TITLE)
    scene.listen(scene.client.answers, result)  # Those that a probe could not hear because its budget ended.
    owners: dict[str, Answer] = {}
    streams = whole = 0
    for answer in scene.client.answers:
        for server_id in answer.ids_seen:
            if server_id in owners:
                _found(
                    result,
                    "honesty.id-reused",
                    Grade.HONESTY,
                    Confidence.PROVEN,
                    "two answers bear one id",
                    f"The id was {server_id[:60]!r}.",
                    answer,
                )
            owners[server_id] = answer
        if len(answer.ids_seen) > 1:
            _found(
                result, "honesty.id-changes", Grade.LEAK, Confidence.LIKELY, "one stream holds events of several ids",
                f"Ids: {', '.join(sorted(answer.ids_seen))[:200]}. Events of another request may have been delivered here.", answer,
            )  # fmt: skip
        _judge_end(result, answer)
        streams += answer.ask.stream and answer.ok
        whole += answer.ok
    _judge_failed(scene, result)
    _judge_cached(scene, result)
    if whole and not result.findings:
        result.proved.append(f"all {whole} answers of this audit ({streams} streams) were complete, with their own id and a finish reason")
    return result


def _judge_failed(scene: Scene, result: ProbeResult) -> None:
    """A request that is well within the limits, and not more at once than allowed, is answered or told to come back: never a 5xx."""
    limit = min((*scene.target.limits(), 1 << 30))
    failed = [
        answer
        for answer in scene.client.answers
        if answer.status >= 500 and answer.status != 503 and answer.ask.label not in FIRST_ASKS
        and 0 < answer.ask.prompt_tokens + answer.ask.max_tokens <= _SURELY_WITHIN * limit and answer.ask.prompt_tokens
    ]  # fmt: skip
    if failed:
        worst = max(failed, key=lambda answer: answer.status)
        proof = (
            f"{len(failed)} requests well within the advertised limits ended with a 5xx, the first with {failed[0].status}:"
            f" {failed[0].error_message[:160]!r}. Where several run at once, look whether together they need more than the server has."
        )
        title = "a request that the server promises to serve fails with a 5xx"
        _found(result, "honesty.valid-request-failed", Grade.HONESTY, Confidence.PROVEN, title, proof, worst)


def _judge_cached(scene: Scene, result: ProbeResult) -> None:
    """No more of a prompt can come from a cache than what it has in common with something that was sent: prompts are drawn at random, so
    whatever goes beyond is somebody else's."""
    if not scene.fresh:
        result.unproven.append("with a given seed, prompts may have been sent before: cached counts were not compared with what was sent")
        return
    compared, worst = 0, (0, 0)
    shown: Answer | None = None
    for answer, beside in _neighbours(scene):
        if not answer.ok or answer.cached_tokens is None:
            continue
        compared += 1
        most = max(_most_tokens(scene, answer, other) for other in ("", *beside))
        if answer.cached_tokens - most > worst[0] - worst[1]:
            worst, shown = (answer.cached_tokens, most), answer
    if shown is not None:
        result.find(
            Finding(
                "reuse.never-sent",
                Grade.CORRUPTION,
                Confidence.LIKELY,
                "more of a prompt comes from the cache than anybody had sent",
                f"The server says that {worst[0]} tokens of a prompt came from its cache; at most {worst[1]} of them stand at the beginning"
                " of any other prompt of this audit, whose words are drawn at random.",
                "Key pages by all tokens up to their end, with a hash that cannot collide, and compare the tokens on a hit. Reuse at"
                " another position (such as llama.cpp's --cache-reuse) shows here too.",
                (exhibit(shown),),
                ("https://github.com/vllm-project/vllm/security/advisories/GHSA-rm76-4mrf-v9r8",),
            )
        )
    elif compared:
        result.proved.append(f"by the server's own counts none of {compared} prompts took more from the cache than had been sent")


def _neighbours(scene: Scene) -> Iterator[tuple[Answer, list[str]]]:
    """Each answer, with the prompts (and what was generated for them, which is cached as well) that begin most like its own: they stand
    beside it when all are in order."""
    for chat in scene.target.kinds:
        mine = [(answer, answer.ask.prompt) for answer in scene.client.answers if answer.ask.chat == chat]
        sent = sorted((prompt + answer.text, answer.number, answer) for answer, prompt in mine if isinstance(prompt, str))
        for index, (_, _, answer) in enumerate(sent):
            yield answer, [text for text, _, _ in (*sent[max(0, index - 1) : index], *sent[index + 1 : index + 2])]


def _most_tokens(scene: Scene, answer: Answer, other: str) -> int:
    """As many tokens as a prompt can have in common with `other`, with what a template puts before both."""
    prompt, chat, gauge = answer.ask.prompt, answer.ask.chat, scene.target.gauge
    alike = prompt[: common_length(prompt, other)] if isinstance(prompt, str) else ""
    around = max(_TEMPLATE_TOKENS if chat else 0, gauge.base.get(chat, 0.0)) + 8
    return math.ceil(around + min(len(alike), _MOST_TOKENS_A_WORD * (len(alike.split()) + 1) * max(1.0, gauge.per_word)))


def _judge_end(result: ProbeResult, answer: Answer) -> None:
    ask = answer.ask
    if answer.end is End.CUT and answer.status == 200:
        _found(
            result, "honesty.stream-cut", Grade.HONESTY, Confidence.PROVEN, "a stream stops without an end",
            f"{answer.note}. A client cannot tell a failure from the end of the text.", answer,
        )  # fmt: skip
    elif answer.end is End.OVERSIZE:
        _found(
            result, "honesty.endless", Grade.HONESTY, Confidence.PROVEN, "an answer does not end where it was told to", answer.note, answer
        )
    elif answer.end is End.MALFORMED and answer.status == 200:
        _found(result, "honesty.malformed", Grade.HONESTY, Confidence.PROVEN, "a 200 is not an answer", answer.note, answer)
    elif answer.end is End.REFUSED and answer.status == 200 and not answer.error_in_stream:
        _found(
            result, "honesty.success-on-failure", Grade.HONESTY, Confidence.PROVEN, "a failure bears status 200",
            f"The body says {answer.error_message[:160]!r}.", answer,
        )  # fmt: skip
    elif answer.ok and (answer.finish_reason or "").lower() not in _GOOD_ENDS:
        known = answer.finish_reason is not None and bool(_BAD_ENDS.search(answer.finish_reason))
        _found(
            result, "honesty.finish-reason", Grade.HONESTY, Confidence.PROVEN if known else Confidence.SUSPECTED,
            "a failure is dressed as a finish reason" if known else "an answer does not say why it ended, in words that clients know",
            f"Status 200 with finish_reason {answer.finish_reason!r}.", answer,
        )  # fmt: skip
    elif answer.ok and (answer.completion_tokens or 0) > ask.max_tokens:
        _found(
            result, "honesty.over-max-tokens", Grade.HONESTY, Confidence.PROVEN, "more tokens are generated than were asked for",
            f"max_tokens was {ask.max_tokens}, usage says {answer.completion_tokens}.", answer,
        )  # fmt: skip
    elif answer.ok and answer.finish_reason == "length" and answer.completion_tokens == 0 and ask.max_tokens > 0:
        _found(
            result, "honesty.empty-length", Grade.HONESTY, Confidence.PROVEN, "nothing was generated, and the finish reason is length",
            "An aborted request was reported as a short answer.", answer,
        )  # fmt: skip


def _found(result: ProbeResult, rule: str, grade: Grade, confidence: Confidence, title: str, proof: str, answer: Answer) -> None:
    result.find(Finding(rule, grade, confidence, title, proof, "Report failures as errors.", (exhibit(answer),)))
