"""What seal checks and digests cost: figure 15 of the performance notes. ``kvseal bench safety``.

Owns the comparison of the kernels as they are (A) with a twin of them that compares no seal and takes no digest (B), compiled here from the
same sources for this benchmark alone: it goes to the cache directory, is never installed, and no engine starts on it. Each side is a
process of its own with its own weights and arena; steps of the two take turns, and the processes are started anew a few times, because
where memory comes to lie matters as much as what is measured. Needs the source tree and what builds it (CMake, a C++ compiler, nanobind);
without them there is no score.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import TracebackType

from kvseal.bench.suite.board import Entry, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.core.config import cache_dir
from kvseal.node.models import resolve_model

SOURCES = Path(__file__).resolve().parents[2]
PAGES = 1_024
STARTS, QUICK_STARTS = 3, 1
TURNS, QUICK_TURNS = 9, 3
WORK: dict[str, tuple[str, dict[str, int]]] = {
    "decode": ("batch 8 at 512 tokens", {"rows": 8, "start": 512, "tokens": 1, "steps": 16}),
    "prefill": ("512 tokens", {"rows": 1, "start": 0, "tokens": 512, "steps": 1}),
}
MOST = Target(high=1.01)


class CannotBuild(Exception):
    """There is no twin, and why."""


def build_twin(context: Context) -> Path:
    """The twin's extension module, built once for each state of the sources."""
    if not (SOURCES / "CMakeLists.txt").is_file() or not (SOURCES / "native").is_dir():
        raise CannotBuild("the twin without checks is compiled from the source tree, and this is an installed package")
    digest = hashlib.blake2b(digest_size=8)
    for source in [SOURCES / "CMakeLists.txt", *sorted((SOURCES / "native").rglob("*"))]:
        digest.update(source.read_bytes() if source.is_file() else b"")
    folder = cache_dir() / "bench" / f"without-checks-{digest.hexdigest()}"
    built = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.is_file():
        context.say("compiling the twin without checks (once; about two minutes of CPU time)")
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVSEAL_WITHOUT_CHECKS=ON", f"-DPython_EXECUTABLE={sys.executable}"]
        _cmake(["-S", str(SOURCES), "-B", str(folder), *options])
        _cmake(["--build", str(folder), "--parallel", str(context.threads_used)])
    if not built.is_file():
        raise CannotBuild(f"the build left no {built.name}")
    return built


def _cmake(arguments: list[str]) -> None:
    beside = Path(sys.executable).with_name("cmake")
    try:
        ended = subprocess.run([str(beside) if beside.exists() else "cmake", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuild(f"CMake cannot be run ({error.strerror}); pip install cmake ninja nanobind") from error
    if ended.returncode:
        reason = next((line for line in ended.stderr.splitlines() if "rror" in line), "its reason is not known")
        raise CannotBuild(f"the twin cannot be built: {reason.strip()[:200]}")


class Worker:
    """One side: a process with a build of its own. Use as a context manager."""

    def __init__(self, context: Context, model: Path, native: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvseal.bench.suite.step_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        asked = {"native": "" if native is None else str(native), "model": str(model), "threads": context.threads_used, "pages": PAGES}
        if self._ask(asked).get("checked") is not (native is None):
            raise CannotBuild("the two builds are not what they should be: one checks, and the twin does not")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def seconds(self, work: Mapping[str, int]) -> float:
        return float(self._ask(work)["value"])

    def _ask(self, question: Mapping[str, object]) -> dict[str, float]:
        if self._process.stdin is None or self._process.stdout is None:
            raise CannotBuild("a worker has no pipes")
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise CannotBuild(f"a worker ended with status {self._process.wait()}; its reason stands on standard error")
        said: dict[str, float] = json.loads(line)
        return said


def measure(context: Context, model: Path, twin: Path) -> dict[str, tuple[list[float], list[float]]]:
    """For each kind of work, milliseconds of a step with and without checks: one pair for each turn."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in WORK}
    starts, turns = (QUICK_STARTS, QUICK_TURNS) if context.quick else (STARTS, TURNS)
    for start in range(starts):
        with Worker(context, model, None) as checked, Worker(context, model, twin) as unchecked:
            for turn in range(-1, turns):
                context.say(f"start {start + 1} of {starts}, turn {turn + 1} of {turns}")
                for name, (_, work) in WORK.items():
                    sides = [checked.seconds(work), unchecked.seconds(work)]
                    for values, seconds in zip(found[name], sides, strict=True):
                        values += [1_000 * seconds] if turn >= 0 else []
    return found


def run(context: Context) -> Result:
    try:
        found = measure(context, resolve_model(context.model), build_twin(context))
        entries = []
        for name, (what, _) in WORK.items():
            checked, unchecked = found[name]
            a = Side("checks and digests", "ms/step", tuple(checked))
            b = Side("twin without", "ms/step", tuple(unchecked))
            best = f"fastest of all: {min(checked):.3f} and {min(unchecked):.3f} ms, {min(checked) / min(unchecked):.4f}"
            of_middles = f"ratio of medians {median(checked) / median(unchecked):.4f}"
            entry = Entry(figure="15", name=f"price of safety, {name}, {what}", a=a, b=b, target=MOST, note=f"{best}; {of_middles}")
            entries.append(entry)
    except CannotBuild as why:
        entries = [missing("15", f"price of safety, {name}, {what}", str(why), MOST) for name, (what, _) in WORK.items()]
    settings = {"threads": str(context.threads_used), "cache": "fp16"}
    return Result(name="safety", title="The price of safety", entries=entries, settings=settings)


def main() -> int:
    return benchmark_main("safety", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
