"""What the pages of docs say of the API is what the code has: error codes, metrics, flags, the Python interface."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from kvseal import cli
from kvseal.core import errors
from kvseal.core.config import EngineConfig
from kvseal.serve.llm import LLM
from kvseal.serve.metrics import Metrics

from .test_metrics import STATS
from .tiny_model import start_report

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
DOCS = Path(__file__).parents[3] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_error_code_is_in_the_table() -> None:
    kinds = [vars(kind) for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind["code"] for kind in kinds if isinstance(kind.get("code"), str)}
    unused = {"rate_limit_exceeded", "unavailable"}  # No quota is kept yet; a name for what its subclasses say more exactly.
    missing = [code for code in sorted(codes - unused) if f"`{code}`" not in page("serving.md")]
    assert len(codes) > 10 and not missing


def test_every_status_is_that_of_its_code() -> None:
    served = (errors.RequestError, errors.Unavailable, errors.BrokenSeal)
    of_code = {kind.code: str(kind.status) for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, served)}
    rows = re.findall(r"^\| (\d{3}) \| (`.*?`) \|", page("serving.md"), re.M)
    found = [(status, code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)]
    assert found and [pair for pair in found if of_code.get(pair[1], "500") != pair[0]] == []


@pytest.mark.parametrize("name", ["serving.md", "deployment.md"])
def test_metrics_that_are_named_are_there(name: str) -> None:
    shown = Metrics().render(start_report(), STATS, ready=True, restarts=0).decode()
    handed = {"kvseal_handoff_differed_total"}  # Only with several nodes.
    named = set(re.findall(r"\b(kvseal_[a-z_]+[a-z])\b", page(name)))
    assert named and sorted(each for each in named - handed if f"# TYPE {each} " not in shown) == []


def test_flags_that_are_named_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    known = set(FLAG.findall(capsys.readouterr().out)) | {"--help"}
    named = FLAG.findall(page("serving.md"))
    for name in ("deployment.md", "models.md"):
        named += [flag for line in page(name).splitlines() if "kvseal serve" in line for flag in FLAG.findall(line)]
    assert len(named) > 20 and sorted(set(named) - known) == []


@pytest.mark.parametrize("name", ["generate", "chat", "stream_chat", "from_config"])
def test_calls_are_written_as_they_are(name: str) -> None:
    written = re.search(rf"`(?:LLM\.)?{name}\((.*?)\)` \|", page("python.md"))
    assert written is not None
    signature = inspect.signature(getattr(LLM, name))
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values() if one.name != "self"]
    shown = str(inspect.Signature(parameters))[1:-1].replace("''", '""')
    assert written[1] == shown


def test_every_option_of_an_engine_is_in_the_table() -> None:
    text = page("python.md")
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig) if field.name not in ("model", "node")}
    assert [name for name in fields if f"`{name}`" not in text] == []
    for name in ("kv_dtype", "weights", "backend"):
        assert re.search(rf"\| `{name}` \| `\"{fields[name]}\"` \|", text), name
