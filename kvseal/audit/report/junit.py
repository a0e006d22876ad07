"""The report as JUnit XML: one suite, one test case a probe, so that a CI job shows and counts it like any other test."""

from __future__ import annotations

from xml.etree import ElementTree as Tree

from kvseal.audit.findings import Finding, ProbeResult, Report, Verdict


def render(report: Report) -> str:
    """XML text with its declaration. Findings are failures; what could not be proved is said in ``system-out``."""
    results = report.results
    failed = sum(result.verdict is Verdict.FOUND for result in results)
    skipped = sum(result.verdict in (Verdict.SKIPPED, Verdict.UNPROVEN) for result in results)
    counts = {
        "tests": str(len(results) + bool(report.stopped)),
        "failures": str(failed),
        "errors": str(int(bool(report.stopped))),
        "time": f"{report.seconds:.3f}",
    }
    root = Tree.Element("testsuites", {"name": "kvseal audit", **counts})  # Jenkins takes no count of what was skipped here, only below.
    suite = Tree.SubElement(root, "testsuite", {"name": _clean(report.target.get("address", "offline")), **counts, "skipped": str(skipped)})
    suite.set("timestamp", report.started_utc.rstrip("Z"))
    for result in results:
        _case(suite, result)
    if report.stopped:
        case = Tree.SubElement(suite, "testcase", {"classname": "kvseal.audit", "name": "audit", "time": f"{report.seconds:.3f}"})
        Tree.SubElement(case, "error", {"message": _clean(report.stopped)})
    Tree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Tree.tostring(root, encoding="unicode") + "\n"


def _case(suite: Tree.Element, result: ProbeResult) -> None:
    case = Tree.SubElement(suite, "testcase", {"classname": "kvseal.audit", "name": result.probe, "time": f"{result.seconds:.3f}"})
    if result.findings:
        _failure(case, result.findings)
    if result.verdict is Verdict.SKIPPED:
        Tree.SubElement(case, "skipped", {"message": _clean(result.skipped)})
    elif result.verdict is Verdict.UNPROVEN:
        Tree.SubElement(case, "skipped", {"message": _clean("; ".join(result.unproven) or "nothing could be proved")})
    lines = [f"proved: {text}" for text in result.proved] + [f"not proved: {text}" for text in result.unproven]
    if lines:
        Tree.SubElement(case, "system-out").text = _clean("\n".join(lines))


def _failure(case: Tree.Element, findings: list[Finding]) -> None:
    """One failure for all of them: many readers of JUnit files know only one in a test case."""
    said = [f"{finding.title} ({finding.grade}, {finding.confidence})" for finding in findings]
    failure = Tree.SubElement(case, "failure", {"type": findings[0].rule, "message": _clean("; ".join(said))})
    parts = []
    for finding, title in zip(findings, said, strict=True):
        shown = [f"evidence: {exhibit.request} -> {exhibit.came_back}" for exhibit in finding.exhibits]
        remedy = [f"remedy: {finding.remedy}"] if finding.remedy else []
        parts.append("\n".join([f"[{finding.rule}] {title}", finding.proof, *shown, *remedy, *finding.sources]))
    failure.text = _clean("\n\n".join(parts))


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold: a stranger's answer may have any."""
    return "".join(
        char for char in text if char in "\t\n\r" or 0x20 <= ord(char) <= 0xD7FF or 0xE000 <= ord(char) <= 0xFFFD or ord(char) > 0xFFFF
    )
