"""The scoreboard: ratios pair by pair, targets, and that every report shows the same numbers."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvseal.bench.board import main as board_main
from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target, missing
from kvseal.bench.suite.page import page
from kvseal.bench.suite.reports import MARKS
from kvseal.bench.suite.text import (
    all_entries,
    as_json,
    board_markdown,
    board_text,
    from_json,
    number,
    score_text,
    summary_text,
    target_text,
    verdict_text,
)
from kvseal.core.errors import ConfigError


def ratio(target: Target | None = None, **more: str) -> Entry:
    a, b = Side("ours", "tok/s", (30.0, 44.0, 90.0, 40.0, 52.0)), Side("theirs", "tok/s", (10.0, 11.0, 30.0, 8.0, 13.0))
    return Entry(figure="9", name="ours / theirs", a=a, b=b, target=target, **more)


def test_a_ratio_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    entry = ratio()
    assert entry.ratios == (3.0, 4.0, 3.0, 5.0, 4.0)
    assert entry.score == 4.0  # medians are 44 and 11 as well, so look at another
    skewed = Entry(figure="1", name="x", a=Side("a", "s", (1.0, 10.0, 2.0)), b=Side("b", "s", (2.0, 4.0, 1.0)))
    assert skewed.score == 2.0 and skewed.a is not None and skewed.b is not None and skewed.a.middle / skewed.b.middle == 1.0


def test_a_value_is_judged_by_its_median() -> None:
    entry = Entry(figure="7", name="us", a=Side("x", "us", (1.0, 5.0, 2.0)), target=Target(high=2.0))
    assert entry.score == 2.0 and entry.met and entry.verdict == "met"


@pytest.mark.parametrize(
    ("target", "met"), [(Target(low=4.0), True), (Target(low=4.01), False), (Target(high=3.9), False), (Target(low=3.9, high=4.1), True)]
)
def test_targets(target: Target, met: bool) -> None:
    assert ratio(target).met is met
    assert ratio(target).verdict == ("met" if met else "MISSED")


def test_without_values_there_must_be_a_reason() -> None:
    with pytest.raises(ValueError, match="neither values nor a reason"):
        Entry(figure="1", name="x")
    with pytest.raises(ValueError, match="neither values nor a reason"):
        Entry(figure="1", name="x", a=Side("a", "s", ()))
    entry = missing("1", "x", "a request failed", Target(low=1.0))
    assert entry.score is None and entry.met is None and entry.verdict == "no score"


def test_a_ratio_needs_whole_pairs() -> None:
    with pytest.raises(ValueError, match="pairs"):
        Entry(figure="1", name="x", a=Side("a", "s", (1.0, 2.0)), b=Side("b", "s", (1.0,)))
    with pytest.raises(ValueError, match="above zero"):
        Entry(figure="1", name="x", a=Side("a", "s", (1.0,)), b=Side("b", "s", (0.0,)))


def test_few_pairs_are_said_to_be_few() -> None:
    short = Entry(figure="1", name="x", a=Side("a", "s", (1.0,)), b=Side("b", "s", (1.0,)), target=Target(low=0.5))
    assert short.is_short and verdict_text(short) == "met, few pairs"
    assert not ratio().is_short
    single = Entry(figure="1", name="x", a=Side("a", "s", (1.0,)))
    assert not single.is_short


def test_numbers_are_written_with_enough_digits_and_no_exponent() -> None:
    shown = [number(value) for value in (0.0, 123456.7, 123.45, 12.345, 1.0, 0.5, 0.02, 0.00123)]
    assert shown == ["0", "123,457", "123.5", "12.35", "1.00", "0.500", "0.0200", "0.001230"]
    assert score_text(ratio()) == "4.00 (3.00 to 5.00, n=5)"
    assert (target_text(Target(low=2.4)), target_text(Target(high=0.002)), target_text(Target(0.9, 1.1)), target_text(None)) == (
        ">= 2.40",
        "<= 0.002000",
        "0.900 to 1.10",
        "",
    )


@pytest.fixture
def results() -> list[Result]:
    plot = Plot("speed <&>", "tokens", "GOP/s", (Line("q4m", ((1.0, 20.0), (8.0, 90.0))),), ((170.0, "target"),))
    many = [
        ratio(Target(low=3.5), checked="outputs of 3 requests equal", note='a <b> & "c"'),
        missing("13", "kernels | broken", "a request failed & ended", Target(low=1.7)),
        Entry(figure="growth", name="scrape", a=Side("us", "us", (3.0, 4.0)), target=Target(high=1.0)),
    ]
    first = Result(name="decode", title="Decode", entries=many, plots=[plot], settings={"threads": "2"}, remarks=["one"], seconds=3.0)
    second = Result(name="hits", title="Hits", entries=[Entry(figure="4", name="hits", a=Side("h", "%", (99.0,)))], other_cores=0.4)
    return [first, second]


MACHINE = {"processor": "A <fast> one", "cores": "2"}


def test_json_holds_everything_and_comes_back(results: list[Result]) -> None:
    written = json.loads(json.dumps(as_json(results, MACHINE)))
    back, machine = from_json(written)
    assert json.loads(json.dumps(as_json(back, machine))) == written and list(back[0].entries) == list(results[0].entries)
    entry = written["results"][0]["entries"][0]
    assert entry["a"]["values"] == [30.0, 44.0, 90.0, 40.0, 52.0] and entry["ratios"] == [3.0, 4.0, 3.0, 5.0, 4.0]
    assert entry["score"] == 4.0 and entry["met"] is True and entry["verdict"] == "met"
    with pytest.raises(ValueError, match="no report of kvseal bench"):
        from_json({"schema": "something else"})


def test_figures_come_in_order(results: list[Result]) -> None:
    assert [entry.figure for entry in all_entries(results)] == ["4", "9", "13", "growth"]


def test_text_shows_both_sides_and_what_is_missed(results: list[Result]) -> None:
    text = board_text(all_entries(results))
    assert "ours: 44.00 tok/s  |  theirs: 11.00 tok/s" in text
    assert "no score: a request failed & ended" in text
    assert re.search(r"growth  scrape +3\.50 us \(3\.00 to 4\.00, n=2\) +<= 1\.00 +MISSED", text)
    assert summary_text(all_entries(results)) == "1 of 2 targets met; 1 without a score; missed: growth scrape"


def test_markdown_is_a_table_of_the_same_numbers(results: list[Result]) -> None:
    rows = [line for line in board_markdown(results, MACHINE).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert all(len(re.split(r"(?<!\\)\|", row)) == 9 for row in rows)
    assert any(score_text(results[0].entries[0]) in row for row in rows)


class Balanced(HTMLParser):
    """Fails on a tag that is closed without having been opened, or left open."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_html_with_the_numbers_of_the_json(results: list[Result]) -> None:
    document = page(results, MACHINE)
    parser = Balanced()
    parser.feed(document)
    parser.close()
    assert not parser.open
    words = " ".join(parser.text)
    for entry in all_entries(results):
        assert entry.name in words
        assert score_text(entry) in words
    assert document.count('class="dot"') == sum(len(entry.ratios) for entry in all_entries(results))
    assert not [value for name, value in parser.attributes if name in ("src", "href")], "nothing is fetched"
    assert "<script" not in document


def test_stored_runs_make_the_same_reports_again(tmp_path: Path, results: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    old = Result(name="hits", title="Hits", entries=[missing("4", "hits", "died")])
    first, second, document = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "page.md"
    first.write_text(json.dumps(as_json([results[0], old], MACHINE)))
    second.write_text(json.dumps(as_json([results[1]], MACHINE)))
    document.write_text(f"before\n{MARKS[0]}\nold table\n{MARKS[1]}\nafter\n")
    assert board_main([str(first), str(second), "--markdown", str(document)]) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith(f"{MARKS[1]}\nafter\n") and "old table" not in text
    assert board_markdown(results, MACHINE) in text
    assert summary_text(all_entries(results)) in capsys.readouterr().out
    (tmp_path / "c.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no stored run"):
        board_main([str(tmp_path / "c.json")])
