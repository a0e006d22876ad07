"""All benchmarks, one scoreboard: ``kvseal bench all``.

Owns the order and the processes: each benchmark is a process of its own, so that one cannot disturb the next, and one that cannot run, or
dies, is a line without a score and not the end. Comparisons with other engines have their own command, ``kvseal bench peers``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvseal.bench.suite.board import Result, missing
from kvseal.bench.suite.command import add_options, finish
from kvseal.bench.suite.text import from_json
from kvseal.core.errors import ConfigError

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "start": ("16",),
    "linear": ("13",),
    "decode": ("9",),
    "step": ("9",),
    "scheduler": ("7",),
    "lookup": ("8",),
    "growth": ("growth",),
    "hits": ("4",),
    "admission": ("1", "2"),
    "prefix": ("3",),
    "batch": ("1", "2"),
    "noreuse": ("6",),
    "stall": ("10",),
    "split": ("11",),
    "simulator": ("12",),
    "safety": ("15",),
}
"""In the order in which they run, with the figures that each measures."""


def chosen(only: str | None) -> list[str]:
    """Benchmarks of the figures or names given, "3,7,growth". Raises `ConfigError` for one that is not there."""
    if only is None:
        return list(BENCHMARKS)
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    known = {*BENCHMARKS, *(figure for figures in BENCHMARKS.values() for figure in figures)}
    if strange := [word for word in wanted if word not in known]:
        names = ", ".join(f"{name} ({', '.join(figures)})" for name, figures in BENCHMARKS.items())
        raise ConfigError(f"--only: there is no benchmark or figure {', '.join(strange)}; choose from {names}")
    return [name for name, figures in BENCHMARKS.items() if name in wanted or any(figure in wanted for figure in figures)]


def run_apart(name: str, arguments: Sequence[str], folder: Path) -> Result:
    """One benchmark in its own process; its progress goes to our standard error."""
    out = folder / f"{name}.json"
    began_s = time.perf_counter()
    command = [sys.executable, "-P", "-m", "kvseal", "bench", name, *arguments, "--out", str(out)]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    seconds = time.perf_counter() - began_s
    if ended.returncode == 0 and out.is_file():
        results, _ = from_json(json.loads(out.read_text(encoding="utf-8")))
        return results[0]
    why = f"kvseal bench {name} ended with status {ended.returncode}; its reason stands on standard error"
    entries = [missing(figure, name, why) for figure in BENCHMARKS[name]]
    return Result(name=name, title=name, entries=entries, seconds=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvseal bench all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="LIST", help="figures or names, for example 3,7,growth")
    add_options(parser)
    options = parser.parse_args()
    arguments = passed_on(options)
    with tempfile.TemporaryDirectory(prefix="kvseal-bench-") as folder:
        results = []
        for name in chosen(options.only):
            print(f"{name}: begins at {time.strftime('%H:%M:%S')}", file=sys.stderr, flush=True)
            results.append(run_apart(name, arguments, Path(folder)))
    return finish(results, options)


def passed_on(options: argparse.Namespace) -> list[str]:
    """The flags that each benchmark gets; reports are written here alone."""
    found = [flag for flag, given in (("--quick", options.quick), ("--full-size", options.full_size)) if given]
    for flag, value in (
        ("--pairs", options.pairs),
        ("--model", options.model),
        ("--threads", options.threads or None),
        ("--traces", options.traces),
        ("--vllm-python", options.vllm_python),
        ("--sglang-python", options.sglang_python),
    ):
        if value is not None:
            found += [flag, str(value)]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
