"""The report for a terminal: what was found, what was proved, what was not. Plain text; colour only where a terminal is."""

from __future__ import annotations

import textwrap

from kvseal.audit.findings import Finding, ProbeResult, Report, Verdict

_WIDTH = 110
_MOST_CHARS = 2_000  # Of one line about the target.
_MARKS = {Verdict.PASSED: "pass", Verdict.FOUND: "FOUND", Verdict.UNPROVEN: "open", Verdict.SKIPPED: "skip"}
_COLOURS = {Verdict.PASSED: "32", Verdict.FOUND: "31;1", Verdict.UNPROVEN: "33", Verdict.SKIPPED: "2"}


def render(report: Report, *, colour: bool = False) -> str:
    """Text that ends in a line break."""
    lines = ["Audit of " + shown(report.target.get("address", "?")), ""]
    lines += [f"  {name:<20} {shown(value)[:_MOST_CHARS]}" for name, value in report.target.items() if name != "address"]
    lines.append("")
    for result in report.results:
        lines += _result(result, colour)
    lines += _summary(report)
    return "\n".join(lines) + "\n"


def _result(result: ProbeResult, colour: bool) -> list[str]:
    mark = _MARKS[result.verdict]
    if colour:
        mark = f"\x1b[{_COLOURS[result.verdict]}m{mark}\x1b[0m" + " " * (5 - len(mark))
    used = f"{result.requests} requests, {result.tokens} tokens, {result.seconds:.1f} s" if result.requests else ""
    lines = [f"{mark:<5}  {result.title}" + (f"   ({used})" if used else "")]
    for finding in result.findings:
        lines += _finding(finding)
    lines += _points("proved", result.proved) + _points("not proved", result.unproven)
    if result.skipped:
        lines += _points("skipped", [result.skipped])
    return [*lines, ""]


def _finding(finding: Finding) -> list[str]:
    lines = _wrap(f"** {finding.grade.upper()} [{finding.rule}] {finding.title} ({finding.confidence})", "       ")
    lines += _wrap(finding.proof, "          ")
    for exhibit in finding.exhibits[:2]:
        about = f"{exhibit.request}{' (' + exhibit.what + ')' if exhibit.what else ''} -> {exhibit.came_back}"
        lines += _wrap(f"evidence: {about}{' id ' + exhibit.server_id if exhibit.server_id else ''}", "          ")
    if finding.remedy:
        lines += _wrap(f"remedy: {finding.remedy}", "          ")
    if finding.sources:
        lines += _wrap("seen before: " + " ".join(finding.sources), "          ")
    return lines


def _points(name: str, points: list[str]) -> list[str]:
    return [line for point in points for line in _wrap(f"{name}: {point}", "       ")]


def shown(text: str) -> str:
    """`text` without what a terminal would obey (a stranger's model name may hold escape sequences): such characters are spelled out."""
    return "".join(char if char.isprintable() else " " if char.isspace() else f"\\x{ord(char):02x}" for char in text)


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        shown(text), _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False, break_long_words=False
    )


def _summary(report: Report) -> list[str]:
    used = f"{report.requests} requests, {report.tokens} tokens, {report.seconds:.0f} s"
    if report.stopped:
        return [*_wrap(f"Could not audit: {report.stopped}", ""), f"({used})"]
    found = report.findings
    if found:
        return [
            f"{len(found)} finding{'s' if len(found) != 1 else ''}: " + ", ".join(f"{f.rule} ({f.grade}, {f.confidence})" for f in found),
            f"({used})",
        ]
    if report.incomplete:
        names = ", ".join(report.incomplete)
        return [
            *_wrap(f"Nothing was found, but not everything was tried: could not audit. What did not come to its end: {names}.", ""),
            f"({used})",
        ]
    if report.exit_status == 2:
        return ["Nothing was found, but nothing was proved either: could not audit.", f"({used})"]
    listed = " What was not proved is listed above." if any(result.unproven for result in report.results) else ""
    return [f"Clean: nothing found.{listed} ({used})"]
