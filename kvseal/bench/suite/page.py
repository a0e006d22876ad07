"""The scoreboard as one HTML page: table, every pair as a dot against its target, plots. No script, nothing fetched.

Owns the page's layout; numbers are written by `text`, plots drawn by the planner's `svg`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from kvseal.bench.suite.board import Entry, Plot, Result
from kvseal.bench.suite.text import all_entries, score_text, side_text, summary_text, target_text, verdict_text
from kvseal.plan.svg import Series, line_chart

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6672;--line:#d5dae0;--back:#fbfbfa;--card:#fff;--bad:#b3261e;--good:#1a7f4b}
@media(prefers-color-scheme:dark){:root{--ink:#e8e6e1;--soft:#a0a7af;--line:#3a4048;--back:#16181b;--card:#1e2125;--bad:#ff8a80;--good:#6fd39b}}
body{margin:0 auto;max-width:1200px;padding:2rem 1rem;background:var(--back);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.3rem 0;color:var(--soft)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;background:var(--card);font-size:.88rem}
th,td{border:1px solid var(--line);padding:.35rem .55rem;text-align:left;vertical-align:top}td small{color:var(--soft)}
.met{color:var(--good);font-weight:600}.missed{color:var(--bad);font-weight:600}.none{color:var(--soft)}
.dots{width:170px;height:26px}.dot{fill:#2f6fde;fill-opacity:.75}.goal{stroke:var(--bad);stroke-width:1.5}.axis{stroke:var(--line)}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.5rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1rem}figcaption{font-size:.9rem;color:var(--soft)}
figure svg{width:100%;height:auto}.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:11px}.label{fill:var(--soft);font-size:12px}
.mark{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:2 3}
.s0{stroke:#2f6fde}.s1{stroke:#d9822b}.s2{stroke:#2a9d6f}.s3{stroke:#a24bc4}.s4{stroke:#c2405a}.s5{stroke:#7a8694}
""".strip()

_WIDTH, _HEIGHT, _EDGE = 170, 26, 8


def page(results: Sequence[Result], machine: Mapping[str, str]) -> str:
    """The whole document."""
    entries = all_entries(results)
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    body = f"<h1>KVSeal: scoreboard</h1><p>{escape(facts)}</p><p>{escape(summary_text(entries))}</p>{_table(entries)}"
    body += "".join(_section(result) for result in results)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>KVSeal: scoreboard</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def picture(plot: Plot) -> str:
    """One plot as an SVG file that stands by itself."""
    head, rest = _chart(plot).split(">", 1)
    back = '<rect width="100%" height="100%" fill="var(--card)"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{_STYLE}text{{font-family:system-ui,sans-serif}}</style>{back}{rest}\n'


def dots(entry: Entry) -> str:
    """Every ratio as a dot on a line from zero, the target as a stroke."""
    if not entry.ratios:
        return ""
    goals = [] if entry.target is None else [goal for goal in (entry.target.low, entry.target.high) if goal is not None]
    top = max([*entry.ratios, *goals, 1e-12]) * 1.08
    middle = _HEIGHT / 2

    def x(value: float) -> float:
        return _EDGE + max(0.0, value) / top * (_WIDTH - 2 * _EDGE)

    parts = [f'<line class="axis" x1="{_EDGE}" x2="{_WIDTH - _EDGE}" y1="{middle}" y2="{middle}"/>']
    parts += [f'<line class="goal" x1="{x(goal):.1f}" x2="{x(goal):.1f}" y1="4" y2="{_HEIGHT - 4}"/>' for goal in goals]
    parts += [f'<circle class="dot" cx="{x(ratio):.1f}" cy="{middle}" r="4"/>' for ratio in entry.ratios]
    label = escape(f"{entry.name}: {score_text(entry)}", quote=True)
    return f'<svg class="dots" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _table(entries: Sequence[Entry]) -> str:
    heads = ("#", "figure", "A", "B", "A / B, median (min to max, pairs)", "pairs", "target", "")
    rows = "".join(_row(entry) for entry in entries)
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(entry: Entry) -> str:
    if entry.no_score:
        why = escape(f"no score: {entry.no_score}")
        goal = escape(target_text(entry.target))
        return (
            f'<tr><td>{escape(entry.figure)}</td><td>{escape(entry.name)}</td><td colspan="4" class="none">{why}</td>'
            f"<td>{goal}</td><td></td></tr>"
        )
    small = "; ".join(part for part in (entry.checked, entry.note) if part)
    name = escape(entry.name) + (f"<br><small>{escape(small)}</small>" if small else "")
    css = {True: "met", False: "missed", None: "none"}[entry.met]
    cells = [escape(entry.figure), name, escape(side_text(entry.a)), escape(side_text(entry.b)), escape(score_text(entry)), dots(entry)]
    cells += [escape(target_text(entry.target)), f'<span class="{css}">{escape(verdict_text(entry))}</span>']
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _section(result: Result) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    ran = f"kvseal bench {result.name}: {result.seconds:.0f} s"
    if result.other_cores is not None:
        ran += f"; other processes used {result.other_cores:.2f} cores meanwhile"
    text = "".join(f"<p>{escape(line)}</p>" for line in (ran, settings, *result.remarks) if line)
    plots = "".join(_figure(plot) for plot in result.plots)
    return f'<h2>{escape(result.title)}</h2>{text}<div class="plots">{plots}</div>'


def _chart(plot: Plot) -> str:
    series = [Series(line.name, line.points, line.dashed) for line in plot.lines]
    return line_chart(plot.title, plot.x_label, plot.y_label, series, plot.marks)


def _figure(plot: Plot) -> str:
    return f"<figure>{_chart(plot)}<figcaption>{escape(plot.title)}</figcaption></figure>"
