"""Set-up goes on where it stopped, says why it cannot, and the plan installs nothing."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from kvseal.bench.peers import setup
from kvseal.bench.peers.catalogue import Place, catalogue, write_requirements
from kvseal.bench.peers.command import main
from kvseal.bench.peers.setup import Setup, Step, StepFailed
from kvseal.core.errors import ConfigError, KVSealError

from .fakes import small_model


def quiet(line: str) -> None:
    pass


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_steps_that_are_done_are_not_done_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    steps = [Step("count", python(f"open({str(count)!r}, 'a').write('x')"), makes=count, replaces=False)]
    Setup(tmp_path, say=quiet).run("peer", steps)
    Setup(tmp_path, say=quiet).run("peer", steps)
    assert count.read_text() == "x"
    count.unlink()  # What it made is gone: the stamp alone is not believed.
    Setup(tmp_path, say=quiet).run("peer", steps)
    assert count.read_text() == "x"


def test_it_goes_on_after_the_step_that_failed(tmp_path: Path) -> None:
    done: list[str] = []
    whether = tmp_path / "now"

    def second() -> None:
        if not whether.exists():
            raise OSError("not yet")
        done.append("second")

    steps = [Step("first", action=lambda: done.append("first")), Step("second", action=second)]
    with pytest.raises(StepFailed, match="second: not yet"):
        Setup(tmp_path, say=quiet).run("peer", steps)
    whether.touch()
    Setup(tmp_path, say=quiet).run("peer", steps)
    assert done == ["first", "second"]


def test_a_half_made_result_is_removed_first(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    (folder / "rest").mkdir(parents=True)
    Setup(tmp_path, say=quiet).run("peer", [Step("make", action=folder.mkdir, makes=folder)])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (Step("build", python(""), needs_programs=("no-such-compiler",)), "needs no-such-compiler"),
        (Step("fail", python("import sys; print('ERROR: No matching distribution'); print('bye'); sys.exit(3)")), "No matching .*status 3"),
        (Step("nothing", python(""), makes=Path("nowhere")), "did not make nowhere"),
        (Step("missing", ("/no/such/program",)), "missing: "),
    ],
)
def test_a_failed_step_says_why(tmp_path: Path, step: Step, why: str) -> None:
    with pytest.raises(StepFailed, match=why):
        Setup(tmp_path, say=quiet).run("peer", [step])


def test_the_reason_is_the_last_line_about_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("fine\nfatal: one\nError: two\n$ the next command\ngood bye\n")
    assert setup.reason(log) == "Error: two"
    log.write_text("")
    assert setup.reason(log) == "it printed nothing"


def test_the_plan_names_every_step_and_does_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, model = tmp_path / "peers", small_model(tmp_path)
    assert main(["--plan", "--dir", str(directory), "--model", str(model), "--threads", "2"]) == 0
    shown = capsys.readouterr().out
    place = Place(directory=directory, model=model, threads=2)
    for peer in catalogue():
        assert peer.title in shown
        assert all(step.name in shown for step in peer.steps(place))
    assert not directory.exists()
    assert "g++" in shown and "llama-cpp-python==" in shown


def test_every_download_is_pinned(tmp_path: Path) -> None:
    """The engine and torch by version; what they pull in is theirs."""
    place = Place(directory=tmp_path, model=tmp_path / "model.gguf", threads=2)
    for peer in catalogue():
        for step in peer.steps(place):
            if "install" in step.command or "download" in step.command:
                assert any("==" in part for part in step.command) or "-r" in step.command, step


def test_nothing_is_installed_into_our_environment(tmp_path: Path) -> None:
    place = Place(directory=tmp_path, model=tmp_path / "model.gguf", threads=2)
    for peer in catalogue():
        for step in peer.steps(place):
            if "install" in step.command:
                assert step.command[0].startswith(str(tmp_path)), step


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--only", "llama.cpp,lama"], "lama"), (["--only-scenario", "batch,bach"], "bach"), (["--only-scenario", ","], "nothing")],
)
def test_unknown_names_are_refused(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        main(arguments)


def test_requirements_leave_out_pictures_sound_and_extras(tmp_path: Path) -> None:
    lines = ["Name: engine", "Requires-Dist: torch==2.13.0", "Requires-Dist: torchvision", "Requires-Dist: numpy>=2"]
    with zipfile.ZipFile(tmp_path / "engine-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("engine-1.dist-info/METADATA", "\n".join([*lines, 'Requires-Dist: foo; extra == "bar"', "Requires-Dist: torchx"]))
    write_requirements(tmp_path, tmp_path / "requirements.txt")
    assert (tmp_path / "requirements.txt").read_text().split() == ["numpy>=2", "torchx"]
    with pytest.raises((OSError, KVSealError)):
        write_requirements(tmp_path / "empty", tmp_path / "other.txt")
