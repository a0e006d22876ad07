"""Words: no machine's own paths, flags within bounds and none about safety, and documents that name things that exist."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from kvseal import cli

from .sources import PACKAGE, PROJECT, documents, native_sources, package_sources, sources_of_tests

MOST_FLAGS_OF_ONE_NODE = 22
"""About twenty; a new one needs a reason, and an old one may have lost its own."""

MOST_FLAGS_OF_SEVERAL_NODES = 3
"""How many nodes compute prompts, how many answer, and what becomes of a request whose hand-off breaks: nobody else can know these."""

MACHINE_PATH = re.compile(r"(?<![\w.~$}/])/(?:home|tmp|root|work|Users|mnt|var/tmp|private)/\w")
"""Absolute paths that exist on somebody's machine and nowhere else."""

UNSAFE_FLAG = re.compile(r"(?:no|skip|disable|without|unsafe|trust)-|-(?:check|seal|verify)")

SYMBOL = re.compile(r"`(kvseal(?:\.\w+)+)(?:\(\))?`")
PLACE = re.compile(r"`((?:kvseal|native|tests|docs)/[\w./-]+\.\w+)(?::([\w.]+))?`")


def test_no_absolute_paths_of_a_machine() -> None:
    everything = (*package_sources(), *sources_of_tests(), *native_sources(), *documents())
    wrong = [
        f"{source.name}:{number}"
        for source in everything
        if source.path != Path(__file__).resolve()
        for number, line in enumerate(source.text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not wrong, f"name no machine's folders: {wrong}"


def serve_flags() -> dict[str, list[str]]:
    """The flags of `kvseal serve`, by the group that `--help` shows them in."""
    commands = next(action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    flags = {}
    for group in commands.choices["serve"]._action_groups:
        options = (action.option_strings for action in group._group_actions)
        flags[group.title or ""] = sorted(name for names in options for name in names if name.startswith("--") and name != "--help")
    return flags


def test_serve_has_about_twenty_flags() -> None:
    flags = serve_flags()
    several_nodes = flags.pop("several nodes")
    one_node = [name for names in flags.values() for name in names]
    assert len(one_node) <= MOST_FLAGS_OF_ONE_NODE, one_node
    assert len(several_nodes) <= MOST_FLAGS_OF_SEVERAL_NODES, several_nodes


def test_no_flag_turns_a_check_off() -> None:
    assert not [flag for flags in serve_flags().values() for flag in flags if UNSAFE_FLAG.search(flag)]


@pytest.mark.parametrize("document", documents(), ids=lambda source: source.name)
def test_documents_name_things_that_exist(document: object) -> None:
    text = document.text  # type: ignore[attr-defined]
    missing = [name for name in SYMBOL.findall(text) if not exists(name)]
    for place, symbol in PLACE.findall(text):
        path = PROJECT / place
        if not path.exists() or (symbol and not defines(path, symbol)):
            missing.append(f"{place}:{symbol}" if symbol else place)
    assert not missing, f"named and not there: {missing}"


def exists(dotted: str) -> bool:
    """kvseal.kv.pool.PagePool.seal: a module, then attributes of it."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        module = PROJECT.joinpath(*parts[:cut])
        if module.is_dir() or module.with_suffix(".py").exists():
            found: object = importlib.import_module(".".join(parts[:cut]))
            for name in parts[cut:]:
                if name not in dir(found) and name not in vars(found).get("__annotations__", {}):
                    return False
                found = vars(found).get(name, found) if isinstance(found, type) else getattr(found, name)
            return True
    return False


def defines(path: Path, symbol: str) -> bool:
    """Python: `exists`; other languages: the word occurs."""
    if path.suffix != ".py":
        return re.search(rf"\b{re.escape(symbol)}\b", path.read_text(encoding="utf-8")) is not None
    if PACKAGE in path.parents:
        return exists(f"{path.relative_to(PROJECT).as_posix().removesuffix('.py').replace('/', '.')}.{symbol}")
    return re.search(rf"^\s*(?:async )?(?:def|class) {re.escape(symbol)}\b|^{re.escape(symbol)}\b", path.read_text(), re.M) is not None


def test_the_check_of_names_can_fail() -> None:
    assert exists("kvseal.kv.pool.PagePool.seal")
    assert not exists("kvseal.kv.pool.PagePool.unseal")
    assert not exists("kvseal.kv.nowhere")
    assert MACHINE_PATH.search("see " + "/" + "home/somebody")
    assert UNSAFE_FLAG.search("--skip-seals") and not UNSAFE_FLAG.search("--wipe-pages")
