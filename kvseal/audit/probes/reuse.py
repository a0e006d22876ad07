"""Reuse equals recompute: a prompt answered from the prefix cache gets the answer that it got when it was computed.

Asks the same greedy prompts cold, warm, warm again, with another ending, and warm under load, at lengths around the usual page sizes (a
full hit must still recompute one token: off by one shows there). Compares tokens and logprobs with a noise floor measured on this server.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from kvseal.audit.compare import Difference, Kind, blind_spot, compare, drawn, largest_move, sureness
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult, Series
from kvseal.audit.probes.base import Cost, Depth, Probe, Scene, exhibit
from kvseal.audit.prompts import filler
from kvseal.audit.target import Target
from kvseal.audit.wire import Answer, Ask

_EDGES = (15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257)
_LONG = 600
_MANY_DRAWN = 2  # Of four.
_OUTPUT_TOKENS = 16


def cost(target: Target, depth: Depth, concurrency: int) -> Cost:
    sizes = _sizes(target, depth)
    each = 4 + 2  # Cold, warm, warm again, other ending twice, under load.
    loads = 2 * concurrency * max(1, len(sizes) // max(1, concurrency))
    twins = 4 * int(depth) * 2 * max(2, min(4, concurrency))
    tokens = twins * 324 + each * (sum(sizes) + len(sizes) * (_OUTPUT_TOKENS + 16)) + loads * (200 + _OUTPUT_TOKENS) + 8 * 64
    return Cost(each * len(sizes) + loads + twins + 8, tokens)


def _sizes(target: Target, depth: Depth) -> tuple[int, ...]:
    limit = min((*target.limits(), 1 << 30)) - 2 * _OUTPUT_TOKENS
    wanted = (*_EDGES[:: 2 if depth is Depth.QUICK else 1], _LONG) * (2 if depth is Depth.THOROUGH else 1)
    return tuple(size for size in wanted if size < limit)


@dataclass(slots=True)
class _Case:
    """One prompt and all its answers."""

    ask: Ask
    cold: Answer
    warm: list[Answer] = field(default_factory=list)
    loaded: list[Answer] = field(default_factory=list)
    ended: tuple[Answer, Answer] | None = None


async def run(scene: Scene, result: ProbeResult) -> None:
    cases = [case for size in _sizes(scene.target, scene.depth) if (case := await _cold_and_warm(scene, size)) is not None]
    if not cases:
        result.unproven.append("no prompt was answered cold and warm, so reuse could not be compared with recompute")
        return
    await _noise(scene)
    await _under_load(scene, cases)
    await _twins(scene, result)
    everything = [answer for case in cases for answer in (case.cold, *case.warm, *case.loaded, *(case.ended or ()))]
    scene.listen(everything, result)
    _judge(scene, result, cases)
    moves = {"warm": [(c.cold, w) for c in cases for w in c.warm], "under load": [(c.cold, x) for c in cases for x in c.loaded]}
    for group, pairs in moves.items():
        values = tuple(move for a, b in pairs if (move := largest_move(a, b)) is not None)
        if values:
            result.series.append(Series("Largest change of a logprob against the cold answer", group, "nats", values))


async def _cold_and_warm(scene: Scene, size: int) -> _Case | None:
    gauge, chat = scene.target.gauge, scene.target.plain
    prompt = gauge.text(size, scene.draw, chat=chat)
    ask = scene.ask(prompt, tokens=size, max_tokens=_OUTPUT_TOKENS, chat=chat, label=f"prompt of {size}, cold")
    cold = await scene.client.ask(ask)
    if not cold.ok:
        return None
    case = _Case(ask, cold)
    for number in (1, 2):
        warm = await scene.client.ask(replace(ask, label=f"prompt of {size}, warm", stream=number == 2 and scene.target.streams))
        if warm.ok:
            case.warm.append(warm)
    other = replace(ask, prompt=prompt + filler(12, scene.draw), prompt_tokens=size + 12, label=f"prompt of {size} and another ending")
    partly, fully = await scene.client.ask(other), await scene.client.ask(other)
    if partly.ok and fully.ok:
        case.ended = (partly, fully)
    return case


async def _noise(scene: Scene) -> None:
    """How far logprobs move under load on prompts too short to reuse anything: numerics of batching, and nothing else. And whether such
    prompts, answered twice, show a server that draws its tokens by lot."""
    asks = [scene.ask(filler(3, scene.draw).lstrip(), tokens=16, max_tokens=8, label="noise of batching") for _ in range(4)]
    alone = [await scene.client.ask(ask) for ask in asks]
    together = await scene.client.ask_all(asks)
    by_lot = 0
    for one, other in zip(alone, together, strict=True):
        if one.ok and other.ok and compare(one, other).kind is not Kind.DIFFERENT and (move := largest_move(one, other)) is not None:
            scene.floor = max(scene.floor, move)
        by_lot += one.ok and other.ok and drawn(one, other)
    scene.floor_known, scene.draws = True, by_lot >= _MANY_DRAWN


async def _under_load(scene: Scene, cases: list[_Case]) -> None:
    """Each prompt once more, warm, while other long prompts run."""
    step = max(1, scene.concurrency)
    for start in range(0, len(cases), step):
        group = cases[start : start + step]
        asks: list[Ask] = []
        for case in group:
            load = scene.ask(filler(180, scene.draw).lstrip(), tokens=200, max_tokens=_OUTPUT_TOKENS, logprobs=False, label="load")
            asks += [load, replace(case.ask, label=case.ask.label.replace("cold", "warm under load"))]
        answers = await scene.client.ask_all(asks)
        for case, answer in zip(group, answers[1::2], strict=True):
            if answer.ok:
                case.loaded.append(answer)
        await asyncio.sleep(0)


async def _twins(scene: Scene, result: ProbeResult) -> None:
    """Requests with one fresh prefix at the same moment, then each alone: a page must not be shared before it is written."""
    pairs: list[tuple[Answer, Answer, Difference]] = []
    for _ in range(4 * int(scene.depth)):
        size = max(32, min(300, min((*scene.target.limits(), 1 << 30)) // 2))
        text = scene.target.gauge.text(size, scene.draw, chat=scene.target.plain)
        asks = [
            scene.ask(text + filler(4, scene.draw), tokens=size + 4, max_tokens=_OUTPUT_TOKENS, label="twin, shares a fresh prefix")
            for _ in range(max(2, min(4, scene.concurrency)))
        ]
        together = await scene.client.ask_all(asks)
        for ask, answer in zip(asks, together, strict=True):
            quiet = await scene.client.ask(replace(ask, label="the same, quiet"))
            if answer.ok and quiet.ok:
                pairs.append((quiet, answer, compare(quiet, answer, scene.floor)))
    scene.listen([answer for _, answer, _ in pairs], result)
    title = "requests that share a prefix at the same moment get other answers than alone"
    _judge_pairs(scene, result, "reuse.twins-differ", title, pairs)
    if pairs and all(difference.kind in (Kind.SAME, Kind.NUMERICS) for _, _, difference in pairs):
        result.proved.append(f"{len(pairs)} requests that shared a fresh prefix at the same moment got the answers that they get alone")


def _judge(scene: Scene, result: ProbeResult, cases: list[_Case]) -> None:
    warm = [(case.cold, answer, compare(case.cold, answer, scene.floor)) for case in cases for answer in case.warm]
    loaded = [(case.cold, answer, compare(case.cold, answer, scene.floor)) for case in cases for answer in case.loaded]
    ended = [(*case.ended, compare(case.ended[0], case.ended[1], scene.floor)) for case in cases if case.ended is not None]
    reused = sum(bool(answer.cached_tokens) for _, answer, _ in (*warm, *loaded, *ended))
    for rule, title, pairs in (
        ("reuse.warm-differs", "a prompt answered from the cache gets another answer than when it was computed", warm),
        ("reuse.load-differs", "a prompt gets another answer under load, beyond the noise of batching", loaded),
        ("reuse.partial-hit-differs", "a prompt that shares its beginning gets another answer when repeated", ended),
    ):
        _judge_pairs(scene, result, rule, title, pairs)
    _judge_counts(result, warm)
    if scene.draws:
        result.unproven.append(
            "the server does not repeat even the answers to prompts that are too short to reuse anything (does it draw tokens by lot"
            " although temperature 0 is asked for?), so answers from the cache could not be compared with recomputed ones"
        )
    if scene.draws or any(finding.grade is Grade.CORRUPTION for finding in result.findings):
        return
    exact = sum(difference.exact for _, _, difference in (*warm, *loaded, *ended))
    total = len(warm) + len(loaded) + len(ended)
    where = (
        f"{reused} of them by the server's own count from the cache"
        if scene.target.cached_counts
        else "the server does not say which were cached"
    )
    numerics = sum(difference.kind is Kind.NUMERICS for _, _, difference in (*warm, *loaded, *ended))
    unknown = total - exact - numerics
    if unknown:
        result.unproven.append(f"{unknown} of {total} repeated answers differ in text, and without logprobs nobody can say why")
    if total > unknown:
        result.proved.append(
            f"{total - unknown} repeated answers equal the first ones ({where}): {exact} to the last digit, {numerics} within the noise"
            f" (floor {scene.floor:.3g} nats)"
        )
    result.unproven += blind_spot(scene.floor)
    if not reused:
        result.unproven.append("no answer is known to have come from the cache, so reuse itself may not have been tested")


def _judge_counts(result: ProbeResult, pairs: list[tuple[Answer, Answer, Difference]]) -> None:
    """The same prompt is counted the same, whether it came from the cache or not: clients detect truncation by this count."""
    for cold, warm, _ in pairs:
        if cold.prompt_tokens is not None and warm.prompt_tokens is not None and cold.prompt_tokens != warm.prompt_tokens:
            result.find(
                Finding(
                    "reuse.usage-differs",
                    Grade.HONESTY,
                    Confidence.PROVEN,
                    "one prompt is counted differently cold and warm",
                    f"usage said {cold.prompt_tokens} prompt tokens the first time, {warm.prompt_tokens} the second.",
                    "prompt_tokens is what the client sent; cached tokens are a part of it, in prompt_tokens_details.",
                    (exhibit(cold, "cold"), exhibit(warm, "warm")),
                )
            )
            return


def _judge_pairs(scene: Scene, result: ProbeResult, rule: str, title: str, pairs: list[tuple[Answer, Answer, Difference]]) -> None:
    if scene.draws:
        return
    broken = [entry for entry in pairs if entry[2].kind is Kind.DIFFERENT]
    unknown = [entry for entry in pairs if entry[2].kind is Kind.UNKNOWN]
    if broken:
        reference, answer, difference = broken[0]
        result.find(
            Finding(
                rule,
                Grade.CORRUPTION,
                sureness([entry[2] for entry in broken], scene.floor),
                title,
                f"{len(broken)} of {len(pairs)} answers differ beyond numerics; the first: {difference} (noise floor"
                f" {scene.floor:.3g} nats).",
                "Compare the cache's contents with a recompute; look at page edges, positions, quantisation of reused pages.",
                (exhibit(reference, "the first answer"), exhibit(answer, "the later answer")),
                ("https://github.com/NVIDIA/TensorRT-LLM/issues/2699", "https://github.com/ggml-org/llama.cpp/pull/23970"),
            )
        )
    elif len(unknown) > 2 and 2 * len(unknown) > len(pairs):
        reference, answer, _ = unknown[0]
        result.find(
            Finding(
                rule,
                Grade.CORRUPTION,
                Confidence.SUSPECTED,
                title,
                f"{len(unknown)} of {len(pairs)} texts differ; the server gives no logprobs, so numerics cannot be excluded.",
                "Audit again with logprobs enabled.",
                (exhibit(reference, "the first answer"), exhibit(answer, "the later answer")),
            )
        )


PROBE = Probe("reuse", "Reuse: an answer from the cache is the answer that a recompute gives", cost, run)
