"""K1 (CVE-2025-25183): prefixes are found by a predictable hash that is not compared afterwards, so a colliding prompt is answered from
another one's K and V. Injected: a hash of 8 bits."""

from __future__ import annotations

from array import array

from kvseal.core.ids import Scope
from kvseal.core.outcome import Completed
from kvseal.kv.manager import KVManager
from kvseal.kv.prefix_key import PackedTokens, PrefixKeys
from kvseal.lab.rig import Rig, truth

from .rigging import prompt


def weak_hash(data: bytes) -> int:
    return sum(data) % 256


VICTIM = prompt(1, 9)
CHOSEN = [*VICTIM[:3][::-1], *VICTIM[3:8], 77]
"""The attacker's: other tokens, the same weak hash of each page."""


def break_lookup(kv: KVManager) -> None:
    """A dictionary by weak hash takes the tree's place, and nobody compares tokens."""
    known: dict[tuple[Scope, int], array[int]] = {}
    publish, probe = kv.cache.publish, kv.cache.probe

    def weak_probe(scope: Scope, tokens: PackedTokens) -> array[int]:
        return known.get((scope, weak_hash(tokens.data[:16])), array("Q")) or probe(scope, tokens)

    def noting_publish(pin: object, parent: int | None, run: bytes, stamps: array[int]) -> array[int]:
        if parent is None:
            known[pin.scope, weak_hash(run[:16])] = stamps[:2]  # type: ignore[attr-defined]
        return publish(pin, parent, run, stamps)  # type: ignore[arg-type]

    kv.cache.probe = weak_probe  # type: ignore[method-assign]
    kv.cache.publish = noting_publish  # type: ignore[assignment, method-assign]


def test_the_prompts_collide() -> None:
    rig = Rig()
    one, other = rig.kv.pack(VICTIM).data[:16], rig.kv.pack(CHOSEN).data[:16]
    assert one != other and weak_hash(one) == weak_hash(other)


def test_a_hit_is_found_by_the_tokens_themselves() -> None:
    rig = Rig()
    rig.answer("chosen", CHOSEN, 4)
    victim = rig.answer("victim", VICTIM, 4)
    assert victim.cached_tokens == 0 and victim.tokens == truth(VICTIM, 4)


def test_keys_between_nodes_are_keyed_and_whole() -> None:
    def keys(secret: bytes, tokens: list[int]) -> list[bytes]:
        made = PrefixKeys(secret, weights_digest=b"w", adapter="", rope=b"r", format=1, page_tokens=4)
        return list(made.keys(Scope(bytes(16)), tokens))

    ours, theirs = keys(b"k" * 16, VICTIM), keys(b"k" * 16, CHOSEN)
    assert not set(ours) & set(theirs)
    assert not set(ours) & set(keys(b"other secret 123", VICTIM))  # nobody outside can compute or test for one
    assert min(map(len, ours)) == 32


def test_with_the_weak_hash_the_attacker_would_have_answered() -> None:
    rig = Rig()
    break_lookup(rig.kv)
    rig.answer("chosen", CHOSEN, 4)
    victim = rig.submit("victim", VICTIM, 4)
    while rig.engine.has_work and not victim.tokens:
        rig.step()
    assert victim.cached_tokens == 4 and not isinstance(victim.outcome, Completed)
    assert victim.tokens[0] != truth(VICTIM, 1)[0]
