"""Reports of hostile text: nothing a server says becomes markup, and every form stays readable by its own parser."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from kvseal.audit.findings import Confidence, Exhibit, Finding, Grade, ProbeResult, Report, Series, Verdict
from kvseal.audit.report import html, junit, sarif, terminal
from kvseal.audit.report import json as json_report

EVIL = "<script>alert(1)</script>\x00\x1b[31m]]>&\ud800\"'"


def _report(findings: bool = True) -> Report:
    result = ProbeResult("limits", "Limits", proved=[EVIL], unproven=[EVIL])
    if findings:
        shown = (Exhibit(EVIL, EVIL, EVIL, EVIL),)
        sources = ("javascript:alert(1)", "https://example.org/?a=1&b=<x>")
        result.find(Finding("limits.x", Grade.LEAK, Confidence.PROVEN, EVIL, EVIL, EVIL, shown, sources))
    result.series.append(Series(EVIL, EVIL, "s", (0.0, 0.5, 1.0)))
    result.series.append(Series("all zero", "none", "nats", (0.0, 0.0)))
    return Report({"address": EVIL}, {"keys": EVIL}, "2026-01-01T00:00:00Z", [result])


def test_html_holds_no_markup_of_a_stranger() -> None:
    page = html.render(_report())
    assert "<script" not in page and "javascript:alert(1)" in page and 'href="javascript' not in page
    assert "Content-Security-Policy" in page and page.count("<svg") == 2


def test_junit_is_xml_and_sarif_and_json_are_json() -> None:
    root = ElementTree.fromstring(junit.render(_report()).encode("utf-8", "replace"))
    assert root.get("failures") == "1" and root.find(".//failure") is not None
    run = json.loads(sarif.render(_report()))["runs"][0]
    assert run["results"][0]["ruleIndex"] == 0 and run["tool"]["driver"]["rules"][0]["id"] == "limits.x"
    assert json.loads(json_report.render(_report()))["results"][0]["verdict"] == "found"


def test_a_stopped_audit_is_an_error_in_every_form() -> None:
    report = Report({"address": "http://x/v1"}, {}, "2026-01-01T00:00:00Z", stopped="nobody there")
    assert report.exit_status == 2
    assert ElementTree.fromstring(junit.render(report)).get("errors") == "1"
    assert json.loads(sarif.render(report))["runs"][0]["invocations"][0]["executionSuccessful"] is False
    assert "Could not audit" in html.render(report) and "Could not audit: nobody there" in terminal.render(report)


def test_exit_status_and_verdicts() -> None:
    assert _report().exit_status == 1 and _report(findings=False).exit_status == 0
    nothing = ProbeResult("leak", "Leak")
    assert nothing.verdict is Verdict.UNPROVEN
    assert Report({}, {}, "", [nothing]).exit_status == 2
    nothing.skipped = "budget"
    assert nothing.verdict is Verdict.SKIPPED


def test_one_rule_is_reported_once() -> None:
    result = ProbeResult("leak", "Leak")
    for title in ("first", "second"):
        result.find(Finding("leak.x", Grade.LEAK, Confidence.PROVEN, title, ""))
    assert [finding.title for finding in result.findings] == ["first"]


def test_findings_are_sorted_worst_first() -> None:
    result = ProbeResult("leak", "Leak")
    for rule, grade in (("a", Grade.SETTING), ("b", Grade.LEAK), ("c", Grade.LIMIT)):
        result.find(Finding(rule, grade, Confidence.PROVEN, rule, ""))
    assert [finding.rule for finding in Report({}, {}, "", [result]).findings] == ["b", "c", "a"]
