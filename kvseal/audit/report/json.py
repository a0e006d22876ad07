"""The report as JSON: every field of it, stable names, for programs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvseal.audit.findings import ProbeResult, Report

SCHEMA = "kvseal-audit/1"


def render(report: Report) -> str:
    """JSON text, two spaces deep."""
    verdicts = {"exit_status": report.exit_status, "findings": len(report.findings)}
    body: dict[str, Any] = {"schema": SCHEMA, **verdicts, **_plain(report)}
    body["results"] = [_result(result) for result in report.results]
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def _plain(report: Report) -> dict[str, Any]:
    body = dataclasses.asdict(report)
    body.pop("results")
    return body


def _result(result: ProbeResult) -> dict[str, Any]:
    return {**dataclasses.asdict(result), "verdict": result.verdict.value}
