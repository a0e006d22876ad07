"""Small charts as SVG text: lines on a logarithmic axis, and grouped bars. No library, no script, no outside file.

Owns axes, ticks and escaping. Colours are CSS classes of the page, so that light and dark both work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 16, 44


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


def nice_ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    return [step * i for i in range(ceil(top / step) + 1)]


def short(value: float) -> str:
    """4096 -> 4Ki, 1048576 -> 1Mi."""
    for unit, size in (("Mi", 2**20), ("Ki", 2**10)):
        if value >= size:
            return f"{value / size:g}{unit}" if value % size == 0 else f"{value / size:.1f}{unit}"
    return f"{value:g}"


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Lines over a power-of-two x axis. `marks` are horizontal lines with a name (a pool, a GPU)."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points] + [y for y, _ in marks]
    low, high = log2(min(xs)), log2(max(xs))
    ticks = nice_ticks(max(ys))

    def px(x: float) -> float:
        return LEFT + (log2(x) - low) / max(high - low, 1e-9) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = _frame(title, x_label, y_label, ticks, py)
    step = max(1, round((high - low) / 8))
    for exponent in range(ceil(low), floor(high) + 1, step):
        x = px(2.0**exponent)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(2.0**exponent)}</text>')
    for y, name in marks:
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT + 6}" y="{py(y) - 5:.1f}">{escape(name)}</text>')
    for index, one in enumerate(series):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in one.points)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(f'<polyline class="s{index % 6}" fill="none" stroke-width="2.5"{dash} points="{path}"/>')
    parts += _legend([one.name for one in series])
    return "".join(parts) + "</svg>"


def bar_chart(title: str, y_label: str, groups: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float | None]]) -> str:
    """Grouped bars: one group per column, one colour per name; None is drawn as a gap with n/a."""
    ticks = nice_ticks(max((value for row in values for value in row if value is not None), default=1.0))
    span = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    width = span * 0.8 / max(len(names), 1)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = _frame(title, "", y_label, ticks, py)
    for column, group in enumerate(groups):
        start = LEFT + column * span + span * 0.1
        parts.append(
            f'<text class="tick" x="{start + span * 0.4:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(group)}</text>'
        )
        for row in range(len(names)):
            value = values[row][column]
            x = start + row * width
            if value is None:
                parts.append(f'<text class="tick" x="{x + width / 2:.1f}" y="{HEIGHT - BOTTOM - 4}" text-anchor="middle">n/a</text>')
                continue
            top = py(value)
            parts.append(
                f'<rect class="f{row % 6}" x="{x:.1f}" y="{top:.1f}" width="{width * 0.92:.1f}" height="{HEIGHT - BOTTOM - top:.1f}">'
                f"<title>{escape(names[row])}, {escape(group)}: {value:,.2f} GiB</title></rect>"
            )
    parts += _legend(list(names), bars=True)
    return "".join(parts) + "</svg>"


def _frame(title: str, x_label: str, y_label: str, ticks: Sequence[float], py: Callable[[float], float]) -> list[str]:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">']
    for tick in ticks:
        y = py(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(f'<text class="label" transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    parts.append(f'<text class="label" x="{(WIDTH - RIGHT + LEFT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _legend(names: list[str], *, bars: bool = False) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        y = TOP + 12 + index * 20
        x = WIDTH - RIGHT + 14
        css = "f" if bars else "s"
        shape = (
            f'<rect class="{css}{index % 6}" x="{x}" y="{y - 8}" width="14" height="10"/>'
            if bars
            else f'<line class="{css}{index % 6}" stroke-width="3" x1="{x}" x2="{x + 16}" y1="{y - 4}" y2="{y - 4}"/>'
        )
        parts.append(f'{shape}<text class="tick" x="{x + 22}" y="{y}">{escape(_label(name))}</text>')
    return parts


def _label(name: str) -> str:
    """The part of a name that tells models apart, short enough for the margin."""
    return name.rsplit("/", 1)[-1].rsplit("__", 1)[-1][:17]
