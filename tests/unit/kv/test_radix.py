"""The radix tree: exact tokens, one tree per scope, splits that move only what they must (L4, L4k)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvseal.core.errors import LawBroken
from kvseal.kv.prefix_key import pack_tokens
from kvseal.kv.radix import RadixTree

from .conftest import ALICE, BOB, PAGE


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(PAGE, 100)


def stamps(*pages: int) -> array[int]:
    return array("Q", [word for page in pages for word in (page, 1000 + page)])


def run(*letters: int) -> bytes:
    """One page per letter, all its tokens that letter."""
    return pack_tokens([letter for letter in letters for _ in range(PAGE)]).data


def pages(found: Sequence[int]) -> list[int]:
    return list(found[::2])


def match(tree: RadixTree, *letters: int, limit: int | None = None) -> list[int]:
    found = tree.match(ALICE, run(*letters), len(letters) if limit is None else limit)
    tree.check()
    return pages(found)


def test_an_empty_tree_knows_nothing(tree: RadixTree) -> None:
    assert match(tree, 1) == []
    assert tree.scopes == 0


def test_a_run_is_found_up_to_where_it_differs(tree: RadixTree) -> None:
    assert not tree.insert(ALICE, None, run(1, 2, 3, 4, 5, 6, 7), stamps(11, 12, 13, 14, 15, 16, 17))
    assert match(tree, 1, 2, 3, 4, 5, 6, 7) == [11, 12, 13, 14, 15, 16, 17]
    for differs in range(7):
        asked = [1, 2, 3, 4, 5, 6, 7]
        asked[differs] = 9
        assert match(tree, *asked) == [11, 12, 13, 14, 15, 16, 17][:differs]
    assert match(tree, 1, 2, 3, 4, 5, 6, 7, 8) == [11, 12, 13, 14, 15, 16, 17]
    assert match(tree, 1, 2, 3, 4, 5, 6, 7, limit=3) == [11, 12, 13]
    assert match(tree, 1, 2, 3, limit=0) == []
    assert tree.node_count == 1


def test_one_token_decides(tree: RadixTree) -> None:
    tree.insert(ALICE, None, pack_tokens([1, 1, 1, 1, 2, 2, 2, 2]).data, stamps(11, 12))
    for place in range(8):
        tokens = [1, 1, 1, 1, 2, 2, 2, 2]
        tokens[place] += 1 << 16
        assert pages(tree.match(ALICE, pack_tokens(tokens).data, 2)) == [11][: place // PAGE]


def test_scopes_never_see_each_other(tree: RadixTree) -> None:
    tree.insert(ALICE, None, run(1, 2), stamps(11, 12))
    assert not tree.match(BOB, run(1, 2), 2)
    tree.insert(BOB, None, run(1, 2), stamps(21, 22))
    assert pages(tree.match(BOB, run(1, 2), 2)) == [21, 22]
    with pytest.raises(LawBroken, match="law L4 "):
        tree.insert(BOB, 12, run(3), stamps(23))
    assert tree.scopes == 2


def test_a_branch_splits_the_run(tree: RadixTree) -> None:
    tree.insert(ALICE, None, run(1, 2, 3, 4), stamps(11, 12, 13, 14))
    lower = tree.home(14)
    assert pages(tree.insert(ALICE, None, run(1, 2, 8, 9), stamps(21, 22, 23, 24))) == [11, 12]
    assert match(tree, 1, 2, 3, 4) == [11, 12, 13, 14]
    assert match(tree, 1, 2, 8, 9) == [11, 12, 23, 24]
    assert tree.home(14) is lower, "the lower part keeps its identity"
    assert tree.home(21) is None, "a twin stays outside"
    assert (tree.node_count, tree.pages) == (3, 6)


def test_growth_at_the_end_extends_the_node_in_place(tree: RadixTree) -> None:
    tree.insert(ALICE, None, run(1), stamps(11))
    tree.insert(ALICE, 11, run(2, 3), stamps(12, 13))
    assert match(tree, 1, 2, 3) == [11, 12, 13]
    assert tree.node_count == 1


def test_insertion_behind_a_page_inside_a_run(tree: RadixTree) -> None:
    tree.insert(ALICE, None, run(1, 2, 3), stamps(11, 12, 13))
    assert pages(tree.insert(ALICE, 11, run(2, 3), stamps(21, 22))) == [12, 13]
    assert pages(tree.insert(ALICE, 11, run(2, 3, 4), stamps(21, 22, 24))) == [12, 13]
    assert match(tree, 1, 2, 3, 4) == [11, 12, 13, 24]
    assert not tree.insert(ALICE, 12, run(7), stamps(27))
    assert match(tree, 1, 2, 7) == [11, 12, 27]
    assert pages(tree.insert(ALICE, 12, run(7, 8), stamps(97, 28))) == [27]
    assert match(tree, 1, 2, 7, 8) == [11, 12, 27, 28]


def test_insertion_behind_an_unknown_page_is_refused(tree: RadixTree) -> None:
    with pytest.raises(LawBroken):
        tree.insert(ALICE, 5, run(1), stamps(6))


def test_cut_takes_a_page_and_all_that_follows(tree: RadixTree) -> None:
    tree.insert(ALICE, None, run(1, 2, 3), stamps(11, 12, 13))
    tree.insert(ALICE, 13, run(4), stamps(14))
    tree.insert(ALICE, 12, run(8, 9), stamps(28, 29))
    assert sorted(pages(tree.cut(13))) == [13, 14]
    assert match(tree, 1, 2, 3) == [11, 12]
    assert sorted(pages(tree.cut(12))) == [12, 28, 29]
    assert match(tree, 1, 2, 8) == [11]
    assert pages(tree.cut(11)) == [11]
    assert (tree.pages, tree.node_count, tree.scopes) == (0, 0, 0)
    tree.check()
    with pytest.raises(LawBroken, match="not in the tree"):
        tree.cut(11)


def test_cut_tail_and_cut_scope(tree: RadixTree) -> None:
    tree.insert(ALICE, None, run(1, 2, 3), stamps(11, 12, 13))
    tree.insert(ALICE, None, run(5), stamps(15))
    tree.insert(BOB, None, run(5), stamps(25))
    node = tree.home(13)
    assert node is not None
    assert pages(tree.cut_tail(node, 2)) == [12, 13]
    assert match(tree, 1, 2, 3) == [11]
    assert sorted(pages(tree.cut_scope(ALICE))) == [11, 15]
    assert not tree.cut_scope(ALICE)
    assert (tree.pages, tree.scopes) == (1, 1)
    tree.check()


def test_a_use_of_a_child_is_a_use_of_its_parent(tree: RadixTree) -> None:
    tree.insert(ALICE, None, run(1, 2), stamps(11, 12))
    tree.insert(ALICE, 11, run(3), stamps(13))
    parent, child = tree.home(11), tree.home(12)
    assert parent is not None and child is not None
    parent.last_use, child.last_use = 3, 8
    tree.cut(12)
    assert parent.last_use == 8


def test_a_root_is_neither_split_nor_cut(tree: RadixTree) -> None:
    tree.insert(ALICE, None, run(1), stamps(11))
    node = tree.home(11)
    assert node is not None and node.parent is not None
    for act in (lambda root: tree._split(root, 0), tree._unlink):
        with pytest.raises(LawBroken, match="a root"):
            act(node.parent)


@pytest.mark.parametrize("damage", ["home", "key", "count", "length"])
def test_check_finds_damage(tree: RadixTree, damage: str) -> None:
    tree.insert(ALICE, None, run(1, 2), stamps(11, 12))
    node = tree.home(11)
    assert node is not None and node.parent is not None
    if damage == "home":
        tree._homes[12] = None
    elif damage == "key":
        node.parent.children = {run(7): node}
    elif damage == "count":
        tree.pages += 1
    else:
        node.run += run(3)
    with pytest.raises(LawBroken, match="law L2"):
        tree.check()
