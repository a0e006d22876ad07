"""Reads what an operator shows: a log, saved metrics, a list of packages. Owns the files; judges nothing."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from kvseal.audit.advisories import parse_packages
from kvseal.audit.logs import read_log
from kvseal.audit.metrics import parse_metrics
from kvseal.audit.probes.offline import Shown

_MOST_BYTES = 64 << 20


def read_shown(log: str | None, metrics: str | None, packages: str | None, context_tokens: int | None) -> Shown:
    """Paths become values; ``env`` for `packages` means the environment of this process.

    Raises:
        ValueError: a file cannot be read; names the flag.
    """
    shown = Shown(context_tokens=context_tokens)
    if log is not None:
        shown.log = read_log(_text("--log", log))
    if metrics is not None:
        shown.metrics = parse_metrics(_text("--metrics", metrics))
    if packages == "env":
        shown.packages = {entry.metadata["Name"]: entry.version for entry in metadata.distributions() if entry.metadata["Name"]}
    elif packages is not None:
        shown.packages = parse_packages(_text("--packages", packages))
    return shown


def _text(flag: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"{flag}: {path} cannot be read: {error.strerror}") from error
