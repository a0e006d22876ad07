"""All benchmarks, one scoreboard: ``kvseal bench all``.

Owns the order and the processes: each benchmark is a process of its own, so that one cannot disturb the next, and one that cannot run, or
dies, is a line without a score and not the end. Interrupted, it ends the one that runs and reports what it has; the JSON is written after
every benchmark. Comparisons with other engines have their own command, ``kvseal bench peers``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvseal.bench.suite.board import Result, missing
from kvseal.bench.suite.command import add_options, context_of, facts, finish
from kvseal.bench.suite.ending import status_of
from kvseal.bench.suite.reports import write_json, written
from kvseal.bench.suite.text import from_json
from kvseal.core.errors import ConfigError

END_TIMEOUT_S = 60.0
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
    "handoff": ("handoff",),
    "simulator": ("12",),
    "safety": ("15",),
}
"""In the order in which they run, with the figures that each measures."""


def chosen(only: str | None) -> list[str]:
    """Benchmarks of the figures or names given, "3,7,growth". Raises `ConfigError` for one that is not there."""
    if only is None:
        return list(BENCHMARKS)
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    if not wanted:
        raise ConfigError(f"--only {only!r} names nothing; choose from {', '.join(BENCHMARKS)}, or their figures")
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
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        status = process.wait()
    finally:
        end(process)
    seconds = time.perf_counter() - began_s
    if status == 0 and out.is_file():
        results, _ = from_json(json.loads(out.read_text(encoding="utf-8")))
        return results[0]
    return without_score(name, f"kvseal bench {name} ended with status {status}; its reason stands on standard error", seconds)


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks it to end, which takes its servers with it, and waits; forced after a while."""
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def without_score(name: str, why: str, seconds: float = 0.0) -> Result:
    entries = [missing(figure, name, why) for figure in BENCHMARKS[name]]
    return Result(name=name, title=name, entries=entries, seconds=seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvseal bench all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="LIST", help="figures or names, for example 3,7,growth")
    add_options(parser)
    options = parser.parse_args(arguments)
    names, machine = chosen(options.only), facts()
    context_of("all", options)  # What cannot work is an error now, and not one for each benchmark.
    results: list[Result] = []
    why: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="kvseal-bench-") as folder:
        try:
            for name in names:
                print(f"{name}: begins at {time.strftime('%H:%M:%S')}", file=sys.stderr, flush=True)
                results.append(run_apart(name, passed_on(options), Path(folder)))
                if options.out is not None:
                    written("--out", options.out, partial(write_json, options.out, results, machine))
        except (KeyboardInterrupt, SystemExit) as ended:
            why = ended
    if why is None:
        return finish(results, options, machine)
    left = [name for name in names if all(result.name != name for result in results)]
    finish([*results, *(without_score(name, "interrupted") for name in left)], options, machine)
    return status_of(why)


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
