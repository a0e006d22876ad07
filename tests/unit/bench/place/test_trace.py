"""Trace files: every format, every complaint, and arrivals at a rate."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kvseal.bench.place.trace import fixed, read_trace
from kvseal.core.errors import ConfigError


def write(path: Path, name: str, text: str) -> Path:
    (path / name).write_text(text)
    return path / name


def test_csv_with_times_in_any_order_of_columns(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "a.csv", "client,output_tokens,t_s,input_tokens\nx,7,0.5,100\ny,0,1.5,20\n"))
    assert [(job.at_s, job.prompt_tokens, job.output_tokens) for job in trace.jobs] == [(0.5, 100, 7), (1.5, 20, 1)]
    assert trace.timed and trace.rate == pytest.approx(1.0) and trace.means() == (60, 4)


def test_csv_without_times(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "a.csv", "input_tokens,output_tokens\n5,6\n7,8\n"))
    assert not trace.timed and trace.rate == 0.0


def test_azures_published_header(tmp_path: Path) -> None:
    """The 2023 files have seven digits of a second and no zone, those of 2024 a zone."""
    for zone in ("", "+00:00", "Z"):
        rows = "".join(f"2023-11-16 18:1{at}{zone},{tokens}\n" for at, tokens in (("5:46.6805900", "374,44"), ("5:50.9951690", "396,0")))
        trace = read_trace(write(tmp_path, "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))
        assert [(job.prompt_tokens, job.output_tokens) for job in trace.jobs] == [(374, 44), (396, 1)]
        assert trace.timed and [job.at_s for job in trace.jobs] == pytest.approx([0.0, 4.314579])
        assert read_trace(tmp_path / "a.csv", skip=1).jobs[0].prompt_tokens == 396


def test_azures_times_may_be_seconds_and_its_header_bear_a_mark(tmp_path: Path) -> None:
    text = "\ufeffTIMESTAMP, contexttokens ,GENERATEDTOKENS\n100.5,10,1\n99.5,20,2\n"
    trace = read_trace(write(tmp_path, "a.csv", text))
    assert [(job.at_s, job.prompt_tokens) for job in trace.jobs] == [(-1.0, 20), (0.0, 10)]
    assert trace.at_rate(1.0, 2, poisson=False)[0].at_s == 0.0


def test_json_lines_with_blocks(tmp_path: Path) -> None:
    rows = (
        '{"timestamp": 2000, "input_length": 900, "output_length": 3, "hash_ids": [0, 1]}\n\n'
        '{"timestamp": 1000, "input_length": 5, "output_length": 4, "hash_ids": [0]}\n'
    )
    trace = read_trace(write(tmp_path, "a.jsonl", rows))
    assert [job.at_s for job in trace.jobs] == [1.0, 2.0]  # sorted, in seconds
    assert [job.block_tokens for job in trace.jobs] == [512, 512]  # one size for the file
    assert trace.jobs[1].blocks == (0, 1)


def test_a_log_in_any_order_has_its_times(tmp_path: Path) -> None:
    """Newest first, in milliseconds since 1970, behind a byte order mark."""
    rows = "".join(f'{{"timestamp": {1_764_500_000_000 + at}, "input_length": {at}, "output_length": 1}}\n' for at in (5000, 2000, 3000))
    trace = read_trace(write(tmp_path, "a.jsonl", "\ufeff" + rows))
    assert trace.timed and trace.rate == pytest.approx(2 / 3)
    assert [job.prompt_tokens for job in trace.jobs] == [2000, 3000, 5000]
    assert [job.at_s for job in trace.as_recorded(3)] == pytest.approx([0.0, 1.0, 3.0])


def test_of_a_long_file_a_window_is_used_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.bench.place.trace.READ_AT_MOST", 3)
    path = write(tmp_path, "a.csv", "input_tokens,output_tokens\n" + "".join(f"{at},1\n" for at in range(1, 8)))
    first, later, last, asked = read_trace(path), read_trace(path, skip=2), read_trace(path, skip=4), read_trace(path, skip=5, requests=2)
    assert [job.prompt_tokens for job in later.jobs] == [3, 4, 5] and [job.prompt_tokens for job in last.jobs] == [5, 6, 7]
    assert "no more than 3 requests" in first.name and "no more than 3" in later.name and last.name == asked.name == "a.csv"
    assert [job.prompt_tokens for job in asked.jobs] == [6, 7]


def test_conversations_become_a_request_for_each_reply(tmp_path: Path) -> None:
    trace = read_trace(
        write(tmp_path, "a.jsonl", '{"i": 0, "turns": [["h", 30], ["g", 200], ["h", 10], ["g", 5]]}\n{"turns": [["g", 9]]}\n')
    )
    assert [(job.prompt_tokens, job.output_tokens) for job in trace.jobs] == [(30, 200), (240, 5)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "prompt,output_tokens\n1,2\n", "no column input_tokens"),
        ("a.csv", "", "found: none"),
        ("a.csv", "input_tokens,output_tokens\n", "holds no request"),
        ("a.csv", "input_tokens,output_tokens\n1,2\nx,2\n", "input_tokens of line 3 is 'x'"),
        ("a.csv", "input_tokens,output_tokens\n0,2\n", "from 1 to"),
        ("a.csv", "input_tokens,output_tokens,t_s\n1,2,-1\n", "t_s of line 2"),
        ("a.csv", "input_tokens,output_tokens\n1.5,2\n", "whole number"),
        ("a.csv", "input_tokens,output_tokens\n1\n", "output_tokens of line 2 is None"),
        ("a.csv", "TIMESTAMP,ContextTokens\n1,2\n", "no column output_tokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:15:46,1,2\n", "TIMESTAMP of line 2 is '2023-13-16 18:15:46'"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "TIMESTAMP of line 2 is 'noon'"),
        ("a.csv", "ContextTokens,GeneratedTokens\nx,2\n", "ContextTokens of line 2 is 'x'"),
        ("a.jsonl", "not json\n", "line 1 is no JSON"),
        ("a.jsonl", "[1]\n", "no JSON object"),
        ("a.jsonl", '{"input_length": 4}\n', "no output_length"),
        ("a.jsonl", '{"input_length": 4, "output_length": 1, "hash_ids": ["a"]}\n', "hash_ids of line 1"),
        ("a.jsonl", '{"turns": [1]}\n', "a turn of line 1"),
        ("a.jsonl", '{"turns": 1}\n', "turns of line 1"),
        ("a.jsonl", '{"input_length": 4, "output_length": NaN}\n', "output_length"),
        ("a.jsonl", '{"input_length": true, "output_length": 1}\n', "input_length of line 1 is True"),
        ("a.jsonl", '{"input_length": 1' + "0" * 400 + ', "output_length": 1}\n', "from 0 to"),
        ("a.jsonl", '{"turns": [["h", -5], ["g", 3]]}\n', "a turn of line 1"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1 is no JSON"),
        ("a.csv", "input_tokens,output_tokens,x\n1,2," + "y" * 200_000 + "\n", "field limit"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="a\\.") as caught:
        read_trace(write(tmp_path, name, text))
    assert words in str(caught.value)


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_trace(tmp_path / "b.csv")
    with pytest.raises(ConfigError, match="after row 5"):
        read_trace(write(tmp_path, "c.csv", "input_tokens,output_tokens\n5,6\n"), skip=5)


def test_a_coarse_clock_is_spread(tmp_path: Path) -> None:
    rows = "".join(
        f'{{"timestamp": {tick}, "input_length": 9, "output_length": 1}}\n' for tick in (0, 0, 0, 3000, 3000, 3000, 6000, 6000, 6000)
    )
    trace = read_trace(write(tmp_path, "a.jsonl", rows))
    assert trace.spread and [job.at_s for job in trace.jobs] == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_arrivals_have_the_rate_asked_for(tmp_path: Path) -> None:
    trace = read_trace(
        write(tmp_path, "a.csv", "t_s,input_tokens,output_tokens\n" + "".join(f"{at},{5 + at},2\n" for at in (0, 1, 5, 6, 30)))
    )
    own = trace.at_rate(4.0, 12, poisson=False)
    assert (len(own) - 1) / own[-1].at_s == pytest.approx(4.0)
    assert own[1].at_s / own[4].at_s == pytest.approx(1 / 30)  # its own gaps, stretched
    assert [job.prompt_tokens for job in own[:6]] == [5, 6, 10, 11, 35, 5]
    poisson = trace.at_rate(4.0, 4_000, poisson=True, seed=1)
    assert 4_000 / poisson[-1].at_s == pytest.approx(4.0, rel=0.05)
    assert all(later.at_s >= earlier.at_s for earlier, later in pairwise(poisson))
    assert poisson == trace.at_rate(4.0, 4_000, poisson=True, seed=1) != trace.at_rate(4.0, 4_000, poisson=True, seed=2)


def test_a_trace_that_starts_again_shares_nothing_with_before(tmp_path: Path) -> None:
    row = '{"timestamp": %d, "input_length": 20, "output_length": 1, "hash_ids": [1, 2]}\n'
    trace = read_trace(write(tmp_path, "a.jsonl", row % 0 + row % 9))
    jobs = trace.at_rate(1.0, 6, poisson=False)
    assert jobs[0].blocks == jobs[1].blocks and len({job.blocks for job in jobs}) == 3


def test_lengths_alone() -> None:
    assert [job.prompt_tokens for job in fixed(7, 3).at_rate(1.0, 3, poisson=False)] == [7, 7, 7]
