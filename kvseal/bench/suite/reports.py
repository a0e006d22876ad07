"""The files that a benchmark writes: whether they can be written, before anything is measured, and the writing.

Owns every report's file. A path that cannot be written is found at the start, not after an hour; and one that fails at the end all the same
costs that report and no other.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvseal.bench.suite.board import Result
from kvseal.bench.suite.page import page, picture
from kvseal.bench.suite.text import as_json, board_markdown
from kvseal.core.errors import ConfigError

MARKS = ("<!-- scoreboard begins -->", "<!-- scoreboard ends -->")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything, raw pairs included, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write every plot as an SVG file, NAME-1.svg and on")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the scoreboard as a Markdown table")


def check_reports(options: argparse.Namespace) -> None:
    """Raises `ConfigError` naming the flag whose file or folder cannot be written. Folders of plots are made."""
    check_files({"--out": options.out, "--html": options.html, "--markdown": options.markdown})
    if options.plots is not None:
        check_folder("--plots", options.plots)


def check_files(files: Mapping[str, Path | None]) -> None:
    """Each file by its flag. Raises `ConfigError`; what is there stays as it is, and nothing new stays."""
    taken: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        try:
            _try_writing(path)
            same = taken.setdefault(path.resolve(), flag)
        except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle.
            raise ConfigError(f"{flag} {path}: cannot be written: {_reason(error)}") from error
        if same != flag and path.is_file() == path.exists():
            raise ConfigError(f"{same} and {flag} name the same file, {path}; give each its own")


def check_folder(flag: str, folder: Path) -> None:
    """Makes the folder if need be. Raises `ConfigError` when files cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: cannot be written: {_reason(error)}") from error


def _try_writing(path: Path) -> None:
    try:
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        # Without waiting for a reader of a named pipe: there may never be one.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        kind = os.fstat(file).st_mode
        os.close(file)
        if not stat.S_ISREG(kind) and not stat.S_ISCHR(kind) and not stat.S_ISFIFO(kind):
            raise OSError("it is no file") from None
        return
    os.close(new)
    path.unlink()


def write_reports(results: Sequence[Result], machine: Mapping[str, str], options: argparse.Namespace) -> bool:
    """Writes what was asked for; whether all of it could be written."""
    writers: list[tuple[str, Path | None, Callable[[Path], object]]] = [
        ("--out", options.out, lambda path: write_json(path, results, machine)),
        ("--html", options.html, lambda path: path.write_text(page(results, machine), encoding="utf-8")),
        ("--plots", options.plots, lambda path: write_plots(path, results)),
        ("--markdown", options.markdown, lambda path: write_between_marks(path, board_markdown(results, machine))),
    ]
    well = True
    for flag, path, write in writers:
        if path is not None:
            well &= written(flag, path, partial(write, path))
    return well


def written(flag: str, path: Path, write: Callable[[], object]) -> bool:
    """Whether it could be; says so where not, and what was measured is not lost with it."""
    try:
        write()
    except OSError as error:
        print(f"kvseal: {flag} {path}: cannot be written: {_reason(error)}", file=sys.stderr, flush=True)
        return False
    return True


def write_json(path: Path, results: Sequence[Result], machine: Mapping[str, str]) -> None:
    path.write_text(json.dumps(as_json(results, machine), indent=1) + "\n", encoding="utf-8")


def write_plots(folder: Path, results: Sequence[Result]) -> None:
    """One file for each plot, numbered from 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        for number, plot in enumerate(result.plots, start=1):
            (folder / f"{result.name}-{number}.svg").write_text(picture(plot), encoding="utf-8")


def write_between_marks(path: Path, table: str) -> None:
    """Into a document that has the marks, between them; else the file is the table alone."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, begins, rest = text.partition(MARKS[0])
    _, ends, after = rest.partition(MARKS[1])
    path.write_text(f"{before}{begins}\n{table}{ends}{after}" if begins and ends else table, encoding="utf-8")


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        there = Path(str(error.filename)).parent.is_dir()
        return "no file can be made in that folder" if there else "its folder does not exist"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
