"""`kvseal size`: the command. Owns the exit status (0 fine or held, 1 broken, 2 unusable input) and where the output goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvseal.core.errors import ConfigError, KVSealError
from kvseal.plan.options import ask_of, build_parser
from kvseal.plan.planner import Ask, Report, answer, limit_of
from kvseal.plan.promise import judge
from kvseal.plan.report_json import plain, promise_json, report_json
from kvseal.plan.source import load_shape
from kvseal.plan.table import render, render_promise
from kvseal.plan.units import printable

if TYPE_CHECKING:  # Logs and side-by-side tables are imported when they are asked for: plain sizes stay instant.
    from kvseal.plan.evidence import Comparison
    from kvseal.plan.logs import Evidence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status. Never a traceback for bad input."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KVSealError as error:
        print(f"kvseal size: {printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except RecursionError:
        print("kvseal size: the input is nested too deeply", file=sys.stderr)
        return 2


def _run(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    ask = ask_of(options)
    evidence = _evidence(options)
    if options.model is None:
        if evidence is None:
            raise ConfigError("name a model: a config.json, a directory, a GGUF file or a hub id (see kvseal size --help)")
        return _evidence_alone(ask, evidence, as_json=options.json)
    if options.compare and (evidence is not None or ask.promise_tokens is not None):
        raise ConfigError("--compare answers sizes only; ask for --log, --metrics or --promise one model at a time")
    shapes = [load_shape(name, assume_gqa=options.assume_gqa) for name in (options.model, *(options.compare or ()))]
    if options.draft_model is not None:
        draft = load_shape(options.draft_model, assume_gqa=options.assume_gqa)
        shapes = [replace(shape, draft_layers=draft.layers) for shape in shapes]
    comparison = None
    if evidence is not None:
        from kvseal.plan.evidence import compare

        report, comparison = compare(shapes[0], ask, evidence)
        reports = [report]
    else:
        reports = [answer(shape, ask) for shape in shapes]
    if options.html:
        from kvseal.plan.html import page

        write_file(options.html, page(reports, ask))
    _print(reports, comparison, as_json=options.json)
    promise = reports[0].promise
    return promise.exit_status if promise is not None else 0


def _evidence(options: argparse.Namespace) -> Evidence | None:
    """What the log and the metrics state together; the log wins."""
    if options.log is None and options.metrics is None:
        return None
    from kvseal.plan.logs import bounded_lines, read_log

    if options.log is not None and options.metrics is not None:
        raise ConfigError("give --log or --metrics, not both")
    if options.metrics is not None:
        from kvseal.plan.prom import fetch, read_metrics

        evidence = read_metrics(fetch(options.metrics))
    elif options.log == "-":
        evidence = read_log(bounded_lines(sys.stdin))
    else:
        try:
            with Path(options.log).open(encoding="utf-8", errors="replace") as file:
                evidence = read_log(bounded_lines(file))
        except OSError as error:
            raise ConfigError(f"{options.log} cannot be read: {error.strerror or error}") from error
    if not evidence.found:
        raise ConfigError(
            "nothing there states a KV pool or a context; I know start-up logs of vLLM, SGLang, llama.cpp, TensorRT-LLM and KVSeal"
        )
    return evidence


def _evidence_alone(ask: Ask, evidence: Evidence, *, as_json: bool) -> int:
    """No model was named: the log's own numbers, and the promise against them."""
    from kvseal.plan.evidence import ask_with, claim_of
    from kvseal.plan.table_more import render_evidence

    claim = claim_of(evidence)
    result = None
    promised = ask.promise_tokens or (evidence.context_tokens if claim is not None else None)
    if promised is not None:
        claims = [*ask.claims] or ([claim] if claim is not None else [])
        if not claims:
            raise ConfigError("the log does not state the pool in tokens: name the model too, so that its bytes can be turned into tokens")
        result = judge(promised, claims, limit=limit_of(None, ask_with(ask, evidence)))
    if as_json:
        json.dump({"log": plain(evidence), "promise": None if result is None else promise_json(result)}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(render_evidence(evidence))
        if result is not None:
            sys.stdout.write("\n" + render_promise(result) + "\n")
    return result.exit_status if result is not None and ask.promise_tokens is not None else 0


def _print(reports: list[Report], comparison: Comparison | None, *, as_json: bool) -> None:
    if as_json:
        pages = [report_json(report) for report in reports]
        if comparison is not None:
            pages[0]["log"] = plain(comparison)
        json.dump(pages[0] if len(pages) == 1 else {"models": pages}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif len(reports) > 1:
        from kvseal.plan.table_more import render_side_by_side

        sys.stdout.write(render_side_by_side(reports))
    else:
        sys.stdout.write(render(reports[0]))
        if comparison is not None:
            from kvseal.plan.table_more import render_comparison, render_evidence

            sys.stdout.write("\n" + render_evidence(comparison.evidence) + render_comparison(comparison))


def write_file(path: str, text: str) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
