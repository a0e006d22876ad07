"""Sets up a peer: an environment of its own, pinned packages, a build, a converted model. Resumable.

Owns `Step` and how steps are run: niced, one after the other, each with a log; a step that is done leaves a stamp with a digest of what it
did, so that a second run starts where the first one stopped, and a changed step runs again. Downloads only through pip. Never touches
KVSeal's own environment, and never hides why a step failed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvseal.core.errors import KVSealError, SetupError

STEP_TIMEOUT_S = 3 * 3600.0
_REASON_MARKS = ("error", "fatal", "no matching", "not found", "cannot", "failed")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, once. `command` or `action`; `makes` must exist afterwards, and is removed before if it is half done."""

    name: str
    command: tuple[str, ...] = ()
    action: Callable[[], None] | None = None
    makes: Path | None = None
    needs_programs: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """NAME=VALUE, for this command alone."""
    note: str = ""
    """What it costs, for the plan."""
    replaces: bool = field(default=True)
    """Remove what an interrupted run left at `makes`."""

    def digest(self) -> str:
        """Of everything that decides the outcome; pins stand in the command."""
        text = json.dumps([self.name, self.command, str(self.makes), self.environment])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        shown = " ".join(self.command) if self.command else f"(in KVSeal) {self.note}"
        return f"{self.name}: {shown}"


class StepFailed(SetupError):
    """Why a peer cannot be had here; its text goes into the table."""


class Setup:
    """Runs steps under one directory."""

    def __init__(self, directory: Path, *, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say

    def is_done(self, step: Step) -> bool:
        return self._stamp(step).is_file() and (step.makes is None or step.makes.exists())

    def run(self, peer: str, steps: Sequence[Step]) -> None:
        """All steps that are not done yet; of several at once in one directory, one works and the others wait. Raises StepFailed."""
        if all(self.is_done(step) for step in steps):
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / ".setup.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for step in steps:
                if not self.is_done(step):
                    self._say(f"{peer}: {step.name} ...")
                    self._run(peer, step)

    def _run(self, peer: str, step: Step) -> None:
        missing = [program for program in step.needs_programs if shutil.which(program) is None]
        if missing:
            raise StepFailed(f"{step.name} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed")
        if step.makes is not None and step.makes.exists() and step.replaces:
            _remove(step.makes)
        if step.makes is not None:
            step.makes.parent.mkdir(parents=True, exist_ok=True)
        if step.action is not None:
            try:
                step.action()
            except (KVSealError, OSError) as error:
                raise StepFailed(f"{step.name}: {error}") from error
        else:
            self._command(peer, step)
        if step.makes is not None and not step.makes.exists():
            raise StepFailed(f"{step.name} ended well and yet did not make {step.makes.name}")
        stamp = self._stamp(step)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(f"{step}\n", encoding="utf-8")

    def _command(self, peer: str, step: Step) -> None:
        log = self._directory / "logs" / f"{peer}.setup.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [*nice(), *with_environment(step.environment, step.command)]
        with log.open("ab") as output:
            output.write(f"\n$ {' '.join(command)}\n".encode())
            output.flush()
            start = output.tell()
            try:
                ended = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=STEP_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired as error:
                raise StepFailed(f"{step.name} took longer than {STEP_TIMEOUT_S / 3600:.0f} hours") from error
            except OSError as error:
                raise StepFailed(f"{step.name}: {error}") from error
        if ended.returncode:
            raise StepFailed(f"{step.name}: {reason(log, start)} (exit status {ended.returncode}; see {log})")

    def _stamp(self, step: Step) -> Path:
        return self._directory / "stamps" / step.digest()


def nice() -> tuple[str, ...]:
    """Setting up is work in the background."""
    return ("nice", "-n", "19") if shutil.which("nice") else ()


def with_environment(variables: Sequence[str], command: Sequence[str]) -> list[str]:
    """`command` with NAME=VALUE added to what it inherits."""
    return ["env", *variables, *command] if variables else list(command)


def reason(log: Path, start: int = 0) -> str:
    """The line of a log that says why: the last that speaks of an error, else the last."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read()[-200_000:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("$ ")]
    telling = [line for line in lines if any(mark in line.lower() for mark in _REASON_MARKS)]
    return (telling or lines or ["it printed nothing"])[-1][:300]


def base_python() -> str:
    """The interpreter that environments are made from: the one below KVSeal's own environment."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidate = Path(sys.base_prefix) / "bin" / name
    return str(candidate) if candidate.exists() and os.access(candidate, os.X_OK) else sys.executable


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
