"""Text of a stream: whole characters, and not one character past a stop string, however the tokens fall."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvseal.serve.detokenizer import Detokenizer
from kvseal.serve.tokenizer import Tokenizer
from kvseal.serve.tokenizer_files import from_gguf_metadata

from .tiny_model import tiny_metadata

_TINY = from_gguf_metadata(tiny_metadata())


def _run(detokenizer: Detokenizer, tokens: list[int]) -> tuple[list[str], int]:
    """Everything released, step by step, and how many tokens."""
    steps, released_tokens = [], 0
    for token in tokens:
        released = detokenizer.push(token)
        steps.append(released.text)
        released_tokens += released.tokens
    last = detokenizer.finish()
    return [*steps, last.text], released_tokens + last.tokens


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 261), max_size=60), skip=st.booleans())
def test_pieces_join_to_the_whole(tokens: list[int], skip: bool) -> None:
    steps, released = _run(Detokenizer(_TINY, skip_special_tokens=skip), tokens)
    assert "".join(steps) == _TINY.decode(tokens, skip_special_tokens=skip)
    assert released == len(tokens)


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="aé日😀", max_size=12))
def test_characters_are_never_split(text: str) -> None:
    tokens = [3 + byte for byte in text.encode()]
    steps, _ = _run(Detokenizer(_TINY), tokens)
    assert "\ufffd" not in "".join(steps)
    assert "".join(steps) == text


def _first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Plainly: grow the text one character at a time until it ends with a stop string; the longest counts."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found)), end
    return None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=30),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_stop_strings_against_a_plain_search(text: str, stops: list[str], include: bool) -> None:
    found = _first_stop(text, stops)
    expected = text if found is None else text[: found[1]] if include else text[: found[0]]
    detokenizer = Detokenizer(_TINY, stops, include_stop_in_output=include)
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push(3 + byte).text
        assert expected.startswith(shown), "nothing past the stop is ever shown"
    shown += detokenizer.finish().text
    assert shown == expected
    assert detokenizer.stopped_by == (None if found is None else text[found[0] : found[1]])


def test_stop_inside_and_across_tokens(tiny: Tokenizer) -> None:
    ids = tiny.encode("xhellxhe")  # x, hell, x, he
    assert len(ids) == 4
    steps, released = _run(Detokenizer(tiny, ["lx"]), ids)
    assert steps == ["x", "hel", "", "", ""]
    assert released == 1, "a token that is cut by the stop is not shown"


def test_min_tokens_put_off_stop_strings(tiny: Tokenizer) -> None:
    ids = tiny.encode("axbxc", add_special_tokens=False)
    steps, _ = _run(Detokenizer(tiny, ["x"], min_tokens=3), ids)
    assert "".join(steps) == "axb"


@pytest.mark.parametrize("stop", ["ab" * 500, "a" * 1000])
def test_holding_back_is_bounded_by_the_stop(tiny: Tokenizer, stop: str) -> None:
    detokenizer = Detokenizer(tiny, [stop])
    a = tiny.encode("a")[0]
    shown = sum(len(detokenizer.push(a).text) for _ in range(999))
    assert shown == (998 if stop.startswith("ab") else 0)
    assert len(detokenizer.finish().text) == 999 - shown
