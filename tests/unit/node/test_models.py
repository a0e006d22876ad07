"""What a person types as MODEL: local faults are called so, and only what can be a hub id is asked for on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvseal.core.errors import ModelNotFound
from kvseal.node import demo, models
from kvseal.node.demo import demo_model_path
from kvseal.node.models import resolve_model


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hub was asked for. Nothing leaves this machine."""
    calls: list[str] = []

    def snapshot(repo_id: str) -> Path:
        calls.append(repo_id)
        return Path("fetched")

    def file(repo_id: str, filename: str) -> Path:
        calls.append(f"{repo_id}:{filename}")
        return Path("fetched")

    monkeypatch.setattr(models, "_hub_snapshot", snapshot)
    monkeypatch.setattr(models, "_hub_file", file)
    return calls


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "there.gguf").write_bytes(b"GGUF")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("model.gguf", "no such file or folder"),
        ("weights/model.gguf", "there is no folder weights"),
        ("some/weights/model.gguf", "there is no folder some"),
        ("models/gone.gguf", "no such file or folder"),
        ("models/gone", "no such file or folder"),
        ("models/there.gguf/x", "models/there.gguf is no folder"),
        ("./gone", "no such file or folder"),
        ("../gone/model", "there is no folder ../gone"),
        ("/nonexistent/model", "there is no folder /nonexistent"),
        ("~/no-such-model-here", "no such file or folder"),
        ("~nobody-of-this-name/model", "there is no such user"),
        ("dangling", "the link dangling leads to nowhere, which is not there"),
        ("circle", "a circle"),
        ("circle/model.gguf", "a circle"),
        ("empty", "the folder is empty"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_can_only_be_local_is_a_local_fault(here: Path, asked: list[str], model: str, fault: str) -> None:
    (here / "empty").mkdir()
    (here / "dangling").symlink_to("nowhere")
    (here / "circle").symlink_to("circle")
    with pytest.raises(ModelNotFound, match=re.escape(fault)) as error:
        resolve_model(model)
    assert asked == [] and str(error.value).startswith((model, str(here)))


@pytest.mark.parametrize("model", ["owner/name", "owner/name:model.gguf", "owner/name:folder/model.gguf", "models/there.gguf"])
def test_hub_ids_are_asked_for_and_files_are_not(here: Path, asked: list[str], model: str) -> None:
    found = resolve_model(model)
    assert (asked, found) == (([], here / "models" / "there.gguf") if model.startswith("models") else ([model], Path("fetched")))


@pytest.mark.parametrize("name", ["x" * 300, "circle", "file"])
def test_a_cache_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(demo, "_fetch", lambda path: pytest.fail("fetched"))
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVSEAL_CACHE", str(tmp_path / name))
    with pytest.raises(ModelNotFound, match="Set KVSEAL_CACHE to another directory"):
        demo_model_path()


@pytest.mark.timeout(60)
def test_a_named_pipe_for_the_lock_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_fetch", lambda path: path.write_bytes(b"fetched"))
    monkeypatch.setenv("KVSEAL_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    os.mkfifo(tmp_path / "models" / ".fetch.lock")
    assert demo_model_path().read_bytes() == b"fetched"


def test_a_folder_that_may_not_be_read(here: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (here / "closed").mkdir(mode=0)
    with pytest.raises(ModelNotFound, match="cannot be read"):
        resolve_model("closed")
