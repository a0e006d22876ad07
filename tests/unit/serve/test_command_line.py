"""The command line: what is wrong in a call is said in the words of that call."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvseal.cli import main


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
