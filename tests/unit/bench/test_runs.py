"""Each benchmark in a tiny configuration: that it measures what it says, and that nothing counts when something is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvseal.bench import admission, batch, decode, growth, hits, linear, lookup, noreuse, prefix, scheduler, stall, step
from kvseal.bench.suite import command, foreign
from kvseal.bench.suite.board import Entry, Target
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.foreign import ForeignPython
from kvseal.bench.suite.null_model import NullModel
from kvseal.bench.suite.rig import Ran, Rig, RunFailed, check_equal
from kvseal.bench.suite.workloads import Ask, Workload
from kvseal.core.errors import ConfigError

TINY = Context(name="test", quick=True, pairs=1, threads=1)


@pytest.fixture(scope="module")
def tiny(demo_model_path: Path) -> Context:
    return replace(TINY, model=str(demo_model_path))


@pytest.fixture(scope="module")
def rig(tiny: Context) -> Iterator[Rig]:
    with Rig(tiny, pool_tokens=512, context_tokens=128, max_running=8) as made:
        yield made


def asks(*shapes: tuple[int, int]) -> list[Ask]:
    return [Ask(tuple(100 + 7 * index + at for at in range(prompt)), output) for index, (prompt, output) in enumerate(shapes)]


# --- runs on the engine ---


def test_a_run_gives_what_was_asked_for(rig: Rig) -> None:
    ran = rig.run(asks((5, 3), (9, 1), (2, 6)))
    assert [len(output) for output in ran.outputs] == [3, 1, 6] and ran.output_tokens == 10
    assert ran.prompt_tokens == 16 and ran.steps > 0 and ran.seconds > 0 and ran.cpu_seconds > 0
    assert all(list(times) == sorted(times) and times[-1] <= ran.seconds for times in ran.token_times_s)


def test_lengths_that_the_engine_does_not_know_are_met_and_change_nothing_before_the_end(rig: Rig) -> None:
    some = asks((5, 4), (9, 7))
    known, hidden = rig.run(some), rig.run(some, hidden=True)
    assert [len(output) for output in hidden.outputs] == [4, 7]
    assert [one[:-1] for one in known.outputs] == [one[:-1] for one in hidden.outputs]
    assert {one[-1] for one in hidden.outputs} == {rig.engine.report.vocab_size - 1}


def test_a_step_takes_longer_than_its_kernels_and_only_steps_of_all_count(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "PROMPT_TOKENS", 8)
    began_s = time.perf_counter()
    step_s, kernel_s = step.step_and_kernels_s(rig, rows=3, steps=6)
    assert 0 < kernel_s < step_s < time.perf_counter() - began_s
    assert rig.watcher.on_step is None
    monkeypatch.setattr(step, "lead_steps", lambda rows, chunk_tokens: 0)
    with pytest.raises(RunFailed, match="not in 6 did all requests decode together"):
        step.step_and_kernels_s(rig, rows=3, steps=6)


def test_all_rows_decode_together_for_as_many_steps_as_asked_however_small_the_chunks(tiny: Context) -> None:
    """A busy machine makes chunks small: without a lead the first rows end before the last ones begin."""
    with Rig(tiny, step_s=None, pool_tokens=2_048, context_tokens=192, max_running=4, chunk_tokens=16) as small:
        step_s, kernel_s = step.step_and_kernels_s(small, rows=3, steps=2)
    assert 0 < kernel_s < step_s


def test_apart_shares_nothing_and_together_shares_whole_pages(rig: Rig) -> None:
    same = [Ask(tuple(range(200, 240)), 1)] * 3
    assert rig.run(same, apart=True).cached_tokens == 0
    assert rig.run(same).cached_tokens == 2 * 32


def test_outputs_that_differ_and_requests_that_are_refused_have_no_score(rig: Rig) -> None:
    ran = rig.run(asks((5, 3)))
    assert "equal" in check_equal("x", ran, ran)
    other = replace(ran, outputs=((*ran.outputs[0][:2], ran.outputs[0][2] + 1),))
    with pytest.raises(RunFailed, match="request 0 differ from token 2 on"):
        check_equal("x", ran, other)
    with pytest.raises(RunFailed, match="refused"):
        rig.run(asks((120, 30)))


def test_a_request_held_back_starts_when_there_is_room(rig: Rig) -> None:
    most: list[int] = []

    def one_by_one(_: Ask, running: object, produced: int) -> bool:
        most.append(len(running))  # type: ignore[arg-type]
        return not running

    ran = rig.run(asks((5, 3), (5, 3), (5, 3)), may_start=one_by_one)
    assert max(most) == 1 and max(ran.token_times_s[0]) < min(ran.token_times_s[1])


# --- figures on the engine ---


def test_prefix(rig: Rig, tiny: Context) -> None:
    head = tuple(range(300, 364))
    work = Workload("tiny", (tuple(Ask((*head, 900 + index, 901), 2) for index in range(4)),), head, True)
    entry = prefix.compare(rig, work, prefix.slices(work, 4, 1), prefix.Plan("tiny", 4, 2, Target(low=0.01)), tiny)
    assert entry.figure == "3" and entry.name == "prefix reuse, tiny (synthetic)" and entry.met
    assert entry.checked == "outputs of 2 requests equal, token for token"
    assert "on: 4 requests, off: 2 of them" in entry.note
    assert "97.0% of 66 prompt tokens found, 97.0% could be" in entry.note


def test_batch(tiny: Context) -> None:
    size = batch.Size(3, 16)
    with (
        Rig(tiny, pool_tokens=size.slots, context_tokens=size.longest_tokens) as rig,
        Rig(tiny, pool_tokens=1_024, context_tokens=size.longest_tokens) as unlimited,
    ):
        runs, waste, _ = batch.measure(tiny, rig, unlimited, size)
    entries = batch.entries_of(runs, waste, size)
    assert [entry.figure for entry in entries] == ["1", "1", "1", "2"] and all(entry.score is not None for entry in entries)
    assert 0 < waste.values[0] < 100
    assert runs.paged[0].outputs == runs.longest[0].outputs


def test_reservations_hold_back_what_does_not_fit() -> None:
    may_start = batch.reserving(100, batch.total_tokens)
    assert may_start(Ask((1,) * 40, 20), asks((20, 20)), 0) and not may_start(Ask((1,) * 41, 20), asks((20, 20)), 0)


def test_stall(tiny: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPT_TOKENS": 65, "TOKENS_BETWEEN": 2, "POOL_TOKENS": 8_192, "DECODERS": 2, "QUICK_JOINERS": 1}.items():
        monkeypatch.setattr(stall, name, value)
    result = stall.run(replace(tiny, quick=True))
    assert [entry.figure for entry in result.entries] == ["10"] * 4 and all(entry.score for entry in result.entries)
    assert "outputs of 3 requests equal" in result.entries[0].checked


def test_p99_is_of_the_decoders_gaps() -> None:
    def ran(*times: tuple[float, ...]) -> Ran:
        return Ran(
            seconds=1.0, cpu_seconds=1.0, outputs=(), token_times_s=times, prompt_tokens=0, cached_tokens=0, steps=1, preemptions=0,
            recomputed_tokens=0,
        )  # fmt: skip

    even = tuple(0.01 * index for index in range(101))
    late = (*even[:-1], 3.0)
    assert stall.p99_gap_ms(ran(even)) == pytest.approx(10.0)
    assert stall.p99_gap_ms(ran(late)) == pytest.approx(2_010.0)
    assert stall.p99_gap_ms(ran(*([even] * stall.DECODERS), (0.0, 9.0))) == pytest.approx(10.0), "those that join do not count"


# --- figures of the control plane, kernels and caches ---


def test_hits() -> None:
    head = tuple(range(2, 66))
    work = Workload("tiny", (tuple(Ask((*head, 1_000 + index), 1) for index in range(20)),), head)
    entry = hits.ample(work, TINY)
    assert entry.score == 100.0 and "1216 of 1216 tokens" in entry.note
    assert hits.tight(work, TINY, rounds=2).a.values[0] <= 100  # type: ignore[union-attr]


def test_a_cache_that_keeps_nothing_frees_everything() -> None:
    model = NullModel(pool_tokens=256, context_tokens=128)
    model.kv.cache = noreuse.NoCache(model.kv.pool)
    model.submit([Ask(tuple(range(2, 100)), 4)] * 4)
    model.run()
    assert model.cached_tokens == 0 and model.kv.usage().free == model.kv.usage().total
    entries = noreuse.entries_of([3.0, 1.0], [2.0, 2.0], 1_000.0, "x", "cost")
    assert entries[0].ratios == (0.001, 0.0) and entries[0].met


def test_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LONGEST_TOKENS", 128)
    windows = [[admission.Lengths(20 + index, 10 + 3 * index) for index in range(6)]] * 2
    entries = admission.entries_of(windows, 256)
    by_name = {entry.name: entry for entry in entries}
    assert by_name["no thrash (known), event model"].score == pytest.approx(1.0, abs=0.3)
    assert all(entry.score is not None for entry in entries) and len(entries) == 7


def test_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SIZES", (2, 4))
    monkeypatch.setattr(scheduler, "WAITING", 5)
    monkeypatch.setattr(scheduler, "STEPS_PER_ROUND", 16)
    result = scheduler.run(TINY)
    scores = {entry.name: entry for entry in result.entries}
    assert scores["control plane, 2 running"].score
    assert "--vllm-python" in scores["vLLM / ours, 4 running"].no_score
    assert result.plots[0].lines[0].points[1][0] == 4


def test_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "PROMPTS", (32, 64))
    monkeypatch.setattr(lookup, "POOL_PAGES", 64)
    result = lookup.run(TINY)
    assert [entry.name for entry in result.entries if entry.score] == [
        f"{name}, {tokens} tokens" for name in lookup.OURS for tokens in (32, 64)
    ]


def test_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "SHORT_TOKENS", 32)
    monkeypatch.setattr(growth, "LONG_TOKENS", 64)
    monkeypatch.setattr(growth, "SMALL_PAGES", 256)
    monkeypatch.setattr(growth, "SCRAPED_REQUESTS", 10)
    entries = [*growth.of_pool_size(TINY, 512), *growth.of_prompt_length(TINY), growth.memory_share(256), growth.forked()]
    assert all(entry.score is not None and entry.figure == "growth" for entry in entries)
    assert growth.forked().score == 1.0
    assert growth.scrape(TINY).score


def test_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "QUICK_SLICE_S", 0.001)
    monkeypatch.setattr(linear, "STREAM_SHAPE", (64, 64))
    monkeypatch.setattr(linear, "STREAM_BYTES", 2**16)
    entries = linear.run(TINY).entries
    several = sum(tokens >= 8 for tokens in linear.TOKENS)
    assert len(entries) == 2 * (len(linear.TOKENS) + several + 1) and all(entry.score for entry in entries)


def test_decode(tiny: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "BATCHES", (1, 8, 32))
    monkeypatch.setattr(decode, "CONTEXT_TOKENS", 1)
    monkeypatch.setattr(decode, "QUICK_STEPS", 1)
    result = decode.run(tiny)
    assert [entry.figure for entry in result.entries] == ["9"] * 3 and all(entry.score for entry in result.entries)


# --- others' code, and commands ---


def test_a_foreign_python_answers_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(foreign, "SCRIPTS", tmp_path)
    (tmp_path / "good.py").write_text(
        "import sys, json\nprint('noise')\nprint(json.dumps({'version': '1.2'}), flush=True)\n"
        "for line in sys.stdin:\n    print(json.dumps({'value': 2 * json.loads(line)}), flush=True)\n"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    with ForeignPython(Path(sys.executable), "good.py", "it") as there:
        assert there.version == "1.2" and not there.absent and there.ask(21) == 42.0
    with ForeignPython(Path(sys.executable), "bad.py", "it") as there:
        assert there.absent == "it ended with exit status 3" and not there.version
    with ForeignPython(None, "vllm_scheduler.py", "it") as there:
        assert there.absent == "it needs a Python that can import it (--vllm-python PATH)"
    with pytest.raises(ConfigError, match="cannot be run"), ForeignPython(tmp_path / "none", "good.py", "it"):
        pass


def test_a_missed_target_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvseal.bench.suite.board import Result, Side

    entry = Entry(figure="7", name="slow", a=Side("x", "us", (9.0,)), target=Target(high=1.0))
    out, html, table = tmp_path / "a.json", tmp_path / "a.html", tmp_path / "a.md"
    arguments = ["--quick", "--out", str(out), "--html", str(html), "--markdown", str(table)]
    seen: list[Context] = []

    def benchmark(context: Context) -> Result:
        seen.append(context)
        return Result(name="slow", title="Slow", entries=[entry])

    assert benchmark_main("slow", "", benchmark, arguments) == 0
    assert "MISSED" in capsys.readouterr().out and "MISSED" in table.read_text() and "MISSED" in html.read_text()
    assert json.loads(out.read_text())["results"][0]["entries"][0]["met"] is False
    assert seen[0].quick and seen[0].pairs == command.QUICK_PAIRS
