"""What is no plain file is refused at once and by its name, wherever a file is read: a named pipe never holds a start."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from golden.small_models import cases, write_folder

from kvseal.core.config import EngineConfig, ServeConfig, read_secret
from kvseal.core.errors import KVSealError
from kvseal.core.files import open_file, read_file, read_text
from kvseal.exec.loader import load_model
from kvseal.serve.auth import KeyRing
from kvseal.serve.server import _own_template
from kvseal.serve.tokenizer_files import load_tokenizer

pytestmark = pytest.mark.timeout(60)
"""Without the check these wait for ever."""


def make(kind: str, path: Path) -> None:
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as listener:
            here = Path.cwd()
            os.chdir(path.parent)  # The name of a socket is short.
            listener.bind(path.name)
            os.chdir(here)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a socket", "a device"])
def test_only_plain_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    make(kind, path)
    with pytest.raises(OSError) as error:
        open_file(path)
    assert error.value.strerror == f"it is {kind}, not a file"


def test_plain_files_and_links_to_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("secret\u00e9", encoding="utf-8")
    (tmp_path / "link").symlink_to("x")
    assert read_text(tmp_path / "link") == "secret\u00e9" and read_file(tmp_path / "x") == "secret\u00e9".encode()
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


def template(path: Path) -> str | None:
    return _own_template(ServeConfig(engine=EngineConfig(model=path), chat_template=path))


READERS: dict[str, Callable[[Path], object]] = {"--secret-file": read_secret, "--api-keys": KeyRing, "--chat-template": template}


@pytest.mark.parametrize("flag", READERS)
def test_a_named_pipe_for_a_flag(tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KVSealError, match=f"{flag}.*pipe.*it is a named pipe, not a file"):
        READERS[flag](tmp_path / "pipe")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_named_pipe_in_a_model(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    write_folder(folder, next(case for case in cases() if case["name"] == "llama-tied"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(KVSealError, match=f"{name}.*it is a named pipe, not a file"):
        load_model(folder)


def test_a_named_pipe_for_a_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(KVSealError, match=r"model\.gguf.*it is a named pipe"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"])
def test_a_named_pipe_beside_a_tokenizer(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    write_folder(folder, next(case for case in cases() if case["name"] == "llama-tied"))
    if not (folder / "tokenizer.json").is_file():
        small_tokenizer(folder / "tokenizer.json")
    load_tokenizer(folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(KVSealError, match=f"{name}.*it is a named pipe, not a file"):
        load_tokenizer(folder)
    shutil.rmtree(folder)


def small_tokenizer(path: Path) -> None:
    import tokenizers

    core = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    core.decoder = tokenizers.decoders.ByteLevel()
    core.save(str(path))


def test_a_pipe_that_a_shell_has_opened_for_us_is_read() -> None:
    """``--secret-file <(pass show fleet)``."""
    end, writer = os.pipe()
    try:
        os.write(writer, b"a secret of the tests")
        os.close(writer)
        assert read_file(Path(f"/dev/fd/{end}")) == b"a secret of the tests"
    finally:
        os.close(end)
