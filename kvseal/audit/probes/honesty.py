"""Failure honesty: what fails says so, with a status, a body, and no pretence.

Sends malformed requests (each must be a 4xx with a readable body), a burst as large as allowed (answers, or 429/503 with Retry-After, never
a hang), and watches health meanwhile. What failed in silence anywhere in the audit is found by `kvseal.audit.probes.review`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvseal.audit.backoff import BUSY
from kvseal.audit.client import Reply
from kvseal.audit.findings import Confidence, Exhibit, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Cost, Depth, Probe, Scene, exhibit, hung
from kvseal.audit.prompts import filler
from kvseal.audit.target import Target
from kvseal.audit.wire import Answer, Json, dig

_BURST_TOKENS = 32


def cost(target: Target, depth: Depth, concurrency: int) -> Cost:
    requests = 30 + (_bursts(depth) + 1) * concurrency + 12
    return Cost(requests, requests * (64 + _BURST_TOKENS))


def _bursts(depth: Depth) -> int:
    return 6 + 4 * int(depth)


async def run(scene: Scene, result: ProbeResult) -> None:
    await _malformed(scene, result)
    await _burst(scene, result)
    await _health(scene, result)


def _cases(scene: Scene) -> list[tuple[str, str, bytes | Json, str]]:
    """Name, path, body, and what must not happen: ``refuse`` (a 4xx is due) or ``no-crash`` (a 4xx or a sane answer)."""
    chat = scene.target.plain
    path = "/chat/completions" if chat else "/completions"
    prompt: dict[str, Json] = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    good: dict[str, Json] = {"model": scene.target.model, "max_tokens": 2, "temperature": 0, **prompt}
    wrong = {"messages": "no list"} if chat else {"prompt": {"no": "text"}}
    return [
        ("broken JSON", path, b'{"model": "x", ', "refuse"),
        ("a JSON list", path, [1, 2], "refuse"),
        ("an empty object", path, {}, "refuse"),
        ("prompt of the wrong type", path, {**good, **wrong}, "refuse"),
        ("max_tokens of the wrong type", path, {**good, "max_tokens": "many"}, "refuse"),
        ("temperature of the wrong type", path, {**good, "temperature": {"hot": True}}, "refuse"),
        ("null for every optional field", path, {**good, "stop": None, "n": None, "top_p": None, "seed": None}, "no-crash"),
        ("an unknown model", path, {**good, "model": "no-such-model-of-an-audit"}, "model"),
        ("an unknown route", path + "/no-such-route", good, "refuse"),
    ]


async def _malformed(scene: Scene, result: ProbeResult) -> None:
    right = 0
    cases = _cases(scene)
    for name, path, body, due in cases:
        reply = await scene.client.post(path, body, timeout_s=min(30.0, scene.client.settings.timeout_s))
        if reply.status == 0 and "no end" in reply.note:  # Slow or stuck? It is asked once more, with all the time that a request may take.
            reply = await scene.client.post(path, body)
        right += _judge_malformed(scene, result, name, due, reply)
    if right == len(cases):
        result.proved.append(f"{right} malformed requests were each refused with a 4xx and a readable error body")


def _judge_malformed(scene: Scene, result: ProbeResult, name: str, due: str, reply: Reply) -> bool:
    shown = (Exhibit(name, "", f"status {reply.status} {reply.note}: {reply.text[:200]!r}"),)
    fault: tuple[str, Confidence, str, str] | None = None
    if reply.status in BUSY:
        return False  # A server that takes nothing now says nothing about this input.
    if reply.status >= 500:
        fault = (
            "honesty.crash-on-input",
            Confidence.PROVEN,
            "a malformed request gives a 5xx",
            "Validate the input; a client's mistake is a 4xx.",
        )
    elif reply.status == 0 and "no end" in reply.note:
        fault = ("honesty.hang-on-input", Confidence.LIKELY, "a malformed request is never answered", "Validate before queueing.")
    elif reply.status == 0:
        fault = ("honesty.no-response", Confidence.LIKELY, "a malformed request breaks the connection", "Answer with a 4xx.")
    elif reply.status == 200 and due == "refuse":
        fault = ("honesty.success-on-failure", Confidence.PROVEN, "a request that cannot be served gets status 200", "Answer with a 4xx.")
    elif reply.status == 200 and due == "model":
        fault = (
            "honesty.any-model",
            Confidence.PROVEN,
            "a model that the server does not have is answered by another one",
            "Answer 404 for a model that is not served.",
        )
    elif 400 <= reply.status < 500 and not _readable(reply):
        fault = ("honesty.no-error-body", Confidence.PROVEN, "an error has no readable body", 'Send {"error": {"message": ...}}.')
    if fault is None:
        return True
    rule, confidence, title, remedy = fault
    result.find(
        Finding(rule, Grade.HONESTY, confidence, title, f"The request was: {name}. Status {reply.status}. {reply.note}", remedy, shown)
    )
    return False


def _readable(reply: Reply) -> bool:
    body = reply.json
    texts = (dig(body, "error", "message"), dig(body, "error"), dig(body, "message"), dig(body, "detail"), dig(body, "detail", 0, "msg"))
    return any(isinstance(text, str) and text.strip() for text in texts) or isinstance(dig(body, "detail"), list)


async def _burst(scene: Scene, result: ProbeResult) -> None:
    """As many requests at once as we may, without retries; health is asked meanwhile."""
    count = scene.concurrency
    answers: list[Answer] = []
    health: list[Reply] = []
    for number in range(_bursts(scene.depth)):
        asks = [
            replace(
                scene.ask(
                    filler(24, scene.draw).lstrip(), tokens=48, max_tokens=_BURST_TOKENS, stream=(number + index) % 2 == 1, label="burst"
                ),
                logprobs=0,
            )
            for index in range(count)
        ]
        running = asyncio.create_task(scene.client.ask_all(asks, retry=False))
        try:
            if scene.target.health and number < 2:
                await asyncio.sleep(0.01)
                health.append(await scene.client.get("/health", root=True))
            answers += await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    scene.listen(answers, result)
    silent = [answer for answer in answers if hung(answer)]
    if silent:
        await _silent(scene, result, silent[0])
    for answer in answers:
        _judge_burst(result, answer)
    served = sum(answer.ok for answer in answers)
    refused = sum(answer.status in (429, 503) for answer in answers)
    if served and served + refused == len(answers):
        result.proved.append(
            f"{len(answers)} requests in bursts of {count}: {served} answered, {refused} refused with 429 or 503, none hung"
        )
    if not refused:
        result.unproven.append(
            f"bursts of {count} did not overload the server, so overload itself was not seen (--concurrency allows no more)"
        )
    sick = [reply for reply in health if reply.status != 200]
    if sick and served == len(answers):
        result.find(
            Finding(
                "honesty.health-red-under-load",
                Grade.HONESTY,
                Confidence.SUSPECTED,
                "health is not green while requests are being served",
                f"/health answered {sick[0].status} {sick[0].note} during a burst that was answered in full.",
                "Health must not need a free place among the requests.",
            )
        )


async def _silent(scene: Scene, result: ProbeResult, answer: Answer) -> None:
    """Requests of a burst were not answered in time: is the server slow, or are they stuck? A server that computes one request after the
    other needs for the last of `n` what it needs for one, `n` times; the burst is sent again with twice that time."""
    timeout_s, count = scene.client.settings.timeout_s, scene.concurrency
    alone = await scene.client.ask(replace(answer.ask, label="the same as in the burst, alone"), retry=False)
    due_s = 2 * count * alone.total_s if alone.ok else 0.0
    if due_s >= timeout_s:
        again = [scene.client.ask(replace(answer.ask, label="burst, again"), retry=False, timeout_s=due_s) for _ in range(count)]
        still = [other for other in await asyncio.gather(*again) if hung(other)]
        if not still:
            result.unproven.append(f"{count} requests at once took more than {timeout_s:g} s, and were answered within {due_s:.0f} s: slow")
            return
        answer = still[0]
    result.find(
        Finding(
            "honesty.overload-hang",
            Grade.HANG,
            Confidence.LIKELY,
            "requests of a burst are never answered",
            f"{answer.note}; alone, the same request {f'takes {alone.total_s:.2f} s' if alone.ok else 'is not answered either'}.",
            "Bound the queue; refuse what is over it with 429 or 503 and Retry-After.",
            (exhibit(answer),),
            ("https://github.com/vllm-project/vllm/issues/2901",),
        )
    )


def _judge_burst(result: ProbeResult, answer: Answer) -> None:
    if answer.status in (429, 503) and answer.retry_after_s is None:
        result.find(
            Finding(
                "honesty.no-retry-after",
                Grade.HONESTY,
                Confidence.PROVEN,
                "an overload refusal does not say when to come back",
                f"Status {answer.status} without a Retry-After header.",
                "Send Retry-After.",
                (exhibit(answer),),
            )
        )
    elif answer.status >= 500 and answer.status != 503:
        result.find(
            Finding(
                "honesty.crash-under-load",
                Grade.HONESTY,
                Confidence.PROVEN,
                f"requests of a burst fail with {answer.status}",
                f"{answer.error_message[:200]!r}",
                "Refuse overload with 429 or 503.",
                (exhibit(answer),),
            )
        )


async def _health(scene: Scene, result: ProbeResult) -> None:
    """Was health green while something hung? And is it green now?"""
    if not scene.target.health:
        result.unproven.append("there is no /health to ask")
        return
    reply = await scene.client.get("/health", root=True)
    ask = scene.ask(filler(8, scene.draw).lstrip(), tokens=16, max_tokens=1, label="is it alive")
    probe = await scene.client.ask(ask, retry=False)
    if hung(probe):
        reply, probe = await scene.client.get("/health", root=True), await scene.client.ask(ask, retry=False)
    if reply.status == 200 and hung(probe):
        result.find(
            Finding(
                "honesty.health-green-while-stuck",
                Grade.HANG,
                Confidence.PROVEN,
                "health is green while nothing is generated",
                f"/health answers 200; a request for one token got nothing within {scene.client.settings.timeout_s:g} s, twice.",
                "Readiness is the age of the last step.",
                (exhibit(probe),),
                ("https://github.com/vllm-project/vllm/issues/39863",),
            )
        )
    elif reply.status == 200 and probe.ok:
        result.proved.append("health is green, and the server does generate")
        result.unproven.append("whether health goes red when progress stops: nothing stopped during this audit")


PROBE = Probe("honesty", "Honesty: failures are errors, and health tells the truth", cost, run)
