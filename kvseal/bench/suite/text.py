"""The scoreboard as text for a terminal, as a Markdown table for the documents, and as JSON.

Owns how a number is written, once for all reports. The JSON holds every raw value, so all the others can be made again from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvseal.bench.suite.board import Entry, Line, Plot, Result, Side, Target, figure_order

SCHEMA = "kvseal-bench-1"


def number(value: float) -> str:
    """Three significant digits or more, never an exponent."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 1 if size >= 100 else 2 if size >= 1 else 3 if size >= 0.1 else 4 if size >= 0.01 else 6
    return f"{value:.{digits}f}" if value else "0"


def side_text(side: Side | None) -> str:
    return "" if side is None else f"{side.name}: {number(side.middle)} {side.unit}"


def score_text(entry: Entry) -> str:
    """ "2.41 (2.33 to 2.52, n=5)"; without a B with its unit."""
    ratios = entry.ratios
    if entry.score is None or entry.a is None:
        return ""
    unit = "" if entry.b is not None else f" {entry.a.unit}"
    if len(ratios) == 1:
        return f"{number(entry.score)}{unit} (n=1)"
    return f"{number(entry.score)}{unit} ({number(min(ratios))} to {number(max(ratios))}, n={len(ratios)})"


def target_text(target: Target | None) -> str:
    if target is None:
        return ""
    if target.low is not None and target.high is not None:
        return f"{number(target.low)} to {number(target.high)}"
    return f">= {number(target.low)}" if target.low is not None else f"<= {number(target.high or 0.0)}"


def verdict_text(entry: Entry) -> str:
    return f"{entry.verdict}, few pairs" if entry.is_short and entry.verdict else entry.verdict


def all_entries(results: Sequence[Result]) -> list[Entry]:
    return sorted((entry for result in results for entry in result.entries), key=figure_order)


def board_text(entries: Sequence[Entry]) -> str:
    """A line or two each: what, score, target, verdict; below it both sides."""
    lines = []
    for entry in entries:
        head = f"{entry.figure:>6}  {entry.name}"
        if entry.no_score:
            lines.append(f"{head:<74} no score: {entry.no_score}")
            continue
        lines.append(f"{head:<74} {score_text(entry):<36} {target_text(entry.target):<12} {verdict_text(entry)}".rstrip())
        sides = f"{side_text(entry.a)}  |  {side_text(entry.b)}" if entry.b is not None else ""
        extra = "; ".join(part for part in (sides, entry.checked, entry.note) if part)
        if extra:
            lines.append(f"{'':8}{extra}")
    return "\n".join(lines)


def summary_text(entries: Sequence[Entry]) -> str:
    """How many targets are met, and which are not."""
    judged = [entry for entry in entries if entry.met is not None]
    missed = [f"{entry.figure} {entry.name}" for entry in judged if not entry.met]
    absent = sum(1 for entry in entries if entry.no_score)
    text = f"{len(judged) - len(missed)} of {len(judged)} targets met"
    text += f"; {absent} without a score" if absent else ""
    return text + (f"; missed: {'; '.join(missed)}" if missed else "")


def board_markdown(results: Sequence[Result], machine: Mapping[str, str]) -> str:
    """A table for the documents, generated so that no figure is typed."""
    lines = [", ".join(f"{name}: {value}" for name, value in machine.items()), ""]
    lines += ["| # | figure | A | B | A / B, median (min to max, pairs) | target | |", "|---|---|---|---|---|---|---|"]
    for entry in all_entries(results):
        if entry.no_score:
            cells = [entry.figure, entry.name, "", "", "", target_text(entry.target), f"no score: {entry.no_score}"]
        else:
            named = entry.name + (f" ({entry.note})" if entry.note else "")
            sides = [side_text(entry.a), side_text(entry.b)] if entry.b is not None else [entry.a.name if entry.a is not None else "", ""]
            cells = [entry.figure, named, *sides, score_text(entry), target_text(entry.target), verdict_text(entry)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", summary_text(all_entries(results))]
    return "\n".join(lines) + "\n"


def as_json(results: Sequence[Result], machine: Mapping[str, str]) -> dict[str, Any]:
    """Everything, raw pairs included, with what follows from them beside."""
    return {"schema": SCHEMA, "machine": dict(machine), "results": [_result_json(result) for result in results]}


def from_json(data: Mapping[str, Any]) -> tuple[list[Result], dict[str, str]]:
    """The way back; derived values are not read. Raises ValueError for another schema."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"this is no report of kvseal bench: it does not bear the schema {SCHEMA!r}")
    return [_result_of(each) for each in data["results"]], dict(data["machine"])


def _result_json(result: Result) -> dict[str, Any]:
    found = asdict(result)
    for entry, raw in zip(result.entries, found["entries"], strict=True):
        raw |= {"ratios": list(entry.ratios), "score": entry.score, "met": entry.met, "verdict": entry.verdict}
    return found


def _result_of(raw: Mapping[str, Any]) -> Result:
    fields = dict(raw)
    fields["entries"] = [_entry_of(each) for each in raw["entries"]]
    fields["plots"] = [_plot_of(each) for each in raw["plots"]]
    return Result(**fields)


def _entry_of(raw: Mapping[str, Any]) -> Entry:
    a, b = (None if side is None else Side(side["name"], side["unit"], tuple(side["values"])) for side in (raw["a"], raw["b"]))
    target = None if raw["target"] is None else Target(**raw["target"])
    texts = {name: raw[name] for name in ("figure", "name", "checked", "note", "no_score")}
    return Entry(a=a, b=b, target=target, **texts)


def _plot_of(raw: Mapping[str, Any]) -> Plot:
    lines = tuple(Line(line["name"], tuple((x, y) for x, y in line["points"]), bool(line.get("dashed"))) for line in raw["lines"])
    return Plot(raw["title"], raw["x_label"], raw["y_label"], lines, tuple((y, name) for y, name in raw["marks"]))
