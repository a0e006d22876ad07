"""The report as one HTML file: no script, no font, no picture from elsewhere. Plots are drawn as SVG, one dot a measurement.

Everything that a server said goes through escaping; the page declares a policy that forbids scripts and connections besides.
"""

from __future__ import annotations

import math
from html import escape
from statistics import median

from kvseal.audit.findings import Finding, Grade, ProbeResult, Report, Series, Verdict

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2230; --paper: #fbfbf8; --soft: #667; --line: #d8d8d2; --bad: #b3261e; --good: #1b7a43;
--open: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e2; --paper: #16181d; --soft: #9aa; --line: #33363d; --bad: #ff7a70; --good:
#5fd08d; --open: #e0b341; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem; margin: 2rem auto; padding: 0
1rem; } h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; border-top: 1px solid var(--line); padding-top: 1rem } h3 {
font-size: 1rem; margin: .8rem 0 .2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0;
border-bottom: 1px solid var(--line) }
th { font-weight: 600; white-space: nowrap } code, pre { font: .85rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; white-space:
pre-wrap }
.found, .leak { color: var(--bad) } .passed { color: var(--good) } .open { color: var(--open) } .skipped, .soft { color: var(--soft) }
.badge { font-weight: 600 } .finding { border-left: 4px solid var(--bad); padding-left: 1rem; margin: 1rem 0 }
ul { padding-left: 1.2rem; margin: .3rem 0 } svg { max-width: 100%; height: auto } svg text { fill: var(--ink); font: 12px system-ui,
sans-serif }
"""
_CLASSES = {Verdict.PASSED: "passed", Verdict.FOUND: "found", Verdict.UNPROVEN: "open", Verdict.SKIPPED: "skipped"}
_DOT_HUES = (210, 25, 140, 285, 0, 60)


def render(report: Report) -> str:
    """A whole page."""
    address = report.target.get("address", "offline")
    body = [f"<h1>Audit of {escape(address)}</h1>", f"<p>{_headline(report)}</p>", _worst_first(report), _overview(report)]
    body += [_probe(result) for result in report.results]
    body += ["<h2>What was audited</h2>", _table(report.target), "<h2>How</h2>", _table(report.settings)]
    body.append(
        '<p class="soft">All prompts were synthetic. Keys appear as the beginning of a digest. A clean audit says what was tried and how'
        " sure it is; it is no proof that a server cannot leak.</p>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>Audit of {escape(address)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _headline(report: Report) -> str:
    used = f"{report.requests} requests, {report.tokens} tokens, {report.seconds:.0f} s, {escape(report.started_utc)}"
    if report.stopped:
        return f'<span class="badge found">Could not audit:</span> {escape(report.stopped)} <span class="soft">({used})</span>'
    count = len(report.findings)
    if count:
        return f'<span class="badge found">{count} finding{"s" if count != 1 else ""}</span> <span class="soft">({used})</span>'
    word = (
        f'<span class="badge open">Nothing found, and {"not everything tried" if report.incomplete else "nothing proved"}</span>'
        if report.exit_status
        else '<span class="badge passed">Clean</span>'
    )
    return f'{word} <span class="soft">({used})</span>'


def _worst_first(report: Report) -> str:
    """Every finding in one line that leads to its evidence."""
    order = list(Grade)
    entries = sorted(
        ((finding, result.probe) for result in report.results for finding in result.findings), key=lambda pair: order.index(pair[0].grade)
    )
    rows = "".join(
        f'<tr><th class="found">{escape(finding.grade.value)}</th>'
        f'<td><a href="#{_anchor(probe, finding)}">{escape(finding.title)}</a></td>'
        f'<td class="soft">{escape(finding.confidence.value)}</td></tr>'
        for finding, probe in entries
    )
    return f"<h2>Findings, worst first</h2><table>{rows}</table><h2>Probes</h2>" if rows else ""


def _anchor(probe: str, finding: Finding) -> str:
    """Where a finding stands on the page: no probe finds one rule twice."""
    return escape(f"{probe}-{finding.rule}", quote=True)


def _overview(report: Report) -> str:
    rows = "".join(
        f'<tr><th class="{_CLASSES[result.verdict]}">{escape(result.verdict.value)}</th><td>{escape(result.title)}</td>'
        f'<td class="soft">{result.requests} requests, {result.seconds:.1f} s</td></tr>'
        for result in report.results
    )
    return f"<table>{rows}</table>" if rows else ""


def _probe(result: ProbeResult) -> str:
    parts = [f'<h2>{escape(result.title)} <span class="{_CLASSES[result.verdict]}">{escape(result.verdict.value)}</span></h2>']
    parts += [_finding(finding, _anchor(result.probe, finding)) for finding in result.findings]
    for name, points in (
        ("Proved", result.proved),
        ("Not proved", result.unproven),
        ("Skipped", [result.skipped] if result.skipped else []),
    ):
        if points:
            parts.append(f"<h3>{name}</h3><ul>" + "".join(f"<li>{escape(point)}</li>" for point in points) + "</ul>")
    for plot in dict.fromkeys(series.plot for series in result.series):
        parts.append(_plot(plot, [series for series in result.series if series.plot == plot and series.values]))
    return "\n".join(parts)


def _finding(finding: Finding, anchor: str) -> str:
    evidence = "".join(
        f"<li><code>{escape(exhibit.request)}</code>{' (' + escape(exhibit.what) + ')' if exhibit.what else ''}"
        f"<br><code>{escape(exhibit.came_back)}</code>"
        f"{'<br><span class=soft>id ' + escape(exhibit.server_id) + '</span>' if exhibit.server_id else ''}</li>"
        for exhibit in finding.exhibits
    )
    sources = " ".join(_link(source) for source in finding.sources)
    return (
        f'<div class="finding" id="{anchor}"><h3>{escape(finding.title)}</h3>'
        f'<p class="soft">{escape(finding.grade.value)}, {escape(finding.confidence.value)},'
        f" <code>{escape(finding.rule)}</code></p><p>{escape(finding.proof)}</p>"
        + (f"<ul>{evidence}</ul>" if evidence else "")
        + (f"<p>Remedy: {escape(finding.remedy)}</p>" if finding.remedy else "")
        + (f'<p class="soft">Seen before: {sources}</p>' if sources else "")
        + "</div>"
    )


def _link(source: str) -> str:
    return (
        f'<a href="{escape(source, quote=True)}" rel="noreferrer">{escape(source)}</a>' if source.startswith("https://") else escape(source)
    )


def _table(values: dict[str, str]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items()) + "</table>"


def _plot(title: str, groups: list[Series]) -> str:
    """One row a group, one dot a measurement, a bar at the median; the axis starts at zero."""
    if not groups:
        return ""
    top = _round_up(max(max(series.values) for series in groups) or 1.0)
    left, width, row = 210, 560, 34
    height = row * len(groups) + 46
    parts = [
        f"<h3>{escape(title)}</h3>",
        f'<svg viewBox="0 0 {left + width + 40} {height}" role="img" aria-label="{escape(title, quote=True)}">',
    ]
    for index, series in enumerate(groups):
        middle = row * index + 22
        hue = _DOT_HUES[index % len(_DOT_HUES)]
        parts.append(f'<text x="{left - 12}" y="{middle + 4}" text-anchor="end">{escape(series.group)} ({len(series.values)})</text>')
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{middle}" y2="{middle}" stroke="currentColor" stroke-opacity=".15"/>')
        for number, value in enumerate(series.values):
            x, y = left + width * value / top, middle + ((number * 7) % 11 - 5)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="hsl({hue} 65% 50%)" fill-opacity=".65"/>')
        x = left + width * median(series.values) / top
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{middle - 11}" y2="{middle + 11}" stroke="currentColor" stroke-width="2"/>')
    base = row * len(groups) + 12
    for step in range(5):
        x, value = left + width * step / 4, top * step / 4
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{_amount(value, groups[0].unit)}</text>')
    return "\n".join([*parts, "</svg>"])


def _round_up(value: float) -> float:
    """The end of an axis: a number whose quarters are short to write."""
    scale = 10.0 ** math.floor(math.log10(value))
    return scale * next(step for step in (1.0, 2.0, 4.0, 6.0, 8.0, 10.0) if step * scale >= value * (1 - 1e-9))


def _amount(value: float, unit: str) -> str:
    return f"{1e3 * value:.3g} ms" if unit == "s" else f"{value:.3g} {escape(unit)}"
