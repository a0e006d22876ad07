"""Texts to measure on, as windows of token ids.

Owns the reading of files that hold prose in some form (.txt, .md, .json, .jsonl). Ships no text: without a path it reads Python's own
language reference, which every CPython carries (`pydoc_data.topics`). Never looks at what a text says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvseal.core.errors import ConfigError
from kvseal.exec.backend import Int32
from kvseal.serve.tokenizer import Tokenizer

SUFFIXES = (".txt", ".md", ".json", ".jsonl")


@dataclass(frozen=True, slots=True)
class Window:
    """A run of consecutive tokens of one text, computed from position 0."""

    text: str
    tokens: Int32
    """[length]"""


def read_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Name -> text, of the files given and of the files in the directories given. Raises ConfigError when there is nothing to read."""
    if not paths:
        from pydoc_data.topics import topics  # A megabyte of source: only for those who measure.

        return {"python-reference": "\n\n".join(topics[name] for name in sorted(topics))}
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.suffix in SUFFIXES]
    if not files:
        raise ConfigError(f"no text in {', '.join(map(str, paths))}: name {', '.join(SUFFIXES)} files or directories that hold some")
    try:
        return {file.stem: _text_of(file) for file in files}
    except (OSError, ValueError) as error:
        raise ConfigError(f"a text cannot be read ({type(error).__name__}); .json and .jsonl files hold JSON, all of them UTF-8") from error


def windows_of(texts: dict[str, str], tokenizer: Tokenizer, *, length: int, tokens: int) -> list[Window]:
    """Of each text its first `tokens` tokens, at least one window, in windows of `length` one after the other; none of a shorter text."""
    windows = []
    for name, text in texts.items():
        enough = text[: 16 * max(tokens, length)]  # No tokenizer makes tokens longer than this on average.
        ids = np.array(tokenizer.encode(enough), dtype=np.int32)
        count = min(len(ids) // length, max(1, tokens // length))
        windows += [Window(name, ids[at * length : (at + 1) * length]) for at in range(count)]
    return windows


def _text_of(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return "\n\n".join("\n".join(_strings(json.loads(line))) for line in text.splitlines() if line.strip())
    return "\n".join(_strings(json.loads(text))) if file.suffix == ".json" else text


def _strings(value: object) -> Iterator[str]:
    """Every string that stands as a value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
