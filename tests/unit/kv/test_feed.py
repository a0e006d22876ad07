"""The feed of a prefix cache: after any number of changes, what was told is what is cached."""

from __future__ import annotations

import random

from kvseal.core.ids import RequestId
from kvseal.kv.feed import FEED_KEY_BYTES, CacheFeed, split_keys
from kvseal.kv.prefix_key import PrefixKeys, pack_tokens
from kvseal.lab.rig import OTHER_SCOPE, SCOPE, Rig


def keys_of(rig: Rig) -> PrefixKeys:
    geometry = rig.kv.geometry
    return PrefixKeys(bytes(32), weights_digest=b"w", adapter="", rope=b"", format=geometry.format, page_tokens=geometry.page_tokens)


def fed_rig(pages: int) -> Rig:
    rig = Rig(pages=pages)
    rig.kv.cache.feed = CacheFeed(keys_of(rig), pages)
    return rig


def told(rig: Rig, known: set[bytes]) -> None:
    assert rig.kv.cache.feed is not None
    came, went = map(split_keys, rig.kv.cache.feed.take())
    assert not known & set(came) and set(went) <= known
    known |= set(came)
    known -= set(went)


def test_what_was_told_is_what_is_cached() -> None:
    rig, known, draw = fed_rig(24), set[bytes](), random.Random(5)
    keys = keys_of(rig)
    prompts = [[seed * 100 + at // 3 for at in range(30)] for seed in range(6)]
    for number in range(60):
        prompt, scope = draw.choice(prompts)[: draw.randrange(5, 30)], draw.choice((SCOPE, OTHER_SCOPE))
        rig.answer(f"r{number}", prompt, draw.randrange(1, 12), scope=scope)
        if number % 7 == 0:
            rig.kv.purge(OTHER_SCOPE)
        if number % 3:
            told(rig, known)
    told(rig, known)
    cached = 0
    for prompt in prompts:
        for scope in (SCOPE, OTHER_SCOPE):
            pages = rig.kv.probe(scope, [*prompt, 1]) // 4
            page_keys = [key[:FEED_KEY_BYTES] for key in keys.keys(scope, prompt)]
            assert [key in known for key in page_keys[: pages + 1]] == [True] * pages + [False] * (len(page_keys) > pages)
            cached += pages
    assert cached and len(known) == int(rig.kv.pool.ledger.cached.sum())


def test_a_broken_page_takes_its_followers_along() -> None:
    rig, known = fed_rig(24), set[bytes]()
    rig.answer("a", range(20), 1)
    told(rig, known)
    assert len(known) == 5
    packed = pack_tokens(range(20))
    stamps = rig.kv.cache.probe(SCOPE, packed)
    rig.kv.cache.forget(stamps[2])
    told(rig, known)
    assert len(known) == 1
    assert rig.kv.admit(RequestId("b"), SCOPE, packed, first_tokens=1) is not None
