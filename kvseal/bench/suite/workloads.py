"""Prompts of real work as token ids, and synthetic ones of the same shape where the texts are not at hand.

Owns how a text set becomes requests: MMLU with 5 shots, GSM8K with 8, ReAct agents on HotpotQA questions, ARC with 20 shots and one
request for each choice, code without a common prefix, chats. Texts are never shipped; without them a seeded workload with the same lengths
and the same sharing stands in, and says so. Never computes anything on a model.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Encode = Callable[[str], Sequence[int]]

REACT_STEPS = 4
ARC_SHOTS = 20
OBSERVED_LINES = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, and how many tokens it must produce."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order. `waves`: of those at the same place of each group, for agents that go step by step; else one group."""

    name: str
    groups: tuple[tuple[Ask, ...], ...]
    """MMLU: a subject each; ReAct: a wave of steps each; else everything in one."""
    shared: tuple[int, ...]
    """The tokens that all requests of all groups begin with; empty where only those of a group have some in common."""
    synthetic: bool = False

    @property
    def asks(self) -> list[Ask]:
        return [ask for group in self.groups for ask in group]

    @property
    def label(self) -> str:
        return f"{self.name} (synthetic)" if self.synthetic else self.name


# --- real texts ---------------------------------------------------------------------------------------------


def mmlu(texts: Path, encode: Encode) -> Workload:
    """A group for each subject: 5 solved questions, then each of the others; the answer is one token."""
    groups = []
    for row in _rows(texts / "mmlu-5shot-20q.jsonl"):
        head = f"The following are multiple choice questions (with answers) about {row['subject'].replace('_', ' ')}.\n\n"
        head += "".join(_mmlu_question(question, solved=True) for question in row["dev"])
        prompts = _encoded(encode, head, [_mmlu_question(question, solved=False) for question in row["test"]])
        groups.append(tuple(Ask(prompt, 1) for prompt in prompts))
    return Workload("MMLU 5-shot", tuple(groups), ())


def _encoded(encode: Encode, head: str, tails: Sequence[str]) -> list[tuple[int, ...]]:
    """Tokens of head + tail for each tail. The head, which ends with an empty line, is encoded once where a cut inside that line changes
    nothing (the first one is compared)."""
    start = tuple(encode(head[:-1]))
    if (*start, *encode(head[-1] + tails[0])) != tuple(encode(head + tails[0])):
        return [tuple(encode(head + tail)) for tail in tails]
    return [(*start, *encode(head[-1] + tail)) for tail in tails]


def _mmlu_question(question: Sequence[str], *, solved: bool) -> str:
    text, *choices, answer = question
    listed = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    return f"{text}{listed}\nAnswer:" + (f" {'ABCD'[int(answer)]}\n\n" if solved else "")


def gsm8k(texts: Path, encode: Encode) -> Workload:
    """8 solved problems, then one; the output is as long as the reference solution."""
    shots = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in _rows(texts / "gsm8k-fewshot8.jsonl"))
    rows = list(_rows(texts / "gsm8k-test-0-600.jsonl"))
    prompts = _encoded(encode, shots, [f"Question: {row['question']}\nAnswer:" for row in rows])
    asks = [Ask(prompt, len(encode(f" {row['answer']}"))) for prompt, row in zip(prompts, rows, strict=True)]
    return Workload("GSM8K 8-shot", (tuple(asks),), _common(asks))


def react(texts: Path, encode: Encode, *, agents: int = 100) -> Workload:
    """Agents that go through `REACT_STEPS` steps; a group is the wave of one step of all agents. A step's prompt is the few-shot prompt,
    the question and the steps before, whose observations are lines of sonnets; its output is as long as a step of the examples is."""
    data = json.loads((texts / "react-hotpotqa.json").read_text(encoding="utf-8"))
    lines = [line for line in (texts / "sonnet.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
    few_shot = data["react_fewshot_prompt"]
    steps = re.findall(r"Thought \d+: (.*)\nAction \d+: (.*)\n", few_shot)
    lengths = [len(encode(f"Thought 1: {thought}\nAction 1: {action}\n")) for thought, action in steps]
    output_tokens = sum(lengths) // len(lengths)
    waves: list[list[Ask]] = [[] for _ in range(REACT_STEPS)]
    for agent in range(agents):
        question = data["questions"][agent]
        prompt = few_shot + f"Question: {question if isinstance(question, str) else question['question']}\n"
        for step in range(REACT_STEPS):
            waves[step].append(Ask(tuple(encode(f"{prompt}Thought {step + 1}:")), output_tokens))
            thought, action = steps[(agent * 7 + step) % len(steps)]
            first = (agent * 13 + step * 5) % (len(lines) - OBSERVED_LINES)
            observed = " ".join(line.strip() for line in lines[first : first + OBSERVED_LINES])
            prompt += f"Thought {step + 1}: {thought}\nAction {step + 1}: {action}\nObservation {step + 1}: {observed}\n"
    return Workload("ReAct agents", tuple(tuple(wave) for wave in waves), _common([ask for wave in waves for ask in wave]))


def arc(texts: Path, encode: Encode) -> Workload:
    """20 solved questions, then one with one of its choices: a request for each choice, scored by one token after it."""
    rows = list(_rows(texts / "arc-challenge.jsonl"))
    shots = "".join(f"{row['query']}\nAnswer: {row['choices'][row['gold']]}\n\n" for row in rows[:ARC_SHOTS])
    tails = [f"{row['query']}\nAnswer: {choice}" for row in rows[ARC_SHOTS:] for choice in row["choices"]]
    asks = [Ask(prompt, 1) for prompt in _encoded(encode, shots, tails)]
    return Workload("ARC 20-shot", (tuple(asks),), _common(asks))


def unshared(texts: Path, encode: Encode, *, chats: int = 100) -> Workload:
    """Code prompts and first turns of chats: nothing in common but by chance."""
    asks = [Ask(tuple(encode(row["prompt"])), len(encode(row["canonical_solution"]))) for row in _rows(texts / "humaneval-prompts.jsonl")]
    for talk in json.loads((texts / "sharegpt-sample.json").read_text(encoding="utf-8"))[:chats]:
        prompt, answer = (turn["value"] for turn in talk["conversations"][:2])
        if prompt and answer:
            asks.append(Ask(tuple(encode(prompt)), min(256, max(1, len(encode(answer))))))
    return Workload("HumanEval and ShareGPT", (tuple(asks),), ())


# --- synthetic twins ----------------------------------------------------------------------------------------


def synthetic(name: str, vocab_size: int) -> Workload:
    """The named workload's shape in random tokens: "mmlu", "gsm8k", "react", "arc" or "unshared"."""
    chance = random.Random(f"kvseal {name}")

    def draw(tokens: int) -> tuple[int, ...]:
        return tuple(chance.randrange(100, vocab_size) for _ in range(tokens))

    def near(mean: int) -> int:
        return max(4, round(chance.gauss(mean, mean / 3)))

    if name == "mmlu":
        heads = [draw(near(530)) for _ in range(57)]
        return Workload("MMLU 5-shot", tuple(tuple(Ask(head + draw(near(95)), 1) for _ in range(20)) for head in heads), (), True)
    if name == "gsm8k":
        head = draw(1_310)
        return Workload("GSM8K 8-shot", (tuple(Ask(head + draw(near(65)), near(130)) for _ in range(600)),), head, True)
    if name == "react":
        head = draw(1_600)
        agents = [head + draw(30) for _ in range(100)]
        waves = []
        for _ in range(REACT_STEPS):
            waves.append(tuple(Ask(agent, 40) for agent in agents))
            agents = [agent + draw(near(150)) for agent in agents]
        return Workload("ReAct agents", tuple(waves), head, True)
    if name == "arc":
        head = draw(990)
        questions = [head + draw(near(40)) for _ in range(600)]
        return Workload("ARC 20-shot", (tuple(Ask(each + draw(near(8)), 1) for each in questions for _ in range(4)),), head, True)
    return Workload("unshared prompts", (tuple(Ask(draw(near(140)), near(80)) for _ in range(264)),), (), True)


_REAL: dict[str, Callable[[Path, Encode], Workload]] = {"mmlu": mmlu, "gsm8k": gsm8k, "react": react, "arc": arc, "unshared": unshared}


def workload(name: str, traces: Path | None, encode: Encode, vocab_size: int) -> Workload:
    """From the texts if they are there, else the synthetic twin."""
    try:
        return _REAL[name](traces / "text", encode) if traces is not None else synthetic(name, vocab_size)
    except FileNotFoundError:
        return synthetic(name, vocab_size)


def lengths(traces: Path | None, *, longest_tokens: int, requests: int, skip: int = 0) -> tuple[list[tuple[int, int]], bool]:
    """(prompt, output) tokens of the first turns of ShareGPT conversations that fit `longest_tokens` together; and whether they are real.
    Synthetic ones have the same quartiles: log-normal prompts, near-normal answers."""
    path = None if traces is None else traces / "sharegpt-lengths.jsonl"
    found: list[tuple[int, int]] = []
    if path is not None and path.is_file():
        for row in _rows(path):
            (who, prompt), (other, output) = row["turns"][0], row["turns"][1]
            if who == "h" and other == "g" and prompt and output and prompt + output <= longest_tokens:
                found.append((prompt, output))
            if len(found) == skip + requests:
                return found[skip:], True
    chance = random.Random("kvseal lengths")
    drawn: list[tuple[int, int]] = []
    while len(drawn) < skip + requests:
        prompt, output = max(1, round(chance.lognormvariate(3.8, 1.5))), max(1, round(chance.gauss(280, 190)))
        if prompt + output <= longest_tokens:
            drawn.append((prompt, output))
    return drawn[skip:], False


class PageTree:
    """Which whole pages of prompts have been seen, each behind all that is before it."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._children: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def pages(self) -> int:
        return len(self._children)

    def add(self, prompt: tuple[int, ...]) -> int:
        """How many pages from the start had been seen before."""
        size, place, known = self._page_tokens, 0, 0
        for end in range(size, len(prompt) + 1, size):
            edge = (place, prompt[end - size : end])
            found = self._children.get(edge)
            known += found is not None
            place = self._children.setdefault(edge, len(self._children) + 1)
        return known


def ideal_hits(asks: Sequence[Ask], page_tokens: int) -> int:
    """Prompt tokens that a cache of whole pages without limit would find, requests in order; never all of a prompt."""
    tree = PageTree(page_tokens)
    return sum(min(tree.add(ask.prompt), (len(ask.prompt) - 1) // page_tokens) for ask in asks) * page_tokens


def distinct_tokens(asks: Sequence[Ask], page_tokens: int) -> int:
    """Tokens that a cache without limit holds after all of them: whole pages, each prefix once."""
    tree = PageTree(page_tokens)
    for ask in asks:
        tree.add(ask.prompt)
    return tree.pages * page_tokens


def _common(asks: Sequence[Ask]) -> tuple[int, ...]:
    first, last = min(ask.prompt for ask in asks), max(ask.prompt for ask in asks)
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), min(len(first), len(last)))
    return first[:same]


def _rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)
