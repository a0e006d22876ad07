"""Canaries: sentences that nobody can guess, and the search for them in what others are told.

A canary is six words drawn from 256 common English nouns (48 bits), so that every tokeniser splits it into few tokens and even a small
model
can copy it. Owns the drawing, the exact and the fuzzy search, and the bound on how often chance alone would give a hit. The length of run
that counts as a hit is computed from the amount of text searched, so that the bound stays below `FALSE_ALARM_BOUND` per audit.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CANARY_WORDS = 6
LEAST_RUN = 3
FALSE_ALARM_BOUND = 1e-4

WORDS: tuple[str, ...] = tuple(
    """
    anchor apple arrow badge baker balloon banana barrel basin basket beacon beaver bench berry bishop blanket blossom bonnet border bottle
    boulder branch bread bridge broom bucket buffalo bullet butter button cabin cabbage cactus camel candle canoe canvas canyon carbon
    carpet
    carrot castle cattle cellar cement cereal chain chair chalk cheese cherry chest chicken chimney circle circus cliff clock cloud clover
    coach coffee collar comet copper coral corner cotton couch cradle crane crater crayon cricket crown crystal curtain cushion dagger
    dancer
    desert diamond dinner dolphin donkey dragon drawer drum eagle easel elbow elephant emerald engine falcon farmer feather fence fiddle
    finger
    flame flute forest fossil fountain fox frame garage garden garlic ginger giraffe glacier glove goat goblet grape gravel guitar hammer
    harbor harvest hazel helmet hermit honey hornet horse hunter iceberg island ivory jacket jaguar jewel jungle kettle kitchen kitten
    ladder
    lagoon lantern laundry leather lemon lentil leopard library lizard lobster locket lumber magnet maple marble market meadow melon mirror
    monkey mosaic mountain muffin museum mustard napkin needle nickel nutmeg oak ocean olive onion orange orchard otter oyster paddle palace
    panther parrot pebble pelican pencil pepper piano pigeon pillow pine pirate planet plum pocket pony potato prairie pumpkin puppet puzzle
    quartz rabbit raccoon radio raven ribbon river robin rocket saddle salmon sandal satchel scarf shadow shovel silver skeleton sparrow
    spider spoon squirrel stable statue stove sugar sunset sweater tailor teapot temple thunder ticket tiger timber tomato tractor trumpet
    tulip tunnel turkey turtle umbrella valley velvet village violin volcano wagon walnut walrus water whale wheat whistle willow window
    winter wizard wolf wool yard yogurt zebra
    """.split()  # noqa: SIM905
)[:256]


@dataclass(frozen=True, slots=True)
class Canary:
    """`owner` is a label of the audit (``tenant 1``), never a key."""

    owner: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Hit:
    """`run` words of a canary were found in a row, `where` (text, or top-logprobs). `chance` bounds how likely that is by accident."""

    canary: Canary
    run: int
    where: str
    excerpt: str
    chance: float


class Aviary:
    """All canaries of one audit, and the search over everything that came back.

    `heard` counts the places where any word of the list was said at all; the bound grows with it. Canaries are drawn uniformly and a server
    that does not leak knows nothing of them, so each further word matches with odds 1 in 250 whatever the model likes to say.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.canaries: list[Canary] = []
        self.heard = 0

    def new(self, owner: str) -> Canary:
        """A fresh canary. Its words differ from each other, so that a repeating model cannot look like a hit."""
        canary = Canary(owner, tuple(self._draw.sample(WORDS, CANARY_WORDS)))
        self.canaries.append(canary)
        return canary

    def search(self, text: str, alternatives: Sequence[Iterable[str]] = (), own_prompt: str = "") -> list[Hit]:
        """Looks for canaries in `text` and in the `alternatives` (per position, the tokens that the server held likely).

        Runs of words that also stand in `own_prompt` are the model's reading of its own prompt and never count.
        """
        said = _words(text)
        own = _runs(_words(own_prompt))
        lattice = [{piece for token in step for piece in _words(token)} for step in alternatives]
        self.heard += sum(word in _LISTED for word in said) + sum(not _LISTED.isdisjoint(step) for step in lattice)
        heard = set(said).union(*lattice)
        hits: list[Hit] = []
        for canary in self.canaries:
            if sum(_singular(word) in heard for word in canary.words) < LEAST_RUN:
                continue
            hit = self._in_text(canary, said, own) or self._in_lattice(canary, lattice, own)
            if hit is not None:
                hits.append(hit)
        return hits

    def run_needed(self, choices: float = 1.0) -> int:
        """Words in a row that make a hit, when each position offers `choices` of the words: the least whose chance is under the bound."""
        for run in range(LEAST_RUN, CANARY_WORDS):
            if self.chance(run, choices) < FALSE_ALARM_BOUND:
                return run
        return CANARY_WORDS

    def chance(self, run: int, choices: float = 1.0) -> float:
        """Bound on an accidental run of `run` words anywhere so far: positions times canaries times starts times the odds of the words.

        A union bound, so it is too high rather than too low. Between two words one other word may stand.
        """
        starts = CANARY_WORDS - run + 1
        positions = max(100, self.heard)
        gaps = 2.0 ** (run - 1)
        odds = run * math.log(min(1.0, choices / (len(WORDS) - CANARY_WORDS)))
        return min(1.0, positions * max(1, len(self.canaries)) * starts * gaps * math.exp(odds))

    def _in_text(self, canary: Canary, said: list[str], own: set[tuple[str, ...]]) -> Hit | None:
        needed = self.run_needed()
        run, end = _longest_run(canary.words, [{word} for word in said], own, needed)
        if run < needed:
            return None
        return Hit(canary, run, "text", " ".join(said[max(0, end - 12) : end + 1]), self.chance(run))

    def _in_lattice(self, canary: Canary, lattice: list[set[str]], own: set[tuple[str, ...]]) -> Hit | None:
        if not lattice:
            return None
        choices = max(1.0, float(max(len(step) for step in lattice)))
        needed = self.run_needed(choices)
        run, end = _longest_run(canary.words, lattice, own, needed)
        if run < needed:
            return None
        seen = f"{run} words of the canary in a row among the likely tokens, ending at position {end}"
        return Hit(canary, run, "top-logprobs", seen, self.chance(run, choices))


def _words(text: str) -> list[str]:
    """Lower-case words without a plural s: the fuzzy part of the search."""
    return [_singular(word) for word in re.findall(r"[a-z]+", text.lower())]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


_LISTED = frozenset(_singular(word) for word in WORDS)


def _runs(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 2]) for i in range(len(words) - 1)}


def _longest_run(words: tuple[str, ...], steps: Sequence[set[str]], own: set[tuple[str, ...]], needed: int) -> tuple[int, int]:
    """The longest run of consecutive canary words at rising positions, at most one step between two; (length, position of its end).

    A pair that stands in `own` does not lengthen a run.
    """
    best = (0, 0)
    if len(steps) < needed:
        return best
    ending: list[dict[int, int]] = []  # Per position: index of the canary word -> length of the run that ends here.
    words = tuple(_singular(word) for word in words)
    for at, step in enumerate(steps):
        here: dict[int, int] = {}
        for index, word in enumerate(words):
            if word not in step:
                continue
            before = 0
            if index and (words[index - 1], word) not in own:
                before = max((ending[at - back].get(index - 1, 0) for back in (1, 2) if at >= back), default=0)
            here[index] = before + 1
            if before + 1 > best[0]:
                best = (before + 1, at)
        ending.append(here)
    return best
