"""Canaries: found when they are there, whole or in part; not found by chance; never in their own prompt."""

from __future__ import annotations

import random

from kvseal.audit.canary import CANARY_WORDS, FALSE_ALARM_BOUND, WORDS, Aviary


def _aviary() -> Aviary:
    return Aviary(random.Random(7))


def test_the_words_are_many_and_different() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256


def test_a_whole_canary_is_found_in_any_case_and_punctuation() -> None:
    aviary = _aviary()
    canary = aviary.new("tenant A")
    said = "He said: " + ", ".join(word.upper() + "s" for word in canary.words) + "!"
    (hit,) = aviary.search(said)
    assert hit.canary == canary and hit.run == CANARY_WORDS and hit.chance < FALSE_ALARM_BOUND


def test_four_words_in_a_row_are_enough_and_three_are_not() -> None:
    aviary = _aviary()
    canary = aviary.new("tenant A")
    assert aviary.search("then " + " ".join(canary.words[1:5]))
    assert not aviary.search("then " + " ".join(canary.words[1:4]))


def test_one_word_may_stand_between_and_order_matters() -> None:
    aviary = _aviary()
    canary = aviary.new("tenant A")
    assert aviary.search(" and ".join(canary.words))
    assert not aviary.search(" ".join(reversed(canary.words)))


def test_likely_tokens_are_searched_too() -> None:
    aviary = _aviary()
    canary = aviary.new("tenant A")
    steps = [[f" {word}", " so", " it", " was", " in"] for word in canary.words]
    (hit,) = aviary.search("so it was in of to", steps)
    assert hit.where == "top-logprobs"


def test_the_own_prompt_does_not_count() -> None:
    aviary = _aviary()
    canary = aviary.new("tenant A")
    assert not aviary.search(canary.text, own_prompt=f"The code words are {canary.text}.")


def test_random_list_words_raise_no_alarm() -> None:
    """Text of nothing but list words, against many canaries: the bound says less than one alarm in ten thousand such audits."""
    aviary = _aviary()
    for number in range(60):
        aviary.new(f"tenant {number}")
    draw = random.Random(99)
    for _ in range(200):
        assert not aviary.search(" ".join(draw.choices(WORDS, k=40)))
    assert aviary.heard == 200 * 40
    assert aviary.chance(aviary.run_needed()) < FALSE_ALARM_BOUND


def test_more_text_needs_a_longer_run() -> None:
    aviary = _aviary()
    aviary.new("tenant A")
    short = aviary.run_needed()
    aviary.heard = 10_000_000
    assert aviary.run_needed() > short
