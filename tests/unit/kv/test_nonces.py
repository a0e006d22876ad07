"""Nonces: the cipher is the published one, no value comes twice, none is 0, and none can be told without the key (L3)."""

from __future__ import annotations

import itertools

import numpy as np

from kvseal.kv.nonces import NonceSource, encrypt, round_keys


def test_the_cipher_matches_the_published_test_vector() -> None:
    # Speck64/128, appendix C of IACR ePrint 2013/404: key 1b1a1918 13121110 0b0a0908 03020100, text 3b726574 7475432d.
    key = np.array([0x03020100, 0x0B0A0908, 0x13121110, 0x1B1A1918], dtype="<u4").tobytes()
    text = np.array([0x3B7265747475432D], dtype=np.uint64)
    assert encrypt(text, round_keys(key)).tolist() == [0x8C6FA548454E028B]


def test_no_nonce_comes_twice_and_none_is_zero() -> None:
    source = NonceSource(b"secret", batch=64)
    drawn = [source.next() for _ in range(20_000)]
    assert len(set(drawn)) == len(drawn)
    assert 0 not in drawn


def test_same_secret_same_nonces_other_secret_others() -> None:
    first, again, other = NonceSource(b"a"), NonceSource(b"a"), NonceSource(b"b")
    drawn = [first.next() for _ in range(100)]
    assert drawn == [again.next() for _ in range(100)]
    assert not set(drawn) & {other.next() for _ in range(100)}


def test_batches_do_not_change_the_sequence() -> None:
    small, large = NonceSource(b"a", batch=7), NonceSource(b"a", batch=100)
    assert [small.next() for _ in range(300)] == [large.next() for _ in range(300)]


def test_neighbours_look_unrelated() -> None:
    source = NonceSource(b"secret")
    drawn = [source.next() for _ in range(4000)]
    flips = [bin(a ^ b).count("1") for a, b in itertools.pairwise(drawn)]
    assert 31 < sum(flips) / len(flips) < 33


def test_the_counter_that_maps_to_zero_is_left_out() -> None:
    source = NonceSource(b"secret", batch=8)
    keys = round_keys(b"k" * 16)
    # The inverse of one value is found by letting the source stand just before it: run the cipher backwards.
    source._round_keys = keys
    source._counter = _decrypt_zero(keys) - 3
    drawn = [source.next() for _ in range(7)]
    assert 0 not in drawn
    assert len(set(drawn)) == 7


def _decrypt_zero(keys: tuple[int, ...]) -> int:
    mask = 0xFFFFFFFF
    x = y = 0
    for key in reversed(keys):
        y = x ^ y
        y = ((y >> 3) | (y << 29)) & mask
        x = ((x ^ key) - y) & mask
        x = ((x << 8) | (x >> 24)) & mask
    return (x << 32) | y


def test_many_at_once_are_the_ones_that_would_come_one_by_one() -> None:
    one_by_one, at_once = NonceSource(b"a secret", batch=16), NonceSource(b"a secret", batch=16)
    assert [*at_once.take(5), at_once.next(), *at_once.take(40)] == [one_by_one.next() for _ in range(46)]
