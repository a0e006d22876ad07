"""A self-contained page: the report's tables and four plots, no script, nothing fetched.

Owns the page's layout. Every number comes from the same functions as the text report.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape

from kvseal.core.errors import ConfigError, ModelError
from kvseal.plan.footprint import Parallel, footprint
from kvseal.plan.planner import Ask, Report
from kvseal.plan.svg import Series, bar_chart, line_chart
from kvseal.plan.table import render
from kvseal.plan.units import GIB, gib

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6672;--line:#d5dae0;--back:#fbfbfa;--card:#fff;--bad:#b3261e;--good:#1a7f4b}
@media(prefers-color-scheme:dark){:root{--ink:#e8e6e1;--soft:#a0a7af;--line:#3a4048;--back:#16181b;--card:#1e2125;--bad:#ff8a80;--good:#6fd39b}}
body{margin:0 auto;max-width:1000px;padding:2rem 1rem;background:var(--back);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.3rem 0;color:var(--soft)}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:1rem}
pre{font-size:.82rem}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.5rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1rem}
figcaption{font-size:.9rem;padding:.2rem .6rem;color:var(--soft)}
svg{width:100%;height:auto}.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:11px}.label{fill:var(--soft);font-size:12px}
.mark{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:2 3}
.s0{stroke:#2f6fde}.s1{stroke:#d9822b}.s2{stroke:#2a9d6f}.s3{stroke:#a24bc4}.s4{stroke:#c2405a}.s5{stroke:#7a8694}
.f0{fill:#2f6fde}.f1{fill:#d9822b}.f2{fill:#2a9d6f}.f3{fill:#a24bc4}.f4{fill:#c2405a}.f5{fill:#7a8694}
.verdict{font-size:1.3rem;font-weight:600;padding:.6rem 1rem;border-radius:8px;border:2px solid;margin:1rem 0;color:var(--bad)}
.held{color:var(--good)}
""".strip()


def page(reports: list[Report], ask: Ask) -> str:
    """The whole document for one model, or one section per compared model."""
    title = ", ".join(report.shape.name for report in reports)
    body = "".join(_section(report, ask) for report in reports)
    if len(reports) > 1:
        body = _comparison(reports) + body
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>KV size: {escape(title[:120])}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _section(report: Report, ask: Ask) -> str:
    shape = report.shape
    plots = [plot for plot in (_by_context(report), _by_users(report), _by_tp(report), _by_window(report)) if plot]
    return (
        f"<h1>{escape(shape.name)}</h1><p>{escape(shape.architecture or shape.model_type)}, family {escape(shape.family)}: "
        f"{gib(report.sequence_bytes)} GiB of KV for one request of {report.context_tokens:,} tokens, "
        f"{gib(report.all_users_bytes)} GiB for {report.users} (bytes of one GPU at TP {report.parallel.tp})</p>"
        f'{_verdict(report)}<div class="plots">{"".join(plots)}</div><h2>All figures</h2><pre>{escape(render(report))}</pre>'
    )


def _verdict(report: Report) -> str:
    promise = report.promise
    if promise is None:
        return ""
    word = "HELD" if promise.held else "BROKEN"
    css = "verdict held" if promise.held else "verdict"
    return (
        f'<div class="{css}">PROMISE {word}: {promise.promised_tokens:,} tokens promised, '
        f"the largest true context is {promise.largest_true_context:,}"
        f"{'' if all(verdict.certain for verdict in promise.verdicts) else ' (not certain: the pool is an estimate)'}</div>"
    )


def _figure(caption: str, svg: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _contexts(report: Report) -> list[int]:
    top = max(report.context_tokens, 4096)
    points = [1 << exponent for exponent in range(10, top.bit_length()) if 1 << exponent < top]
    return [*points, top]


def _marks(report: Report) -> list[tuple[float, str]]:
    plan = report.engine
    if plan is None or plan.pool is None:
        return []
    return [(plan.pool.available_bytes / GIB, f"pool {gib(plan.pool.available_bytes)} GiB")]


def _by_context(report: Report) -> str:
    series = [
        Series(name, tuple((x, sized.sequence_bytes(x) / GIB) for x in _contexts(report)))
        for name, sized in report.formats
        if not sized.unavailable
    ]
    marks = [mark for mark in _marks(report) if mark[0] < 4 * max(series[0].points[-1][1], 1e-9)]
    chart = line_chart("memory against context", "context (tokens)", "GiB, one request", series, marks)
    return _figure("Memory of one request against its context, by cache format", chart)


def _by_users(report: Report) -> str:
    top = max(report.users, 16)
    users = [1 << exponent for exponent in range(top.bit_length() + 1)]
    series = [
        Series(name, tuple((n, n * sized.sequence_bytes(report.context_tokens) / GIB) for n in users))
        for name, sized in report.formats
        if not sized.unavailable
    ]
    marks = [mark for mark in _marks(report) if mark[0] < 2 * max(series[0].points[-1][1], 1e-9)]
    chart = line_chart("memory against users", "requests at once", "GiB", series, marks)
    return _figure(f"Memory against requests of {report.context_tokens:,} tokens at once", chart)


def _by_tp(report: Report) -> str:
    """What tensor parallel changes: nothing for latent attention, copies beyond the KV heads."""
    sizes = [tp for tp in (1, 2, 4, 8, 16) if _possible(report, tp)]
    values: list[list[float | None]] = []
    for _, sized in report.formats:
        row: list[float | None] = []
        for tp in sizes:
            other = footprint(report.shape, sized.kv_format, replace(Parallel(), tp=tp))
            row.append(None if other.unavailable else other.sequence_bytes(report.context_tokens) / GIB)
        values.append(row)
    names = [name for name, _ in report.formats]
    chart = bar_chart("bytes per GPU by TP", "GiB per GPU", [f"TP {tp}" for tp in sizes], names, values)
    return _figure("One request per GPU, by tensor parallel and cache format", chart)


def _possible(report: Report, tp: int) -> bool:
    try:
        footprint(report.shape, report.kv_format, Parallel(tp=tp))
    except (ConfigError, ModelError):
        return False
    return True


def _by_window(report: Report) -> str:
    """Which group the bytes belong to, as the context grows; only where there is more than one."""
    groups = report.main.groups
    if len(groups) < 2:
        return ""
    series = []
    for group in groups[:6]:
        alone = replace(report.main, groups=(group,))
        series.append(Series(str(group.group.cache.kind), tuple((x, alone.sequence_bytes(x) / GIB) for x in _contexts(report))))
    chart = line_chart("memory by attention group", "context (tokens)", "GiB, one request", series)
    return _figure(f"Where the bytes are, by attention group ({report.kv_format.name})", chart)


def _comparison(reports: list[Report]) -> str:
    top = max(report.context_tokens for report in reports)
    points = [1 << exponent for exponent in range(10, top.bit_length()) if 1 << exponent < top] + [top]
    series = [Series(report.shape.name, tuple((x, report.main.sequence_bytes(x) / GIB) for x in points)) for report in reports[:6]]
    chart = line_chart("models compared", "context (tokens)", "GiB, one request", series)
    return _figure("Models compared", chart)
