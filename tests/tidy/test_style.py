"""Style that a linter does not know: no hidden state, no lookups by string, no catch-alls, files and functions that fit a screen or two."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from .sources import Source, native_sources, package_sources, sources_of_tests

FILE_LINES = 400
FUNCTION_LINES = 60

READS_ENVIRONMENT = {"kvseal/core/config.py"}
CATCHES_ALL = {
    "kvseal/node/engine_process.py",
    "kvseal/node/engine.py",
    "kvseal/serve/app.py",
    "kvseal/serve/gate.py",
    "kvseal/serve/generation.py",
}
"""The engine loop and the HTTP app (`generation` gives what it catches to its own task). Elsewhere a catch-all must raise again."""

MUTATORS = {"append", "add", "update", "extend", "insert", "pop", "popitem", "clear", "remove", "discard", "setdefault", "sort"}


def test_every_file_opens_with_a_docstring() -> None:
    bare = [
        source.name for source in (*package_sources(), *sources_of_tests()) if source.text.strip() and not ast.get_docstring(source.tree)
    ]
    assert not bare, f"say what the file owns, what it never does, and its laws: {bare}"


def test_files_and_functions_stay_readable() -> None:
    wrong = [f"{source.name} has {count} lines" for source in package_sources() if (count := len(source.text.splitlines())) > FILE_LINES]
    for source in package_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    wrong.append(f"{source.name}:{node.lineno} {node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)


def test_native_files_stay_readable() -> None:
    for source in native_sources():
        lines = len(source.text.splitlines())
        if lines > FILE_LINES:
            warnings.warn(f"{source.name} has {lines} lines", stacklevel=1)


def test_no_module_level_mutable_state() -> None:
    wrong = [f"{source.name}:{line} {what}" for source in package_sources() for line, what in mutable_state(source)]
    assert not wrong, "\n".join(wrong)


def mutable_state(source: Source) -> Iterator[tuple[int, str]]:
    """Tables in CAPITALS that their module never changes are constants; anything else mutable at module level is state."""
    tables: set[str] = set()
    for node in source.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is None or not is_mutable(value):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and (target.id.isupper() or target.id.startswith("__")):
                tables.add(target.id)
            else:
                yield node.lineno, f"binds {ast.unparse(target)} to something mutable"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"rebinds {', '.join(node.names)}"
        elif (name := changed_name(node)) in tables:
            yield node.lineno, f"changes {name}"  # type: ignore[attr-defined]


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in {"list", "dict", "set", "bytearray", "defaultdict", "Counter", "deque", "array"}


def changed_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Name):
        return node.value.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return None


def test_no_lookups_by_string() -> None:
    wrong = [
        f"{source.name}:{node.lineno}"
        for source in package_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "setattr", "delattr"}
    ]
    assert not wrong, f"attributes are named, not looked up by string: {wrong}"


def test_the_environment_is_read_in_one_place() -> None:
    pattern = re.compile(r"\bos\.environ\b|\bgetenv\(|from os import .*\benviron\b")
    wrong = [source.name for source in package_sources() if source.name not in READS_ENVIRONMENT and pattern.search(source.text)]
    assert not wrong, f"the environment belongs to core/config.py: {wrong}"


def test_nothing_is_swallowed() -> None:
    wrong = [
        f"{source.name}:{handler.lineno}"
        for source in package_sources()
        if source.name not in CATCHES_ALL
        for handler in ast.walk(source.tree)
        if isinstance(handler, ast.ExceptHandler) and catches_all(handler) and not isinstance(handler.body[-1], ast.Raise)
    ]
    assert not wrong, f"name the errors that are expected: {wrong}"


def test_no_cancellation_is_swallowed() -> None:
    """`asyncio.wait_for` before Python 3.12 forgets a cancellation that comes with the answer; `asyncio.timeout` does not."""
    wrong = [source.name for source in package_sources() if "asyncio.wait_for(" in source.text]
    assert not wrong, f"use asyncio.timeout: {wrong}"


def catches_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"}) for kind in kinds)


def test_nothing_is_validated_by_assert() -> None:
    """`python -O` drops them. One at module level, on a constant layout, runs before anything else and may stay."""
    wrong = [
        f"{source.name}:{node.lineno}"
        for source in package_sources()
        for function in ast.walk(source.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, f"raise an error instead: {sorted(set(wrong))}"
