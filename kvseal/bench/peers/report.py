"""The table, the JSON and the page.

Owns how a run is told: one table per scenario with each engine's weights, KV format, speed with spread, and KVSeal's ratio to it; the
verdict against each target; who could not run and why; machine, versions and method. Computes nothing but what `figures` gives.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvseal.bench.peers import machine
from kvseal.bench.peers.catalogue import Peer, Place
from kvseal.bench.peers.figures import Results, Spread
from kvseal.bench.peers.schedule import Runner
from kvseal.bench.peers.workload import Scenario

METHOD = (
    "Same client, same random token ids, forced lengths, greedy; repetition i of every engine before i + 1 of any; one engine "
    "works at a time. Ratios are taken within a repetition, KVSeal through the same door as the peer (HTTP or in process). Median (min-max)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything about one run."""

    place: Place
    peers: Sequence[Peer]
    runners: Sequence[Runner]
    absent: dict[str, str]
    scenarios: Sequence[Scenario]
    results: Results
    quick: bool = False

    def runner(self, name: str) -> Runner:
        return next(runner for runner in self.runners if runner.name == name)

    @property
    def running(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.name not in self.absent]

    @property
    def ours(self) -> list[Peer]:
        return [peer for peer in self.running if peer.ours]

    @property
    def others(self) -> list[Peer]:
        return [peer for peer in self.running if not peer.ours]


Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    header: Row
    rows: list[Row]
    verdicts: list[str]


# --- what is said ----------------------------------------------------------------------------------------------


def tables(story: Story) -> list[Table]:
    return [_table(story, scenario) for scenario in story.scenarios]


def _table(story: Story, scenario: Scenario) -> Table:
    weights = list(dict.fromkeys(peer.weights for peer in story.ours))
    header = ("engine", "weights", "KV", "through", scenario.unit, "n", *(f"KVSeal {each} / it" for each in weights))
    rows = [_row(story, scenario, peer, weights) for peer in story.running]
    return Table(f"{scenario.title} ({scenario.name})", header, rows, _verdicts(story, scenario))


def _row(story: Story, scenario: Scenario, peer: Peer, weights: Sequence[str]) -> Row:
    speed = story.results.speed(peer.name, scenario.name)
    door = "HTTP" if _over_http(story, peer) else "Python"
    if speed is None:
        why = "left out" if scenario.name in peer.skips else "no score: " + story.runner(peer.name).failures.get(scenario.name, "not run")
        return (peer.title, peer.weights, peer.kv, door, why, "0", *("" for _ in weights))
    loud = sum(each.usage.is_loud for each in story.results.of(peer.name, scenario.name))
    count = f"{speed.count}" + (f" ({loud} loud)" if loud else "")
    ratios = [] if peer.ours else [_ratio_cell(story, scenario, peer, each) for each in weights]
    return (peer.title, peer.weights, peer.kv, door, show(speed, bound="<"), count, *(ratios or ["" for _ in weights]))


def _ratio_cell(story: Story, scenario: Scenario, peer: Peer, weights: str) -> str:
    ours = our_side(story, peer, weights)
    ratio = None if ours is None else story.results.ratio(ours.name, peer.name, scenario.name)
    return "" if ratio is None else show(ratio, bound=">") + "x"


def our_side(story: Story, peer: Peer, weights: str) -> Peer | None:
    """KVSeal with these weights, through the same door as the peer if it runs so."""
    candidates = [each for each in story.ours if each.weights == weights]
    same = [each for each in candidates if _over_http(story, each) == _over_http(story, peer)]
    return next(iter([*same, *candidates]), None)


def _verdicts(story: Story, scenario: Scenario) -> list[str]:
    best = story.results.best([peer.name for peer in story.others], scenario.name)
    peer = next((each for each in story.others if each.name == best), None)
    if peer is None:
        return ["no peer ran: nothing to compare with"]
    said = []
    for weights in dict.fromkeys(each.weights for each in story.ours):
        ours = our_side(story, peer, weights)
        ratio = None if ours is None else story.results.ratio(ours.name, peer.name, scenario.name)
        if ratio is not None:
            verdict = "met" if ratio.median >= scenario.target else f"missed by {scenario.target / ratio.median:.2f}x"
            said.append(
                f"KVSeal {weights} / {peer.name}, the best peer: {show(ratio, bound='>')}x; target {scenario.target:g}x: "
                + ("not judged, this was a quick run" if story.quick else verdict)
            )
    return said


def notes(story: Story) -> list[str]:
    """Everything that a reader has to know beside the figures."""
    found = [f"{peer.name}: {peer.note}" for peer in story.others if peer.note]
    found += [f"{name}: does not run here: {why}" for name, why in story.absent.items()]
    for runner in story.runners:
        found += [f"{runner.name}: {name} failed: {why}" for name, why in runner.failures.items() if name != "start"]
    found += _equality(story)
    loud = [each for each in story.results.measurements if each.usage.is_loud]
    if loud:
        found.append(
            f"{len(loud)} of {len(story.results.measurements)} repetitions were loud: other processes used more than "
            f"{machine.LOUD_CORES} cores, which slows all, and unevenly"
        )
    if any(each.usage.others_cores is None for each in story.results.measurements):
        found.append("this system does not tell what other processes used: nobody knows whether it was quiet")
    return found


def _equality(story: Story) -> list[str]:
    """KVSeal's own lines with the same weights must give the same tokens (L13), whoever was fast."""
    said = []
    for weights in dict.fromkeys(each.weights for each in story.ours):
        names = [each.name for each in story.ours if each.weights == weights]
        for other in names[1:]:
            compared = story.results.compared(names[0], other)
            differing = story.results.differing(names[0], other)
            if differing:
                said.append(f"{names[0]} and {other} gave DIFFERENT TOKENS in {', '.join(differing)}: no figure of theirs counts")
            elif compared:
                said.append(f"{names[0]} and {other}: the same tokens in all {compared} repetitions compared")
    return said


def setting(story: Story) -> list[str]:
    facts = ", ".join(f"{name} {value}" for name, value in machine.describe().items())
    started = []
    for runner in story.runners:
        if runner.about or runner.start_s:
            memory = max((each.resident_bytes for each in story.results.of_engine(runner.name)), default=0)
            about = ", ".join(f"{name} {value}" for name, value in runner.about.items())
            started.append(
                f"{runner.name}: first answer after {runner.start_s:.1f} s, {memory / 2**20:,.0f} MiB; {about or 'no version told'}"
            )
    return [facts, f"{story.place.threads} threads each; model {story.place.model.stem}", METHOD, *started]


def _over_http(story: Story, peer: Peer) -> bool:
    return peer.launch(story.place).over_http


def show(spread: Spread, *, bound: str) -> str:
    mark = f"{bound} " if spread.bound else ""
    if spread.count == 1:
        return f"{mark}{_number(spread.median)}"
    return f"{mark}{_number(spread.median)} ({_number(spread.low)}-{_number(spread.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# --- how it is said --------------------------------------------------------------------------------------------


def text(story: Story) -> str:
    parts = ["A QUICK RUN: small shapes, its figures mean nothing\n"] if story.quick else []
    parts += [f"{line}\n" for line in setting(story)]
    for table in tables(story):
        parts += ["\n", table.title, "\n", _aligned([table.header, *table.rows]), *(f"  -> {line}\n" for line in table.verdicts)]
    said = notes(story)
    return "".join([*parts, *(["\nnotes\n"] if said else []), *(f"- {line}\n" for line in said)])


def _aligned(rows: Sequence[Row]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


def as_json(story: Story) -> str:
    content = {
        "machine": machine.describe(),
        "threads": story.place.threads,
        "model": story.place.model.name,
        "quick": story.quick,
        "method": METHOD,
        "engines": [
            {
                "name": peer.name,
                "title": peer.title,
                "weights": peer.weights,
                "kv": peer.kv,
                "ours": peer.ours,
                "absent": story.absent.get(peer.name),
            }
            | {"about": story.runner(peer.name).about if peer.name not in story.absent else {}}
            for peer in story.peers
        ],
        "measurements": [asdict(each) for each in story.results.measurements],
        "tables": [asdict(table) for table in tables(story)],
        "notes": notes(story),
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>KVSeal beside its peers</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}}
table{{border-collapse:collapse;width:100%;margin:.5rem 0}}th,td{{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dee4}}
.bar{{display:block;height:.4rem;background:#8c959f}}.ours .bar{{background:#0969da}}.ours{{font-weight:600}}small{{color:#57606a}}
</style><h1>KVSeal beside its peers</h1>{body}</html>
"""


def as_html(story: Story) -> str:
    """One page without scripts: the tables with a bar for each speed."""
    parts = ["<p><strong>A quick run: its figures mean nothing.</strong></p>"] if story.quick else []
    for table, scenario in zip(tables(story), story.scenarios, strict=True):
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>{_cells('th', table.header)}</tr>")
        speeds = [story.results.speed(peer.name, scenario.name) for peer in story.running]
        most = max((speed.median for speed in speeds if speed is not None), default=1.0)
        for peer, row, speed in zip(story.running, table.rows, speeds, strict=True):
            share = 0.0 if speed is None else 100 * speed.median / most
            bar = f'<span class="bar" style="width:{share:.1f}%"></span>'
            shown = "".join(f"<td>{html.escape(cell)}{bar if column == 4 else ''}</td>" for column, cell in enumerate(row))
            parts.append(f'<tr class="{"ours" if peer.ours else "peer"}">{shown}</tr>')
        parts.append("</table>" + "".join(f"<p>{html.escape(line)}</p>" for line in table.verdicts))
    parts += ["<h2>Notes</h2><ul>", *(f"<li>{html.escape(line)}</li>" for line in notes(story)), "</ul><small>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in setting(story)]
    return _PAGE.format(body="".join([*parts, "</small>"]))


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


# --- before a run ----------------------------------------------------------------------------------------------


def plan(place: Place, peers: Sequence[Peer], scenarios: Sequence[Scenario], repetitions: int) -> str:
    """What would be installed and run."""
    lines = [f"in {place.directory}, {place.threads} threads, {repetitions} repetitions of {', '.join(each.name for each in scenarios)}"]
    for peer in peers:
        lines.append(f"\n{peer.name}: {peer.title}; weights {peer.weights}, KV {peer.kv}")
        for step in peer.steps(place):
            needs = f"  (needs {', '.join(step.needs_programs)})" if step.needs_programs else ""
            note = f"  [{step.note}]" if step.note and step.command else ""
            lines.append(f"  set up  {step}{needs}{note}")
        launch = peer.launch(place)
        lines.append(f"  run     {' '.join([*launch.environment, *launch.command])}")
    return "\n".join(lines)


def setup_outcome(peers: Sequence[Peer], absent: dict[str, str]) -> str:
    return "\n".join(f"{peer.name}: {absent.get(peer.name, 'ready')}" for peer in peers)
