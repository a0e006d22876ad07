"""``kvseal place``: how to place so many workers for a load and its limits.

Owns the flags and the exit status: 0 a placement is recommended, 1 none meets the limits, 2 it cannot be done as asked.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvseal.bench.place import report
from kvseal.bench.place.latency import Latency, load, published
from kvseal.bench.place.search import Question, search
from kvseal.bench.place.slo import parse_slo
from kvseal.bench.place.trace import Trace, fixed, read_trace
from kvseal.core.config import cache_dir
from kvseal.core.errors import ConfigError, KVSealError

FITTED = "latency.json"
MOST_WORKERS = 4096

_EPILOG = """\
examples:
  kvseal bench fit                                                     measure this machine once
  kvseal place --trace azure.csv --slo ttft=2,tpot=100ms --workers 8
  kvseal place --lengths 1024,192 --slo ttft=10x,tbt=3x --workers 2    multiples of what a request takes alone
  kvseal place --trace sharegpt.jsonl --slo ttft=200ms,tpot=100ms --workers 4 --latency distserve-a100-opt-13b

A trace is a CSV with input_tokens, output_tokens and perhaps t_s (or with the columns of Azure's traces: TIMESTAMP, ContextTokens,
GeneratedTokens), or JSON lines with input_length, output_length, timestamp (ms) and hash_ids, or with turns.
Goodput is the highest rate at which the target share of all requests sent meets all limits.
"""


def fitted_path() -> Path:
    """Where ``kvseal bench fit`` leaves the latency model of this machine."""
    return cache_dir() / FITTED


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _place(options)
    except KVSealError as error:
        print(f"kvseal place: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvseal place",
        description="Recommends how many workers should do both prefill and decode, or how to split them, by simulating both.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("load")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="requests: lengths, and arrival times if known")
    source.add_argument("--lengths", metavar="IN,OUT", help="requests of one length instead of a trace, e.g. 1024,192")
    what.add_argument("--skip", type=int, default=0, metavar="N", help="rows of the trace to skip (default: %(default)s)")
    what.add_argument("--rows", type=int, metavar="N", help="rows of the trace to use (default: all)")
    what.add_argument("--arrivals", choices=("trace", "poisson"), default="trace", help="the trace's own, stretched, or Poisson")
    what.add_argument("--slo", required=True, metavar="LIMITS", help="e.g. ttft=200ms,tpot=0.1; also tbt; 10x is ten times idle")
    what.add_argument("--target", type=float, default=0.9, metavar="SHARE", help="of requests that must meet all limits (default: 0.9)")
    pool = parser.add_argument_group("workers")
    pool.add_argument("--workers", type=int, required=True, metavar="N", help="devices to place")
    pool.add_argument("--latency", type=Path, metavar="NAME", help=f"a file of `kvseal bench fit`, or one of {', '.join(published())}")
    pool.add_argument("--chunk-tokens", metavar="N,...", help="chunk sizes to try (default: those of the latency model)")
    pool.add_argument("--link", type=float, metavar="BYTES/S", help="what a hand-off moves a second (default: of the latency model)")
    how = parser.add_argument_group("simulation")
    how.add_argument("--requests", type=int, default=300, metavar="N", help="in one run, at least (default: %(default)s)")
    how.add_argument("--seed", type=int, default=0, help="same seed, same answer (default: %(default)s)")
    how.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _place(options: argparse.Namespace) -> int:
    began_s = time.process_time()
    asked = parse_slo(options.slo)
    trace = _trace(options)  # Before the latency model: a slip in its name is said before any measuring is asked for.
    question = Question(
        latency=_latency(options),
        trace=trace,
        asked=asked,
        workers=_within("--workers", options.workers, 1, MOST_WORKERS),
        target=_target(options.target),
        requests=_within("--requests", options.requests, 20, 100_000),
        poisson=options.arrivals == "poisson",
        seed=options.seed,
        chunk_tokens=_chunks(options.chunk_tokens),
    )
    progress = _Progress(live=sys.stderr.isatty())
    try:
        answer = search(question, progress.tell)
    finally:
        progress.clear()
    if options.json:
        print(json.dumps(report.as_json(answer), indent=2))
    else:
        print(report.text(answer))
        print(f"\nsearched in {time.process_time() - began_s:.1f} s of one core")
    return 0 if answer.found and answer.found[0].rate else 1


class _Progress:
    """What is searched now, on stderr: on a terminal one line that changes, else a line for each phase."""

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._phase = ""
        self._began_s = time.monotonic()

    def tell(self, phase: str, what: str) -> None:
        text = f"{time.monotonic() - self._began_s:4.0f} s  {phase}"
        if self._live:
            line = f"{text}: {what}" if what else text
            print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
        elif phase != self._phase:
            print(text, file=sys.stderr, flush=True)
        self._phase = phase

    def clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _latency(options: argparse.Namespace) -> Latency:
    name = options.latency
    if name is None:
        name = fitted_path()
        if not name.exists():
            raise ConfigError(
                "this machine has not been measured yet: run `kvseal bench fit` once (a few minutes), or give --latency with a file or one "
                f"of {', '.join(published())}"
            )
    latency = load(name)
    if options.link is not None:
        if not options.link > 0 or not math.isfinite(options.link):
            raise ConfigError(f"--link is {options.link}; it must be bytes per second, above 0")
        latency = replace(latency, handoff_bytes_per_s=options.link)
    return latency


def _trace(options: argparse.Namespace) -> Trace:
    if options.lengths is not None:
        parts = options.lengths.split(",")
        if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            raise ConfigError(f"--lengths is {options.lengths!r}; give prompt and output tokens, e.g. 1024,192")
        return fixed(int(parts[0]), int(parts[1]))
    rows = None if options.rows is None else _within("--rows", options.rows, 1, 10**9)
    return read_trace(options.trace, skip=_within("--skip", options.skip, 0, 10**9), requests=rows)


def _chunks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--chunk-tokens is {text!r}; give whole numbers above 0, e.g. 128,512")
    return tuple(sorted({int(part) for part in parts}))


def _target(share: float) -> float:
    if not 0 < share <= 1:
        raise ConfigError(f"--target is {share}; it must be a share of requests, above 0 and at most 1")
    return share


def _within(flag: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ConfigError(f"{flag} is {value}; it must be from {low} to {high}")
    return value
