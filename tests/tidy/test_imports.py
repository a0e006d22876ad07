"""The import law: every house imports the floors below it and nothing else; TYPE_CHECKING imports count."""

from __future__ import annotations

import sys

import pytest

from .sources import Source, package_sources

BELOW: dict[str, set[str]] = {
    "core": set(),
    "kv": {"core"},
    "sched": {"core", "kv"},
    "exec": {"core", "kv"},
    "handoff": {"core", "kv"},
    "plan": {"core", "kv"},
    "node": {"core", "kv", "sched", "exec", "handoff", "plan"},
    "serve": {"core", "kv", "sched", "exec", "handoff", "plan", "node"},
    "audit": set(),
}
"""Floors from the ground up. `lab` and `bench` look at everything and are imported by nobody but `cli`."""

WATCHERS = {"lab", "bench"}
TOP = {"cli", "__init__", "__main__"}

SCHED_SEES = {"manager", "capacity", "handles", "block_table", "prefix_key", "geometry"}
"""The parts of `kv` that hold no page: the scheduler never sees the pool, the ledger or the tree."""

FOREIGN: dict[str, set[str]] = {"core": set(), "kv": {"numpy"}, "sched": set()}
"""Packages from outside the standard library that the lowest floors may use."""

OUTSIDE_WORLD = {"asyncio", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "socket", "sqlite3"} | {
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "datetime",
    "urllib",
}
"""I/O, clocks and chance."""


def house_of(imported: str) -> str | None:
    """kvseal.kv.pool.PagePool -> kv; None for what is not ours or is the package itself (its version)."""
    parts = imported.split(".")
    return parts[1] if parts[0] == "kvseal" and len(parts) > 1 and parts[1] in {*BELOW, *WATCHERS, "cli"} else None


def every(house: str) -> list[Source]:
    return [source for source in package_sources() if source.house == house]


@pytest.mark.parametrize("house", sorted(BELOW))
def test_a_house_imports_only_the_floors_below(house: str) -> None:
    wrong = [
        f"{source.name}:{line} imports {imported}"
        for source in every(house)
        for line, imported in source.imports()
        if house_of(imported) not in {None, house, *BELOW[house]}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_belongs_to_a_house() -> None:
    strangers = {source.house for source in package_sources()} - {*BELOW, *WATCHERS, *TOP}
    assert not strangers, f"not in the architecture: {strangers}"


def test_the_scheduler_sees_no_page() -> None:
    wrong = [
        f"{source.name}:{line} imports {imported}"
        for source in every("sched")
        for line, imported in source.imports()
        if imported.startswith("kvseal.kv.") and imported.split(".")[2] not in SCHED_SEES
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("house", sorted(FOREIGN))
def test_the_lowest_floors_stand_on_little(house: str) -> None:
    allowed = {*sys.stdlib_module_names, "kvseal", *FOREIGN[house]}
    wrong = [
        f"{source.name}:{line} imports {imported}"
        for source in every(house)
        for line, imported in source.imports()
        if imported.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("house", ["kv", "sched"])
def test_the_heart_does_no_io_and_has_no_clock(house: str) -> None:
    wrong = [
        f"{source.name}:{line} imports {imported}"
        for source in every(house)
        for line, imported in source.imports()
        if imported.split(".")[0] in OUTSIDE_WORLD
    ]
    assert not wrong, "\n".join(wrong)


def test_the_law_sees_relative_and_type_checking_imports() -> None:
    kv = next(source for source in package_sources() if source.name == "kvseal/kv/handles.py")
    assert "kvseal.kv.pool.PagePool" in {imported for _, imported in kv.imports()}
    relative = Source(kv.path)
    relative.__dict__["text"] = "from ..exec import spec\nfrom . import pool\n"
    assert {imported for _, imported in relative.imports()} == {"kvseal.exec.spec", "kvseal.kv.pool"}
