"""The command line: what is wrong in a call is said in the words of that call."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvseal.cli import main
from kvseal.core.config import WorkerConfig


@pytest.mark.parametrize("workers", ["", " , "])
def test_a_router_over_nobody_asks_for_workers(workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    assert main(["route", "--workers", workers, "--secret-file", str(secret)]) == 2
    assert "--workers names nobody" in capsys.readouterr().err


def test_a_benchmark_without_a_name_asks_for_the_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench"])
    assert capsys.readouterr().err.rstrip().endswith("required: NAME")


def worker(folder: Path, *more: str) -> list[str]:
    secret = folder / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    return ["worker", "demo", "--role", "decode", "--listen", "127.0.0.1:0", "--secret-file", str(secret), *more]


def test_a_worker_has_keys_for_its_http_api_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(worker(tmp_path, "--api-keys", str(tmp_path / "keys"))) == 2
    assert "--http" in capsys.readouterr().err


def test_the_keys_of_a_worker_are_those_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[WorkerConfig] = []
    monkeypatch.setattr("kvseal.serve.worker.run_worker", found.append)
    monkeypatch.setattr("kvseal.node.models.resolve_model", lambda name: Path(name))
    keys = tmp_path / "keys"
    assert main(worker(tmp_path, "--http", "127.0.0.1:0", "--api-keys", str(keys))) == 0
    (config,) = found
    assert config.http is not None and config.http.api_keys == keys


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "[::]", "[::0]"])
def test_a_worker_names_an_address_that_others_reach(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(worker(tmp_path, "--listen", f"{host}:7000")) == 2
    assert "give the address that the other nodes reach" in capsys.readouterr().err
