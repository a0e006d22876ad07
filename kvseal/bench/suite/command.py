"""What every benchmark command shares: its flags, progress, and the reports at the end.

Owns `Context` (what was asked for) and `finish`. A benchmark ends with status 0 when it could measure and write what it found, whatever
the targets say: the scoreboard says plainly what is met and what is not. What cannot work is refused before anything is measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvseal import __version__
from kvseal.bench.peers.machine import LOUD_CORES, Meter, cores, describe
from kvseal.bench.suite.board import LEAST_PAIRS, Result
from kvseal.bench.suite.reports import add_report_options, check_reports, write_reports
from kvseal.bench.suite.text import all_entries, board_text, summary_text
from kvseal.core.config import MAX_THREADS
from kvseal.core.errors import ConfigError
from kvseal.node.models import resolve_model

QUICK_PAIRS = 2


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
    parser.add_argument("--threads", type=thread_count, default=0, metavar="N", help="compute threads (default: one per core)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of traces and texts (default: shared/traces beside the clone)")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="a Python that imports vllm, to measure its scheduler beside ours")
    parser.add_argument("--sglang-python", type=Path, metavar="PATH", help="a Python that imports sglang, to measure its radix cache")
    add_report_options(parser)


def context_of(name: str, options: argparse.Namespace) -> Context:
    """Raises a `SetupError` for a folder of traces or a model that is not there, and for a report that cannot be written."""
    check_reports(options)
    if options.model is not None:
        resolve_model(options.model)  # Fetched now if it is a hub id, and not while something is timed.
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
    """Writes what was asked for and prints the scoreboard. 0 unless a report could not be written: a missed target is a finding of the
    board, not of the command."""
    machine = machine or facts()
    well = write_reports(results, machine, options)  # First: whoever reads the board through a pipe may close it.
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
    return 0 if well else 1


def facts() -> dict[str, str]:
    """The machine and the versions, for every report."""
    return {**describe(), "kvseal": __version__, "date": time.strftime("%Y-%m-%d")}


def thread_count(text: str) -> int:
    """The argument of --threads; 0 is one per core."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; give 1 to {MAX_THREADS}, or 0 for one per core")
    return number


def _pairs(text: str) -> int:
    pairs = int(text) if text.isdigit() else 0
    if pairs < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of pairs; give 1 or more")
    return pairs
