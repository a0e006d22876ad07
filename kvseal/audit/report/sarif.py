"""The report as SARIF 2.1.0, for code-scanning views.

A finding is at a server, not in a file: the server's address is its logical place. Code-scanning services take no result without a file,
and no file whose name is an address, so each result has a stable, relative name that no repository holds. Laws: valid by the schema of
OASIS, and by what GitHub's code scanning asks for beyond it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import Any
from urllib.parse import quote

from kvseal import __version__
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
_SECURITY_SEVERITY = {Grade.LEAK: "9.1", Grade.ADVISORY: "7.5", Grade.NOT_ISOLATED: "5.3"}
"""Grades that are a matter of security, with the score (0 to 10) by which code scanning sorts them."""
_RANKS = {Confidence.PROVEN: 95.0, Confidence.LIKELY: 75.0, Confidence.SUSPECTED: 40.0}
_PRECISION = {Confidence.PROVEN: "very-high", Confidence.LIKELY: "high", Confidence.SUSPECTED: "medium"}
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_HOME = "https://pypi.org/project/kvseal/"
_MOST_CHARS = 1_000  # Of a description: code scanning takes 1024.


def render(report: Report) -> str:
    """JSON text."""
    rules: dict[str, dict[str, Any]] = {}
    for finding in report.findings:
        rules.setdefault(finding.rule, _rule(finding))
    address = report.target.get("address", "offline")
    place = _place(address)
    seen: Counter[str] = Counter()
    notes = [{"level": "error", "message": {"text": report.stopped}}] if report.stopped else []
    notes += [{"level": "warning", "message": {"text": f"the probe {name} did not come to its end"}} for name in report.incomplete]
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "kvseal audit", "version": __version__, "informationUri": _HOME, "rules": list(rules.values())}},
        "automationDetails": {"id": f"{place}/"},  # So that audits of two servers do not replace each other.
        "invocations": [{"executionSuccessful": not report.stopped, "exitCode": report.exit_status, "startTimeUtc": report.started_utc}],
        "results": [_result(finding, address, place, list(rules), seen) for finding in report.findings],
    }
    if notes:
        run["invocations"][0]["toolExecutionNotifications"] = notes
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _place(address: str) -> str:
    """A relative name for the server, as a path: code scanning refuses addresses with a scheme, and what could be read as one."""
    return "kvseal-audit/" + (quote(re.sub(r"^\w+://", "", address), safe="/", errors="replace").strip("/") or "server")


def _rule(finding: Finding) -> dict[str, Any]:
    security = _SECURITY_SEVERITY.get(finding.grade)
    rule: dict[str, Any] = {
        "id": finding.rule,
        "name": "".join(part[:1].upper() + part[1:] for part in re.split(r"[^A-Za-z0-9]+", finding.rule)),
        "shortDescription": {"text": finding.title[:_MOST_CHARS]},
        "fullDescription": {"text": f"{finding.title[:_MOST_CHARS]} (graded as {finding.grade.value})"},
        "help": {"text": finding.remedy or finding.title},
        "defaultConfiguration": {"level": _LEVELS[finding.grade]},
        "properties": {
            "tags": ["security" if security else "reliability", finding.grade.value],
            "precision": _PRECISION[finding.confidence],
        },
    }
    if security:
        rule["properties"]["security-severity"] = security
    if addresses := [source for source in finding.sources if source.startswith("https://")]:
        rule["helpUri"] = quote(addresses[0], safe="/:?#[]@!$&'()*+,;=%~", errors="replace")
    return rule


def _result(finding: Finding, address: str, place: str, rules: list[str], seen: Counter[str]) -> dict[str, Any]:
    evidence = "".join(f"\n- {exhibit.request}: {exhibit.came_back}" for exhibit in finding.exhibits)
    fingerprint = hashlib.sha256(f"{finding.rule} {place}".encode()).hexdigest()[:16]
    seen[fingerprint] += 1
    return {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "level": _LEVELS[finding.grade],
        "rank": _RANKS[finding.confidence],
        "message": {"text": f"{finding.title}. {finding.proof}{evidence}"},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": place}, "region": {"startLine": 1}},
                "logicalLocations": [{"fullyQualifiedName": address, "kind": "resource"}],
            }
        ],
        "partialFingerprints": {"primaryLocationLineHash": f"{fingerprint}:{seen[fingerprint]}"},
    }
