"""Is the whole prompt read? A part that can be changed without changing the answer took no part in it.

Compares logprobs, so that it needs no clever model; where there are none, a changed text proves that a part was read, and an unchanged one
proves nothing. A short prompt is the control: what does not move the answer there is not held against a long one. The long one is asked as
a stream too: the same prompt gets the same answer, or a stream reads it otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from kvseal.audit.compare import Kind, compare, largest_move, sureness
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.probes.base import Scene, exhibit
from kvseal.audit.prompts import filler
from kvseal.audit.wire import Answer

CONTROL_TOKENS = 256
_PLACES = ("start", "middle", "end")


async def whole_prompt_is_read(scene: Scene, result: ProbeResult, limit: int) -> None:
    """Changes the start, the middle and the end of a prompt near the limit; each must change the answer's logprobs."""
    control = await _differential(scene, result, min(CONTROL_TOKENS, limit // 2))
    if control is None or min(control.moves.values()) <= max(20 * control.floor, 1e-6):
        result.unproven.append("a changed third did not move the answer to a short prompt enough, so the far test would prove nothing")
        return
    tokens = limit - 8 - (0 if scene.target.gauge.exact else scene.target.gauge.slack(limit))
    far = await _differential(scene, result, tokens, streamed=scene.target.streams)
    if far is None:
        result.unproven.append(f"the test prompts of {tokens} tokens were not all answered")
        return
    floor = max(control.floor, far.floor)
    _same_as_stream(result, far, tokens, max(floor, scene.floor))
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
                f" {moved}; noise of this server {floor:.3g}. With {CONTROL_TOKENS} tokens each change moved the answer by"
                f" {min(control.moves.values()):.3g} or more. The {' and the '.join(unread)} took no part in the"
                " answer, yet usage counts the whole.",
                "Refuse with a 4xx what does not fit.",
                tuple(exhibit(far.answers[place]) for place in ("base", "start")),
                ("https://github.com/ollama/ollama/issues/3839", "https://github.com/ollama/ollama/issues/17427"),
            )
        )


def _same_as_stream(result: ProbeResult, far: _Moves, tokens: int, floor: float) -> None:
    """The answer to the long prompt, streamed, against the same prompt asked twice without streaming: beyond the noise of both, or not."""
    streamed = far.answers.get("streamed")
    if streamed is None:
        return
    if not streamed.ok:
        result.unproven.append(f"a prompt of {tokens} tokens was not answered as a stream, so streams could not be compared")
        return
    differences = [compare(far.answers[name], streamed, floor) for name in ("base", "again")]
    kinds = {difference.kind for difference in differences}
    if compare(far.answers["base"], far.answers["again"], floor).kind is Kind.DIFFERENT:
        result.unproven.append(f"a prompt of {tokens} tokens is not answered alike twice even without streaming: streams were not compared")
    elif kinds == {Kind.DIFFERENT}:
        result.find(
            Finding(
                "limits.stream-differs",
                Grade.LIMIT,
                sureness(differences, floor),
                "as a stream, a prompt near the limit gets another answer",
                f"One prompt of {tokens} tokens was asked twice without streaming and once as a stream: {differences[0]}; noise of this"
                f" server {floor:.3g} nats. The stream was computed from other tokens than those that were sent.",
                "Cut, limit and count prompts in one place, whether the answer is streamed or not.",
                tuple(exhibit(far.answers[name]) for name in ("base", "streamed")),
                ("https://github.com/ollama/ollama/issues/3839",),
            )
        )
    elif not streamed.steps:
        same = "the same text, which proves little" if Kind.SAME in kinds else "another text, and nobody can say why"
        result.unproven.append(f"as a stream, a prompt of {tokens} tokens got {same} without logprobs")
    else:
        result.proved.append(f"as a stream, a prompt of {tokens} tokens gets the answer that it gets without streaming")


class _Moves:
    """How far a change at each place moved the answer, and how far no change at all did (`floor`). `answers` are those of the names in
    `_differential`."""

    def __init__(self, moves: dict[str, float], floor: float, answers: dict[str, Answer]) -> None:
        self.moves, self.floor, self.answers = moves, floor, answers


async def _differential(scene: Scene, result: ProbeResult, tokens: int, *, streamed: bool = False) -> _Moves | None:
    """One base prompt, asked twice (once more as a stream, where `streamed`), and one variant for each place, with another fact and another
    third of the filler there. None when an answer without streaming is missing."""
    gauge, chat = scene.target.gauge, scene.target.plain
    words = gauge.words_for(tokens, chat=chat)
    fact = scene.draw.sample(range(100, 1000), 2)
    cue = " remember this : the number of the house is"
    plain = f"{cue} {fact[0]} ."
    room = max(8, words - 4 * len(plain.split()) - len(cue.split()) - 24)  # Numbers take more than a token.
    parts, others = ([filler(room // 3, scene.draw) for _ in _PLACES] for _ in range(2))
    answers: dict[str, Answer] = {}
    for place in ("base", "again", *(["streamed"] if streamed else []), *_PLACES):
        changed = [place == name for name in _PLACES]
        facts = [f"{cue} {fact[1]} ." if change else plain for change in changed]
        texts = [other if change else part for part, other, change in zip(parts, others, changed, strict=True)]
        prompt = (facts[0] + texts[0] + facts[1] + texts[1] + texts[2] + facts[2] + cue).lstrip()
        label = f"changed at {place}" if place in _PLACES else "unchanged"
        ask = scene.ask(prompt, tokens=tokens, max_tokens=4, chat=chat, stream=place == "streamed", label=label)
        # Where a server can be told not to reuse, its noise is nought: a warm answer differs from a cold one by the shape of the batch.
        answers[place] = await scene.client.ask(replace(ask, reuse=scene.target.engine != "llamacpp"))
    scene.listen(list(answers.values()), result)
    if not all(answer.ok for name, answer in answers.items() if name != "streamed"):
        return None
    moves = {place: _moved(answers["base"], answers[place]) for place in _PLACES}
    return _Moves(moves, _moved(answers["base"], answers["again"]), answers)


def _moved(base: Answer, answer: Answer) -> float:
    """How far the answer moved, in nats; without logprobs a changed text counts as far, and the same text as not at all."""
    move = largest_move(base, answer)
    if move is None:
        return 10.0 if base.text != answer.text else 0.0
    return move
