"""What every benchmark command shares: its flags, progress, and the reports at the end.

Owns `Context` (what was asked for) and `finish` (text, JSON, HTML, Markdown). A benchmark always ends with status 0 when it could
measure, whatever the targets say: the scoreboard says plainly what is met and what is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvseal import __version__
from kvseal.bench.peers.machine import LOUD_CORES, Meter, cores, describe
from kvseal.bench.suite.board import LEAST_PAIRS, Result
from kvseal.bench.suite.page import page, picture
from kvseal.bench.suite.text import all_entries, as_json, board_markdown, board_text, summary_text
from kvseal.core.errors import ConfigError

QUICK_PAIRS = 2
MARKS = ("<!-- scoreboard begins -->", "<!-- scoreboard ends -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What was asked for."""

    name: str
    quick: bool = False
    full_size: bool = False
    """Whole workloads instead of slices: hours on a small machine."""
    pairs: int = LEAST_PAIRS
    model: str | None = None
    threads: int = 0
    traces: Path | None = None
    """None: none was found, and none was named."""
    vllm_python: Path | None = None
    sglang_python: Path | None = None

    @property
    def threads_used(self) -> int:
        return self.threads or cores()

    def say(self, what: str) -> None:
        """Progress, on standard error."""
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)


Benchmark = Callable[[Context], Result]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help=f"small slices and {QUICK_PAIRS} pairs: a look, not a figure to quote")
    parser.add_argument("--full-size", action="store_true", help="whole workloads instead of slices of them: hours on a small machine")
    parser.add_argument("--pairs", type=_pairs, metavar="N", help=f"pairs of each ratio (default: {LEAST_PAIRS}; --quick {QUICK_PAIRS})")
    parser.add_argument("--model", metavar="MODEL", help="directory, .gguf file, or hub id (default: the demo model, fetched once)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (default: one per core)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of traces and texts (default: shared/traces beside the clone)")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="a Python that imports vllm, to measure its scheduler beside ours")
    parser.add_argument("--sglang-python", type=Path, metavar="PATH", help="a Python that imports sglang, to measure its radix cache")
    add_report_options(parser)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything, raw pairs included, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write every plot as an SVG file, NAME-1.svg and on")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the scoreboard as a Markdown table")


def context_of(name: str, options: argparse.Namespace) -> Context:
    """Raises `ConfigError` for a folder of traces that is not there."""
    return Context(
        name=name,
        quick=options.quick,
        full_size=options.full_size,
        pairs=options.pairs or (QUICK_PAIRS if options.quick else LEAST_PAIRS),
        model=options.model,
        threads=options.threads,
        traces=find_traces(options.traces),
        vllm_python=options.vllm_python,
        sglang_python=options.sglang_python,
    )


def find_traces(named: Path | None) -> Path | None:
    """The folder named, or one called shared/traces in or beside the working directory or the source tree."""
    if named is not None:
        if not named.is_dir():
            raise ConfigError(f"--traces {named}: there is no such folder")
        return named
    clone = Path(__file__).resolve().parents[3]
    near = [base / "shared" / "traces" for base in (Path.cwd(), Path.cwd().parent, clone, clone.parent)]
    return next((folder for folder in near if folder.is_dir()), None)


def measured(benchmark: Benchmark, context: Context) -> Result:
    """Runs it, and notes how long it took and who else was using the machine."""
    meter, began_s = Meter([]), time.perf_counter()
    result = benchmark(context)
    return replace(result, seconds=time.perf_counter() - began_s, other_cores=meter.stop().others_cores)


def benchmark_main(name: str, description: str, benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """The whole command ``kvseal bench NAME``."""
    parser = argparse.ArgumentParser(
        prog=f"kvseal bench {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    return finish([measured(benchmark, context_of(name, options))], options)


def finish(results: Sequence[Result], options: argparse.Namespace, machine: Mapping[str, str] | None = None) -> int:
    """Prints the scoreboard and writes what was asked for. Always 0: a missed target is a finding of the board, not of the command."""
    machine = machine or facts()
    entries = all_entries(results)
    for result in results:
        for line in (", ".join(f"{key} {value}" for key, value in result.settings.items()), *result.remarks):
            if line:
                print(f"{result.name}: {line}")
    print(board_text(entries))
    print(summary_text(entries))
    loud = [result.name for result in results if result.other_cores is not None and result.other_cores > LOUD_CORES]
    if loud:
        print(f"other processes used more than {LOUD_CORES} cores during {', '.join(loud)}: ratios hold better than figures, quote neither")
    if options.out is not None:
        options.out.write_text(json.dumps(as_json(results, machine), indent=1) + "\n", encoding="utf-8")
    if options.html is not None:
        options.html.write_text(page(results, machine), encoding="utf-8")
    if options.plots is not None:
        write_plots(options.plots, results)
    if options.markdown is not None:
        write_between_marks(options.markdown, board_markdown(results, machine))
    return 0


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


def facts() -> dict[str, str]:
    """The machine and the versions, for every report."""
    return {**describe(), "kvseal": __version__, "date": time.strftime("%Y-%m-%d")}


def _pairs(text: str) -> int:
    pairs = int(text) if text.isdigit() else 0
    if pairs < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of pairs; give 1 or more")
    return pairs
