"""The sources as the tidy tests see them: files, syntax trees, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "kvseal"
NATIVE = PROJECT / "native"


@dataclass(frozen=True)
class Source:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        """kvseal/kv/pool.py"""
        return self.path.relative_to(PROJECT).as_posix()

    @property
    def module(self) -> str:
        """kvseal.kv.pool; a package's own file is the package."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def house(self) -> str:
        """kv; for files directly in the package their own name: cli, __init__."""
        return Path(self.name).with_suffix("").parts[1]

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, full dotted name) of everything imported anywhere in the file, TYPE_CHECKING and functions included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".") if self.path.name == "__init__.py" else self.module.split(".")[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


@cache
def package_sources() -> list[Source]:
    return [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]


@cache
def sources_of_tests() -> list[Source]:
    return [Source(path) for path in sorted((PROJECT / "tests").rglob("*.py"))]


@cache
def native_sources() -> list[Source]:
    return [Source(path) for path in sorted(NATIVE.glob("*")) if path.suffix in {".h", ".cpp"}]


@cache
def documents() -> list[Source]:
    return [Source(path) for path in sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])]
