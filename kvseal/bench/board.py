"""Reports made again from stored runs, several together if need be: ``kvseal bench board A.json B.json --html FILE``.

Owns the merging: of a benchmark that stands in several files, the last one's result counts. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kvseal.bench.suite.board import Result
from kvseal.bench.suite.command import finish
from kvseal.bench.suite.reports import add_report_options, check_reports
from kvseal.bench.suite.text import from_json
from kvseal.core.errors import ConfigError


def merged(files: Sequence[Path]) -> tuple[list[Result], dict[str, str]]:
    """Results in order of first appearance; the machine of the last file. Raises `ConfigError` for what is no stored run."""
    by_name: dict[str, Result] = {}
    machine: dict[str, str] = {}
    for file in files:
        try:
            results, machine = from_json(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is no stored run of kvseal bench ({error})") from error
        by_name |= {result.name: result for result in results}
    return list(by_name.values()), machine


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvseal bench board", description="Reports from stored runs of kvseal bench.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON written by --out; later ones replace earlier ones")
    add_report_options(parser)
    options = parser.parse_args(arguments)
    check_reports(options)
    results, machine = merged(options.files)
    return finish(results, options, machine)


if __name__ == "__main__":
    raise SystemExit(main())
