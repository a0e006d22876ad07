"""Code of others, measured in their own Python: one process for a whole benchmark, a line of JSON in and a line out.

Owns the process. Nothing of a peer is ever imported here, and nothing of ours there: the scripts in ``bench/foreign`` stand alone. When the
Python is not named, or cannot import what it needs, that is said (`absent`) and the benchmark goes on with our side alone.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from kvseal.core.errors import ConfigError

SCRIPTS = Path(__file__).parents[1] / "foreign"


class ForeignPython:
    """Use as a context manager. After entering, either `version` or `absent` says something."""

    def __init__(self, python: Path | None, script: str, what: str) -> None:
        self._python = python
        self._script = SCRIPTS / script
        self._what = what
        self._process: subprocess.Popen[str] | None = None
        self.version = ""
        """Of the peer, once it runs."""
        self.absent = ""
        """Why it does not."""

    def __enter__(self) -> ForeignPython:
        if self._python is None:
            self.absent = f"{self._what} needs a Python that can import it (--{self._script.stem.split('_')[0]}-python PATH)"
            return self
        try:
            self._process = subprocess.Popen(
                [str(self._python), "-P", str(self._script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise ConfigError(f"{self._python} cannot be run: {error.strerror}") from error
        said = self._read()
        self.version, self.absent = said.get("version", ""), said.get("error", "")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait()

    def ask(self, question: Any) -> float:
        """Its measurement. Raises `ConfigError` when it has died."""
        if self._process is None or self._process.stdin is None:
            raise ConfigError(f"{self._what} is not running")
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        said = self._read()
        if "value" not in said:
            raise ConfigError(f"{self._what} failed: {said.get('error', 'it said nothing')}")
        return float(said["value"])

    def _read(self) -> dict[str, Any]:
        """The next line that is JSON; libraries print other things."""
        if self._process is None or self._process.stdout is None:
            return {"error": "it is not running"}
        for line in self._process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        return {"error": f"{self._what} ended with exit status {self._process.wait()}"}
