"""One suite for every backend, part two: every seal check fires (L3-L7, L10), and is contained (L12)."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest
from conformance.forward import BACKENDS, OTHER_SCOPE, Bench, Sequence_, make_backend, only, same_bits
from golden.small_models import random_tokens

from kvseal.core.errors import LawBroken
from kvseal.exec.backend import SealCheck
from kvseal.exec.weights.types import ModelWeights
from kvseal.kv.seal import SEAL_BYTES, SEAL_MAGIC

VOCAB = 96
PAGE_TOKENS = 8


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, tiny_weights: ModelWeights) -> Bench:
    return Bench(make_backend(request.param, tiny_weights, kv_dtype="fp16", page_tokens=PAGE_TOKENS, pages=24))


def prefilled(bench: Bench, seed: int, done: int, total: int) -> Sequence_:
    """A sequence of `total` tokens whose first `done` are in the cache."""
    sequence = bench.sequence(random_tokens(seed, total, VOCAB))
    assert not bench.step((sequence, done)).breaks
    return sequence


def contained(
    bench: Bench, victim: Sequence_, harm: Callable[[], None], check: SealCheck, *, ordinal: int, layer: int, count: int = 1
) -> None:
    """The victim's next step breaks as said; its neighbours on both sides compute and store the very same bits."""
    left, right = prefilled(bench, 91, 12, 20), prefilled(bench, 92, 17, 25)
    undisturbed = [bench.sequence(neighbour.tokens) for neighbour in (left, right)]
    expected = np.concatenate([bench.hidden(twin, [])[at : at + 2] for twin, at in zip(undisturbed, (12, 17), strict=True)])
    harm()
    before = bench.backend.arena.memory.copy()
    output = bench.step((left, 2), (victim, count), (right, 2))
    found = only(output.breaks)
    assert (found.row, found.check, found.ordinal, found.layer) == (1, check, ordinal, layer)
    if check is not SealCheck.TABLE:
        assert found.page == victim.stamps[2 * ordinal]
    assert same_bits(np.concatenate([output.hidden[:2], output.hidden[-2:]]), expected)
    own = set(left.stamps[0::2]) | set(right.stamps[0::2])
    changed = {int(page) for page in np.flatnonzero((bench.backend.arena.memory != before).any(axis=1))}
    assert changed <= own | set(victim.stamps[0::2])
    sections = bench.backend.geometry.section_bytes
    for page in changed - own:  # the victim's own page may have grown in the layers up to the break, and in none after
        assert same_bits(bench.backend.arena.memory[page, (layer + 1) * sections :], before[page, (layer + 1) * sections :])


FIELDS = [
    ("magic", 0, SealCheck.MAGIC),
    ("magic", SEAL_MAGIC ^ 1, SealCheck.MAGIC),
    ("nonce", 5, SealCheck.NONCE),
    ("format", 1, SealCheck.FORMAT),
    ("layer", 77, SealCheck.LAYER),
    ("ordinal", 3, SealCheck.ORDINAL),
    ("filled", 7, SealCheck.FILLED),
]


@pytest.mark.parametrize(("name", "value", "check"), FIELDS)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_changed_field_breaks_a_read(bench: Bench, name: str, value: int, check: SealCheck, layer: int, ordinal: int) -> None:
    victim = prefilled(bench, 1, 18, 24)

    def harm() -> None:
        bench.seals()[victim.stamps[2 * ordinal], layer][name] = value

    contained(bench, victim, harm, check, ordinal=ordinal, layer=layer)


@pytest.mark.parametrize("word", [0, 1])
def test_a_changed_scope_breaks_a_read(bench: Bench, word: int) -> None:
    victim = prefilled(bench, 1, 18, 24)

    def harm() -> None:
        bench.seals()[victim.stamps[2], 1]["scope"][word] ^= 1

    contained(bench, victim, harm, SealCheck.SCOPE, ordinal=1, layer=1)


def test_a_reader_of_another_scope_is_refused(bench: Bench) -> None:
    victim = prefilled(bench, 1, 16, 24)

    def harm() -> None:
        victim.scope = OTHER_SCOPE

    contained(bench, victim, harm, SealCheck.SCOPE, ordinal=0, layer=0)


def test_swapped_pages_break_the_ordinal(bench: Bench) -> None:
    victim = prefilled(bench, 1, 24, 32)

    def harm() -> None:
        victim.stamps[0:2], victim.stamps[2:4] = victim.stamps[2:4], victim.stamps[0:2]

    contained(bench, victim, harm, SealCheck.ORDINAL, ordinal=0, layer=0)


def test_a_stale_table_meets_another_nonce(bench: Bench) -> None:
    """The page was handed out again and written by its new holder: the old holder reads nothing."""
    victim = prefilled(bench, 1, 16, 24)

    def harm() -> None:
        thief = bench.sequence(random_tokens(2, 8, VOCAB), pages=[victim.stamps[2]])
        assert not bench.step((thief, 8)).breaks

    contained(bench, victim, harm, SealCheck.NONCE, ordinal=1, layer=0)


def test_a_page_handed_out_but_not_written_is_not_read(bench: Bench) -> None:
    """Length without evidence: the table names a fresh page, its memory still bears the old hand-out."""
    old = prefilled(bench, 1, 16, 16)
    fresh = bench.sequence(random_tokens(3, 24, VOCAB), pages=[old.stamps[0], old.stamps[2], 23])

    def harm() -> None:
        fresh.done = 16

    contained(bench, fresh, harm, SealCheck.NONCE, ordinal=0, layer=0)


def test_the_last_page_is_checked_before_it_is_written(bench: Bench) -> None:
    victim = prefilled(bench, 1, 12, 24)

    def harm() -> None:
        bench.seals()[victim.stamps[2], 1]["nonce"] = 4

    contained(bench, victim, harm, SealCheck.NONCE, ordinal=1, layer=1)


@pytest.mark.parametrize("nonce", [0, 12345])
def test_a_fresh_page_must_be_in_the_ledger(bench: Bench, nonce: int) -> None:
    victim = prefilled(bench, 1, 16, 24)

    def harm() -> None:
        bench.ledger[victim.stamps[4]] = nonce

    contained(bench, victim, harm, SealCheck.LEDGER, ordinal=2, layer=0)


def test_a_stamp_of_nonce_zero_writes_nothing(bench: Bench) -> None:
    victim = prefilled(bench, 1, 16, 24)

    def harm() -> None:
        victim.stamps[5] = 0
        bench.ledger[victim.stamps[4]] = 0

    contained(bench, victim, harm, SealCheck.LEDGER, ordinal=2, layer=0)


def test_a_page_is_begun_once_per_hand_out(bench: Bench) -> None:
    """Suffix written over the shared prefix: the position says 0, the page already bears this hand-out."""
    victim = prefilled(bench, 1, 16, 24)

    def harm() -> None:
        victim.done = 8

    contained(bench, victim, harm, SealCheck.REUSED, ordinal=1, layer=0)


@pytest.mark.parametrize("position", [9, 13])
def test_slots_are_written_in_order(bench: Bench, position: int) -> None:
    victim = prefilled(bench, 1, 12, 24)

    def harm() -> None:
        victim.done = position

    contained(bench, victim, harm, SealCheck.FILLED, ordinal=1, layer=0)


def test_a_sealed_page_is_never_written(bench: Bench) -> None:
    victim = prefilled(bench, 1, 12, 24)

    def harm() -> None:
        bench.seals()[victim.stamps[2], 0]["digest"][1] = 9

    contained(bench, victim, harm, SealCheck.REUSED, ordinal=1, layer=0)


def test_a_table_that_is_too_short_is_refused(bench: Bench) -> None:
    victim = prefilled(bench, 1, 16, 24)

    def harm() -> None:
        victim.stamps = victim.stamps[:4]

    contained(bench, victim, harm, SealCheck.TABLE, ordinal=2, layer=0)


def test_an_empty_table_is_refused(bench: Bench) -> None:
    victim = prefilled(bench, 1, 16, 24)

    def harm() -> None:
        victim.stamps = array("Q")

    contained(bench, victim, harm, SealCheck.TABLE, ordinal=2, layer=0)


@pytest.mark.parametrize("page", [24, 2**31, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("ordinal", [1, 2])
def test_a_page_outside_the_arena_is_refused(bench: Bench, page: int, ordinal: int) -> None:
    victim = prefilled(bench, 1, 16, 24)

    def harm() -> None:
        victim.stamps[2 * ordinal] = page

    contained(bench, victim, harm, SealCheck.TABLE, ordinal=ordinal, layer=0)


def test_only_the_first_break_of_a_row_is_reported(bench: Bench) -> None:
    victim = prefilled(bench, 1, 18, 24)

    def harm() -> None:
        for layer in (1, 2):
            for ordinal in (0, 1):
                bench.seals()[victim.stamps[2 * ordinal], layer]["nonce"] = 4

    contained(bench, victim, harm, SealCheck.NONCE, ordinal=0, layer=1)


def test_every_broken_row_is_reported(bench: Bench) -> None:
    rows = [prefilled(bench, seed, 10, 16) for seed in range(4)]
    for index in (0, 2, 3):
        bench.seals()[rows[index].stamps[0], index % 3]["magic"] = 1
    output = bench.step(*((row, 1) for row in rows))
    assert [(found.row, found.layer) for found in sorted(output.breaks, key=lambda found: found.row)] == [(0, 0), (2, 2), (3, 0)]


@pytest.mark.parametrize("shared", ["fresh page", "page in progress"])
def test_two_rows_of_a_step_never_write_one_page(bench: Bench, shared: str) -> None:
    """The second writer meets what it would have met one step later, and the first is not disturbed."""
    first = prefilled(bench, 1, 16 if shared == "fresh page" else 18, 24)
    second = Sequence_(list(first.tokens), array("Q", first.stamps), done=first.done)
    alone = bench.hidden(bench.sequence(first.tokens), [])[first.done : first.done + 2]
    output = bench.step((first, 2), (second, 2))
    found = only(output.breaks)
    assert (found.row, found.check) == (1, SealCheck.REUSED if shared == "fresh page" else SealCheck.FILLED)
    assert same_bits(output.hidden[:2], alone)


def test_slots_past_filled_are_never_used(bench: Bench) -> None:
    """Garbage behind the written slots, in every layer and in every free page, changes no bit."""
    tokens = random_tokens(5, 21, VOCAB)
    clean = bench.hidden(bench.sequence(tokens), [10])
    geometry = bench.backend.geometry
    poison = np.random.RandomState(5).randint(0, 256, size=(24, geometry.layers, geometry.section_bytes - SEAL_BYTES), dtype=np.uint8)
    victim = bench.sequence(tokens)
    sections = bench.backend.arena.memory.reshape(24, geometry.layers, geometry.section_bytes)
    sections[:, :, SEAL_BYTES:] = np.where(poison > 200, np.uint8(0xFF), poison)  # NaN among others
    assert same_bits(bench.hidden(victim, [10]), clean)


def test_pages_before_the_window_are_not_read(window_weights: ModelWeights) -> None:
    for name in BACKENDS:
        bench = Bench(make_backend(name, window_weights, kv_dtype="fp16", page_tokens=PAGE_TOKENS, pages=24))
        victim = prefilled(bench, 1, 30, 40)
        bench.seals()[victim.stamps[0], 0]["nonce"] = 1
        assert not bench.step((victim, 1)).breaks  # position 30 sees 15..30: pages 1, 2, 3
        bench.seals()[victim.stamps[2], 0]["nonce"] = 1
        assert not bench.step((victim, 1)).breaks  # position 31 sees 16..31
        bench.seals()[victim.stamps[4], 0]["nonce"] = 1
        assert only(bench.step((victim, 1)).breaks).ordinal == 2


def test_digests_name_the_payload(bench: Bench) -> None:
    tokens = random_tokens(6, 16, VOCAB)
    first, second = bench.sequence(tokens), bench.sequence(tokens)
    bench.hidden(first, [])
    bench.hidden(second, [3])
    pages = np.array([*first.stamps[0::2], *second.stamps[0::2]], dtype=np.int32)
    digests = bench.backend.seal_digests(pages)
    assert digests.shape == (4, 16)
    assert digests.dtype == np.uint8
    assert same_bits(digests[:2], digests[2:])
    assert not same_bits(digests[0], digests[1])
    assert (bench.seals()[pages]["digest"] != 0).any(axis=-1).all()
    assert same_bits(bench.backend.seal_digests(pages), digests)


def test_every_payload_bit_counts(bench: Bench) -> None:
    sequence = prefilled(bench, 7, 8, 8)
    page = np.array(sequence.stamps[0:1], dtype=np.int32)
    digest = bench.backend.seal_digests(page)
    geometry = bench.backend.geometry
    payload = geometry.element_run_bytes
    for layer in range(geometry.layers):
        for start in (SEAL_BYTES, SEAL_BYTES + geometry.run_bytes):
            for offset in (0, 1, 31, 32, 63, 64, payload // 2 + 5, payload - 1):
                place = layer * geometry.section_bytes + start + offset
                bench.backend.arena.memory[page[0], place] ^= 1 << (offset % 8)
                assert not same_bits(bench.backend.seal_digests(page), digest)
                bench.backend.arena.memory[page[0], place] ^= 1 << (offset % 8)
    assert same_bits(bench.backend.seal_digests(page), digest)


def test_a_page_that_is_not_full_is_not_sealed(bench: Bench) -> None:
    sequence = prefilled(bench, 8, 7, 8)
    with pytest.raises(LawBroken):
        bench.backend.seal_digests(np.array(sequence.stamps[0:1], dtype=np.int32))


def test_wiped_pages_hold_zeros_and_no_seal(bench: Bench) -> None:
    sequence = prefilled(bench, 9, 16, 24)
    other = bench.backend.arena.memory[sequence.stamps[0]].copy()
    bench.backend.wipe(np.array([sequence.stamps[2]], dtype=np.int32))
    assert not bench.backend.arena.memory[sequence.stamps[2]].any()
    assert same_bits(bench.backend.arena.memory[sequence.stamps[0]], other)
    assert only(bench.step((sequence, 1)).breaks).check is SealCheck.MAGIC
