"""F3 (vllm#55097): a null block id is treated as a real place.  G4 (sglang#19353): a token index is used as a page index."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from kvseal.handoff.messages import Grant, PagesReady, packed_stamps, unpacked_stamps
from kvseal.lab.pair import Pair
from kvseal.node import peer_messages as p

from .handing import ask, changed, said, well


def page_zero(stamps: array[int]) -> array[int]:
    return array("Q", [0, 0, *stamps[2:]])


def by_token(stamps: array[int]) -> array[int]:
    return array("Q", [word if at % 2 else 8 * word for at, word in enumerate(stamps)])


def far_outside(stamps: array[int]) -> array[int]:
    return array("Q", [2**40, *stamps[1:]])


def swapped(stamps: array[int]) -> array[int]:
    return array("Q", [*stamps[2:4], *stamps[:2], *stamps[4:]])


@pytest.mark.parametrize("wrong", [page_zero, by_token, far_outside, swapped])
@pytest.mark.parametrize("kind", [Grant, PagesReady])
def test_a_wrong_place_is_never_read_or_written(kind: type[Grant | PagesReady], wrong: object) -> None:
    def misplace(_node: object, relay: p.Relay) -> list[p.Relay]:
        message = said(relay)
        if isinstance(message, kind):
            return [changed(relay, msgspec.structs.replace(message, stamps=packed_stamps(wrong(unpacked_stamps(message.stamps)))))]  # type: ignore[operator]
        return [relay]

    pair = Pair()
    pair.filter = misplace  # type: ignore[assignment]
    well(pair, ask(pair))
    assert pair.decode.stats().handoff["received"] == 0
