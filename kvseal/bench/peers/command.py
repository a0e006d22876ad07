"""``kvseal bench peers``: set up, run, report.

Owns the flags and the order of things: set-up of each peer (its failure is a line in the table), then one interleaved run, then the table,
the JSON and the HTML. Never stops because one peer cannot be had.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvseal.bench.peers import machine, report
from kvseal.bench.peers.catalogue import Peer, Place, catalogue
from kvseal.bench.peers.engines import Engine, start
from kvseal.bench.peers.figures import Measurement, Results
from kvseal.bench.peers.schedule import Interleaved, Plan, Runner
from kvseal.bench.peers.setup import Setup, StepFailed
from kvseal.bench.peers.workload import SCENARIOS, Scenario
from kvseal.bench.suite.command import thread_count
from kvseal.bench.suite.reports import check_files, check_folder, written
from kvseal.core.config import cache_dir
from kvseal.core.errors import ConfigError
from kvseal.exec.loader import load_model
from kvseal.node.demo import demo_model_path
from kvseal.node.models import resolve_model

_EPILOG = """\
examples:
  kvseal bench peers --plan                          what would be installed and run, and nothing else
  kvseal bench peers --setup-only                    sets up everything; a second call goes on where the first one stopped
  kvseal bench peers --only llama.cpp,openvino-int4  KVSeal against these two
  kvseal bench peers --minutes 10 --html peers.html  as many repetitions as fit; cheap scenarios get more

Peers live in environments of their own under --dir; nothing of them enters KVSeal's. llama.cpp is built from source and needs g++, cmake
and make. Run it on a quiet machine: repetitions during which other processes computed are marked as loud.
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    scenarios = _scenarios(options)
    peers = _chosen(options.only)
    check_files({"--json": options.json, "--html": options.html})
    if options.llama_cpp_build is not None and not (options.llama_cpp_build / "bin" / "llama-server").is_file():
        raise ConfigError(f"--llama-cpp-build {options.llama_cpp_build}: holds no bin/llama-server")
    model = demo_model_path() if options.model is None else resolve_model(str(options.model))
    place = Place(
        directory=(options.dir or cache_dir() / "peers").absolute(),
        model=model.absolute(),
        threads=options.threads or machine.cores(),
        llama_cpp_build=options.llama_cpp_build,
    )
    if options.plan:
        print(report.plan(place, peers, scenarios, options.reps))
        return 0
    check_folder("--dir", place.directory)
    ready, absent = _set_up(place, peers)
    if options.setup_only:
        print(report.setup_outcome(peers, absent))
        return 0 if not absent else 1
    return _compare(options, place, scenarios, ready, absent)


def _compare(options: argparse.Namespace, place: Place, scenarios: list[Scenario], peers: list[Peer], absent: dict[str, str]) -> int:
    plan = Plan(
        scenarios=scenarios,
        repetitions=1 if options.quick else options.reps,
        vocab_size=load_model(place.model).spec.vocab_size,
        seed=options.seed,
        quiet_wait_s=0.0 if options.quick else options.quiet_wait,
        budget_s=None if options.minutes is None else options.minutes * 60,
        most_times_ours=options.stop_at,
    )
    runners = [Runner(peer.name, PeerStarter(peer, place), ours=peer.ours, skips=peer.skips) for peer in peers]

    failed: dict[str, bool] = {}

    def told(measured: list[Measurement]) -> report.Story:
        """The run as far as it has come, also in the files asked for: whoever ends it early has that."""
        why = absent | {runner.name: runner.failures["start"] for runner in runners if "start" in runner.failures}
        results = Results(measured)
        story = report.Story(
            place=place, peers=peers, runners=runners, absent=why, scenarios=scenarios, results=results, quick=options.quick
        )
        for flag, path, text_of in (("--json", options.json, report.as_json), ("--html", options.html, report.as_html)):
            if path is not None:
                failed[flag] = not written(flag, path, partial(path.write_text, text_of(story), encoding="utf-8"))
        return story

    story = told(Interleaved(plan, runners, say=_say, keep=told).run())
    print(report.text(story))
    return 0 if story.results.measurements and not any(failed.values()) else 1


def _set_up(place: Place, peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, str]]:
    """(peers that are ready, name of each other -> why it cannot be had here)."""
    setup = Setup(place.directory, say=_say)
    ready, absent = [], {}
    for peer in peers:
        try:
            setup.run(peer.name, peer.steps(place))
            ready.append(peer)
        except StepFailed as error:
            absent[peer.name] = str(error)
            _say(f"{peer.name}: cannot be set up: {error}")
    return ready, absent


class PeerStarter:
    """Starts one peer; its log is kept beside the others."""

    def __init__(self, peer: Peer, place: Place) -> None:
        self._peer = peer
        self._place = place

    def __call__(self) -> Engine:
        return start(self._peer.launch(self._place), self._place.directory / "logs" / f"{self._peer.name}.run.log")


def _chosen(only: str | None) -> list[Peer]:
    """KVSeal's own lines are always in: without them there is no ratio. Naming one of them leaves the other ones out."""
    peers = catalogue()
    if only is None:
        return peers
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = sorted(set(names) - {peer.name for peer in peers})
    if unknown:
        raise ConfigError(f"--only names {', '.join(unknown)}; the engines are {', '.join(peer.name for peer in peers)}")
    some_of_ours = any(peer.ours and peer.name in names for peer in peers)
    return [peer for peer in peers if peer.name in names or (peer.ours and not some_of_ours)]


def _scenarios(options: argparse.Namespace) -> list[Scenario]:
    names = [scenario.name for scenario in SCENARIOS]
    wanted = names if options.only_scenario is None else [name.strip() for name in options.only_scenario.split(",") if name.strip()]
    unknown = sorted(set(wanted) - set(names))
    if unknown or not wanted:
        raise ConfigError(f"--only-scenario names {', '.join(unknown) or 'nothing'}; the scenarios are {', '.join(names)}")
    chosen = [scenario for scenario in SCENARIOS if scenario.name in wanted]
    return [scenario.quick() for scenario in chosen] if options.quick else [replace(scenario) for scenario in chosen]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvseal bench peers",
        description="KVSeal beside every other CPU engine that runs here: same client, same prompts, same lengths, side by side.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="NAME,...", help="these engines; KVSeal's own lines are always in")
    parser.add_argument("--only-scenario", metavar="NAME,...", help=f"of {', '.join(scenario.name for scenario in SCENARIOS)}")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where peers are installed (default: KVSeal's cache)")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file of a plain llama (default: the demo model)")
    parser.add_argument(
        "--threads", type=thread_count, default=0, metavar="N", help="compute threads of each engine (default: one per core)"
    )
    parser.add_argument("--reps", type=_repetitions, default=3, metavar="N", help="repetitions (default: %(default)s)")
    parser.add_argument("--minutes", type=_above_zero, metavar="M", help="start no further repetition that would end later")
    parser.add_argument(
        "--stop-at", type=_above_zero, metavar="X", help="stop a peer that takes X times as long as KVSeal; its ratio is a bound"
    )
    parser.add_argument(
        "--quiet-wait", type=_seconds, default=20.0, metavar="S", help="wait so long for a quiet machine (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small repetition, to see that all run; its figures mean nothing")
    parser.add_argument("--plan", action="store_true", help="print what would be installed and run, and stop")
    parser.add_argument("--setup-only", action="store_true", help="set the peers up and stop")
    parser.add_argument("--llama-cpp-build", type=Path, metavar="DIR", help="use this build of llama.cpp (with bin/llama-server)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    return parser


def _above_zero(text: str) -> float:
    number = _seconds(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is too little; give a number above 0")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return number


def _repetitions(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of repetitions; give 1 or more")
    return number


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
