"""`kvseal size`: the command. Owns the exit status (0 fine or held, 1 broken, 2 unusable input) and where the output goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvseal.core.errors import ConfigError, KVSealError
from kvseal.plan.options import ask_of, build_parser
from kvseal.plan.planner import Report, answer
from kvseal.plan.report_json import report_json
from kvseal.plan.source import load_shape
from kvseal.plan.table import render


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status. Never a traceback for bad input."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KVSealError as error:
        print(f"kvseal size: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except RecursionError:
        print("kvseal size: the input is nested too deeply", file=sys.stderr)
        return 2


def _run(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    if options.model is None:
        raise ConfigError("name a model: a config.json, a directory, a GGUF file or a hub id (see kvseal size --help)")
    ask = ask_of(options)
    shape = load_shape(options.model, assume_gqa=options.assume_gqa)
    report = answer(shape, ask)
    _print(report, as_json=options.json)
    return report.promise.exit_status if report.promise is not None else 0


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        json.dump(report_json(report), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(render(report))


if __name__ == "__main__":
    sys.exit(main())


def write_file(path: str, text: str) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
