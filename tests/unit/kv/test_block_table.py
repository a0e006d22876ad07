"""The block table: place (L6), length follows evidence (L5), trim means gone (L10), nothing changes under a reader (L8)."""

from __future__ import annotations

from array import array

import pytest

from kvseal.core.batch import TableView
from kvseal.core.errors import LawBroken
from kvseal.core.laws import Law
from kvseal.kv.block_table import BlockTable

from .conftest import ALICE


def stamps(*pages: int) -> array[int]:
    return array("Q", [word for page in pages for word in (page, 1000 + page)])


@pytest.fixture
def table() -> BlockTable:
    table = BlockTable(ALICE, 4)
    table.extend(stamps(5, 6, 7))
    return table


def test_it_is_what_the_kernels_read(table: BlockTable) -> None:
    view: TableView = table
    assert (view.scope, view.valid_tokens, view.stamps) == (ALICE, 0, stamps(5, 6, 7))
    assert (table.pages, table.room_tokens) == (3, 12)


def test_valid_tokens_move_forward_within_the_pages(table: BlockTable) -> None:
    table.advance(7)
    for end in (7, 3, 13):
        with pytest.raises(LawBroken) as caught:
            table.advance(end)
        assert caught.value.law is Law.L5
    table.advance(12)
    assert table.valid_tokens == 12


def test_swap_leaves_the_array_that_a_step_was_given(table: BlockTable) -> None:
    in_flight = table.stamps
    table.swap(1, stamps(9))
    assert table.stamps == stamps(5, 9, 7)
    assert in_flight == stamps(5, 6, 7)
    with pytest.raises(LawBroken, match="law L6"):
        table.swap(2, stamps(1, 2))


@pytest.mark.parametrize(("keep", "valid"), [(3, 11), (2, 8), (1, 4), (0, 0)])
def test_trim_takes_pages_and_their_tokens(table: BlockTable, keep: int, valid: int) -> None:
    table.advance(11)
    in_flight = table.stamps
    table.trim(keep)
    assert (table.pages, table.valid_tokens) == (keep, valid)
    assert len(in_flight) == 6
