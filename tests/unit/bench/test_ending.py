"""Told to end, a benchmark leaves no process and no result behind; what cannot work is refused before anything is measured."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvseal.bench import all as whole
from kvseal.bench import board
from kvseal.bench.peers.command import main as peers_main
from kvseal.bench.suite import reports
from kvseal.bench.suite.board import Entry, Result, Side
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.bench.suite.ending import clean_end, status_of
from kvseal.bench.suite.names import BENCHMARKS
from kvseal.cli import main as kvseal_main
from kvseal.core.errors import ConfigError, ModelNotFound

TOP = """
import signal, subprocess, sys, time
from kvseal.bench.suite.ending import clean_end
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)  # these tests may run under nohup
stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
with clean_end():
    child = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        if "kill" in sys.argv:
            child.kill()
            child.wait()
        time.sleep(0.3)
        print("tidied", flush=True)
"""


def below(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [one for child in children for one in below(child)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("orphan", [False, True], ids=["left behind", "whose parent is gone"])
def test_what_was_started_ends_and_a_second_signal_cuts_nothing_short(number: signal.Signals, orphan: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", TOP, *(["kill"] if orphan else [])], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    started = below(process.pid)
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert out == b"tidied\n" and len(started) == 2
    assert not [pid for pid in started if runs(pid)]
    assert process.returncode == (-signal.SIGINT if number == signal.SIGINT else 128 + number)


def test_what_is_ignored_stays_ignored() -> None:
    """nohup kvseal bench all: the terminal may go."""
    process = subprocess.Popen([sys.executable, "-c", TOP, "nohup"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM


def test_handlers_are_as_before_afterwards_and_what_ran_before_runs_on() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    older = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(SystemExit), clean_end():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert older.poll() is None
    older.kill()
    older.wait()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert status_of(KeyboardInterrupt()) == 130 and status_of(SystemExit(143)) == 143


def result(name: str) -> Result:
    return Result(name=name, title=name, entries=[Entry(figure="7", name=f"of {name}", a=Side("x", "us", (9.0,)))])


@pytest.mark.parametrize(("why", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_interrupted_all_reports_what_it_has(
    why: BaseException, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "a.json", tmp_path / "a.md"

    def run_apart(name: str, *_: object) -> Result:
        if name == "lookup":
            stored = json.loads(out.read_text())["results"]  # After every benchmark: a power cut would leave this.
            assert [one["name"] for one in stored] == ["linear", "scheduler"]
            raise why
        return result(name)

    monkeypatch.setattr(whole, "run_apart", run_apart)
    assert whole.main(["--only", "linear,scheduler,lookup,stall", "--out", str(out), "--markdown", str(table)]) == status
    shown = capsys.readouterr().out
    assert "of linear" in shown and "of scheduler" in table.read_text() and shown.count("no score: interrupted") == 2
    entries = {one["name"]: one["entries"][0] for one in json.loads(out.read_text())["results"]}
    assert list(entries) == ["linear", "scheduler", "lookup", "stall"] and entries["stall"]["no_score"] == "interrupted"


def test_all_ends_the_benchmark_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(whole.subprocess, "Popen", lambda *_, **__: ran)

    def interrupted(timeout: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ran, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        whole.run_apart("linear", [], tmp_path)
    assert ran.returncode == -signal.SIGTERM


def never(_: Context) -> Result:
    raise AssertionError("measured")


@pytest.mark.parametrize("flag", ["--out", "--html", "--markdown", "--plots"])
def test_a_report_that_cannot_be_written_is_found_before_anything_is_measured(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "x", *([] if flag == "--plots" else [tmp_path / "none" / "x", tmp_path])):
        with pytest.raises(ConfigError, match=f"{flag} {re.escape(str(path))}: cannot be written"):
            benchmark_main("x", "", never, [flag, str(path)])
        with pytest.raises(ConfigError, match=flag):
            whole.main(["--only", "linear", flag, str(path)])
        with pytest.raises(ConfigError, match=flag):
            board.main([str(tmp_path / "none.json"), flag, str(path)])
    assert (tmp_path / "file").read_text() == "kept"


def test_looking_leaves_files_as_they_are_and_one_file_for_two_reports_is_refused(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    reports.check_files({"--out": there, "--html": new, "--markdown": None})
    assert there.read_text() == "kept" and not new.exists()
    with pytest.raises(ConfigError, match="--out and --html name the same file"):
        reports.check_files({"--out": there, "--html": tmp_path / "." / "there"})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--out .*pipe"):  # Nobody reads it; waiting for that would be for ever.
        reports.check_files({"--out": tmp_path / "pipe"})


def test_one_report_that_fails_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html, table, plots = (tmp_path / name for name in ("a.json", "a.html", "a.md", "plots"))

    def benchmark(context: Context) -> Result:
        out.mkdir()
        return result("x")

    flags = ["--out", str(out), "--html", str(html), "--markdown", str(table), "--plots", str(plots)]
    assert benchmark_main("x", "", benchmark, flags) == 1
    said = capsys.readouterr()
    assert f"kvseal: --out {out}: cannot be written: Is a directory" in said.err and "of x" in said.out
    assert "of x" in html.read_text() and "of x" in table.read_text()


@pytest.mark.parametrize("threads", ["-2", "100000", "x", "1.5", ""])
def test_threads_are_checked(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    for main in (lambda flags: benchmark_main("x", "", never, flags), whole.main, peers_main):
        with pytest.raises(SystemExit) as ended:
            main(["--threads", threads])
        assert ended.value.code == 2 and "give 1 to 1024" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    for main in (lambda flags: benchmark_main("x", "", never, flags), whole.main, peers_main):
        with pytest.raises(ModelNotFound, match="no such file"):
            main(["--model", str(tmp_path / "none.gguf")])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--minutes", "-1"], "--minutes"),
        (["--minutes", "0"], "--minutes"),
        (["--minutes", "nan"], "--minutes"),
        (["--stop-at", "0"], "--stop-at"),
        (["--stop-at", "-3"], "--stop-at"),
        (["--reps", "0"], "--reps"),
        (["--quiet-wait", "-1"], "--quiet-wait"),
    ],
)
def test_flags_of_peers_are_checked(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        peers_main(flags)
    assert ended.value.code == 2 and f"argument {said}" in capsys.readouterr().err


def test_folders_and_reports_of_peers_are_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    model = ["--model", str(tmp_path / "model.gguf")]
    for flags, named in (
        ([*model, "--setup-only", "--dir", str(tmp_path / "file")], "--dir"),
        ([*model, "--setup-only", "--llama-cpp-build", str(tmp_path)], "--llama-cpp-build"),
        ([*model, "--json", str(tmp_path / "none" / "a")], "--json"),
        ([*model, "--html", str(tmp_path)], "--html"),
    ):
        with pytest.raises(ConfigError, match=named):
            peers_main(flags)


def test_every_benchmark_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    house = Path(board.__file__).parent
    commands = {path.stem for path in house.glob("[a-z]*.py")} | {path.parent.name for path in house.glob("*/__main__.py")}
    assert set(BENCHMARKS) == commands
    with pytest.raises(SystemExit):
        kvseal_main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +{re.escape(what)}$", shown, re.MULTILINE) for name, what in BENCHMARKS.items())
