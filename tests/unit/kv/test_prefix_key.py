"""Keys: everything that can change K and V changes the key, and nothing can be moved from one field to the next (L4k)."""

from __future__ import annotations

import itertools
import random

import pytest

from kvseal.core.ids import SCOPE_BYTES
from kvseal.kv.prefix_key import KEY_BYTES, PackedTokens, PrefixKeys, pack_tokens, scope_id

from .conftest import ALICE, BOB

SECRET = b"sixteen bytes ok"
BASE = {"weights_digest": b"w", "adapter": "a", "rope": b"r", "format": 1, "page_tokens": 4}
TOKENS = list(range(1, 11))


def test_tokens_are_packed_four_bytes_little_endian() -> None:
    packed = pack_tokens([1, 258, 2**32 - 1])
    assert packed.data == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff"
    assert len(packed) == 3
    assert list(packed.first(2)) == [1, 258]
    assert pack_tokens(packed) is packed
    assert len(PackedTokens(b"")) == 0


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_out_of_range_cannot_be_packed(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


def test_scope_encoding_is_injective_across_fields() -> None:
    parts = ["", "a", "b", "ab", "abc", "bc", "c", "\0"]
    made = {scope_id(SECRET, t, s, a, w.encode()) for t, s, a, w in itertools.product(parts, repeat=4)}
    assert len(made) == len(parts) ** 4
    assert {len(scope) for scope in made} == {SCOPE_BYTES}


def test_scopes_depend_on_the_secret() -> None:
    assert scope_id(SECRET, "t", "s", "a", b"w") == scope_id(SECRET, "t", "s", "a", b"w")
    assert scope_id(SECRET, "t", "s", "a", b"w") != scope_id(SECRET + b"!", "t", "s", "a", b"w")


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes.."])
def test_a_short_secret_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match="at least 16"):
        scope_id(secret, "t", "s", "a", b"w")
    with pytest.raises(ValueError, match="at least 16"):
        PrefixKeys(secret, **BASE)


def test_one_key_per_full_page() -> None:
    keys = PrefixKeys(SECRET, **BASE)
    for tokens, pages in ((3, 0), (4, 1), (7, 1), (8, 2), (10, 2)):
        found = keys.keys(ALICE, TOKENS[:tokens])
        assert [len(key) for key in found] == [KEY_BYTES] * pages
    assert keys.keys(ALICE, pack_tokens(TOKENS)) == keys.keys(ALICE, TOKENS)
    assert keys.keys(ALICE, TOKENS)[:1] == keys.keys(ALICE, TOKENS[:4])


@pytest.mark.parametrize(
    "change",
    [{"weights_digest": b"W"}, {"adapter": "A"}, {"rope": b"R"}, {"format": 2}, {"weights_digest": b"wa", "adapter": ""}],
)
def test_every_part_of_the_root_changes_every_key(change: dict[str, object]) -> None:
    plain = PrefixKeys(SECRET, **BASE).keys(ALICE, TOKENS)
    other = PrefixKeys(SECRET, **{**BASE, **change}).keys(ALICE, TOKENS)
    assert not set(plain) & set(other)


def test_scope_secret_and_page_size_change_every_key() -> None:
    plain = PrefixKeys(SECRET, **BASE).keys(ALICE, TOKENS)
    assert not set(plain) & set(PrefixKeys(SECRET, **BASE).keys(BOB, TOKENS))
    assert not set(plain) & set(PrefixKeys(SECRET + b"!", **BASE).keys(ALICE, TOKENS))
    wide = PrefixKeys(SECRET, **{**BASE, "page_tokens": 8}).keys(ALICE, TOKENS)
    assert plain[-1] != wide[-1]


def test_keys_are_chained_over_the_whole_prefix() -> None:
    keys = PrefixKeys(SECRET, **BASE)
    draw = random.Random(1)
    for _ in range(100):
        tokens = [draw.randrange(50_000) for _ in range(16)]
        place = draw.randrange(16)
        other = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
        same = [a == b for a, b in zip(keys.keys(ALICE, tokens), keys.keys(ALICE, other), strict=True)]
        assert same == [page < place // 4 for page in range(4)]
