"""The report as SARIF 2.1.0, for code-scanning views. A finding is at a server, not in a file, so its place is the server's address."""

from __future__ import annotations

import json
from typing import Any

from kvseal.audit.findings import Confidence, Finding, Grade, Report

_LEVELS = {
    Grade.LEAK: "error",
    Grade.CORRUPTION: "error",
    Grade.LIMIT: "error",
    Grade.HANG: "error",
    Grade.HONESTY: "warning",
    Grade.NOT_ISOLATED: "warning",
    Grade.ADVISORY: "error",
    Grade.SETTING: "warning",
}
_RANKS = {Confidence.PROVEN: 95.0, Confidence.LIKELY: 75.0, Confidence.SUSPECTED: 40.0}
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render(report: Report) -> str:
    """JSON text."""
    rules = {finding.rule: _rule(finding) for finding in report.findings}
    address = report.target.get("address", "offline")
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "kvseal audit", "informationUri": "https://pypi.org/project/kvseal/", "rules": list(rules.values())}},
        "invocations": [{"executionSuccessful": not report.stopped, "exitCode": report.exit_status, "startTimeUtc": report.started_utc}],
        "results": [_result(finding, address, list(rules)) for finding in report.findings],
    }
    if report.stopped:
        run["invocations"][0]["toolExecutionNotifications"] = [{"level": "error", "message": {"text": report.stopped}}]
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _rule(finding: Finding) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "id": finding.rule,
        "shortDescription": {"text": finding.title},
        "defaultConfiguration": {"level": _LEVELS[finding.grade]},
        "properties": {
            "tags": [
                "security" if finding.grade in (Grade.LEAK, Grade.NOT_ISOLATED, Grade.ADVISORY) else "reliability",
                finding.grade.value,
            ]
        },
    }
    if finding.remedy:
        rule["help"] = {"text": finding.remedy}
    if addresses := [source for source in finding.sources if source.startswith("https://")]:
        rule["helpUri"] = addresses[0]
    return rule


def _result(finding: Finding, address: str, rules: list[str]) -> dict[str, Any]:
    evidence = "".join(f"\n- {exhibit.request}: {exhibit.came_back}" for exhibit in finding.exhibits)
    return {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "level": _LEVELS[finding.grade],
        "rank": _RANKS[finding.confidence],
        "message": {"text": f"{finding.title}. {finding.proof}{evidence}"},
        "locations": [{"logicalLocations": [{"fullyQualifiedName": address, "kind": "resource"}]}],
    }
