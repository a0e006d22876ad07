"""The command: exit statuses, reports in every form, the dry run, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvseal.audit import command
from kvseal.audit.client import ClientSettings
from kvseal.audit.command import _Bar, main
from kvseal.audit.findings import Report
from kvseal.audit.probes.base import Depth
from kvseal.audit.runner import PROBES, AuditSettings, audit

from .standin import Standin, Traits

KEYS = ("key-one-secret", "key-two-secret")


class _Thread:
    """A stand-in in its own thread, since the command makes its own event loop."""

    def __init__(self, fault: str) -> None:
        self.standin = Standin(fault, 1, Traits(keys=KEYS))
        self.url = ""
        self._up, self._down = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self.standin.server() as server:
            self.url = server.url
            self._up.set()
            await self._down.wait()

    def start(self) -> _Thread:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._down.set)
        self._thread.join(10)


@pytest.fixture
def honest() -> Iterator[_Thread]:
    server = _Thread("").start()
    yield server
    server.stop()


@pytest.fixture
def faulty() -> Iterator[_Thread]:
    server = _Thread("truncate-head").start()
    yield server
    server.stop()


def test_a_clean_audit_and_its_reports(honest: _Thread, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = {form: tmp_path / f"r.{form}" for form in ("json", "junit", "sarif", "html")}
    options = [word for form, path in forms.items() for word in (f"--{form}", str(path))]
    assert main([honest.url, "--keys", *KEYS, "--only", "limits,isolation", "--depth", "quick", "--quiet", *options]) == 0
    said = capsys.readouterr().out
    assert "Clean: nothing found" in said and "proved:" in said
    body = json.loads(forms["json"].read_text())
    assert body["exit_status"] == 0 and [result["verdict"] for result in body["results"]] == ["passed"] * len(body["results"])
    assert [result["probe"] for result in body["results"]] == ["limits", "isolation", "answers"]
    suite = ElementTree.parse(forms["junit"]).getroot()
    assert suite.get("failures") == "0" and suite.get("tests") == "3"
    assert json.loads(forms["sarif"].read_text())["runs"][0]["results"] == []
    page = forms["html"].read_text()
    assert page.count("<svg") == 2 and "<script" not in page and 'src="http' not in page
    for text in (said, page, *(path.read_text() for path in forms.values())):
        assert "secret" not in text


def test_findings_end_with_one_and_stand_in_every_form(faulty: _Thread, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = {form: tmp_path / f"r.{form}" for form in ("json", "junit", "sarif", "html")}
    options = [word for form, path in forms.items() for word in (f"--{form}", str(path))]
    assert main([faulty.url, "--keys", *KEYS, "--only", "limits", "--depth", "quick", *options]) == 1
    said = capsys.readouterr()
    assert "LIMIT [limits.silent-truncation]" in said.out and "\x1b" not in said.out
    assert said.err == ""  # No bar where no terminal is.
    assert ElementTree.parse(forms["junit"]).getroot().get("failures") == "1"
    (result,) = json.loads(forms["sarif"].read_text())["runs"][0]["results"]
    assert result["ruleId"] == "limits.silent-truncation" and result["level"] == "error"
    page = forms["html"].read_text()
    assert (
        'href="#limits-limits.silent-truncation"' in page and 'id="limits-limits.silent-truncation"' in page and "over the limit of" in page
    )
    (finding,) = json.loads(forms["json"].read_text())["results"][0]["findings"]
    assert finding["confidence"] == "proven" and finding["exhibits"]


def test_the_dry_run_generates_nothing_and_bounds_the_audit(honest: _Thread, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([honest.url, "--keys", *KEYS, "--dry-run", "--depth", "quick"]) == 0
    said = capsys.readouterr().out
    assert honest.standin.count == 0 and "nothing was generated" in said
    planned = {
        line.split()[0]: int(line.split()[1])
        for line in said.splitlines()
        if line.split()[:1] and line.split()[0] in {p.name for p in PROBES}
    }
    assert len(planned) == len(PROBES)
    path = tmp_path / "r.json"
    assert main([honest.url, "--keys", *KEYS, "--depth", "quick", "--quiet", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["requests"] <= sum(planned.values()) + 24


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ftp://x/v1"], "is not an address"),
        (["http://user:pass@host/v1"], "write keys with --keys"),
        (["http://h/v1", "--only", "leek"], "no probe is called 'leek'"),
        (["http://h/v1", "--budget", "coffee=3"], "cannot read 'coffee=3'"),
        (["http://h/v1", "--keys", "@/no/such/file"], "--keys: the file /no/such/file cannot be read"),
        (["http://h/v1", "--timeout", "0"], "--timeout"),
        (["http://h/v1", "--timeout", "nan"], "--timeout"),
        (["http://h:99999/v1"], "'http://h:99999/v1' is not an address (Port out of range"),
        (["http://h:0/v1"], "is not an address"),
        (["http://[::1/v1"], "'http://[::1/v1' is not an address"),
        (["http://h/v1", "--only", ","], "--only names no probe"),
        (["http://h/v1?a=b"], "nothing behind it"),
        (["http://h/v1/chat/completions"], "which ends before /chat/completions"),
        (["http://h/v1", "--keys", "a-secret\nkey"], "word 1 is no key"),
        (["http://h/v1", "--keys", "a-secret-kéy"], "word 1 is no key"),
        (["http://h/v1", "--keys", ""], "word 1 holds no key"),
        (["http://h/v1", "--keys", "a-secret", "a-secret"], "one key is given twice"),
        (["http://h/v1", "--ca", "/no/such/file"], "--ca: /no/such/file holds no certificate"),
        (["http://h/v1", "--ca", __file__], "holds no certificate"),
        (["http://h/v1", "--json", "/no/such/folder/r.json"], "--json: /no/such/folder/r.json cannot be written"),
        (["http://h/v1", "--html", "/"], "--html: / cannot be written"),
        (["--log", "/no/such/file"], "--log: /no/such/file cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_is_said_and_ends_with_two(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert said in told and "a-secret" not in told


def test_a_budget_too_small_for_all_is_shared_out(honest: _Thread, tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    main([honest.url, "--keys", *KEYS, "--quiet", "--depth", "quick", "--budget", "requests=70", "--json", str(target)])
    requests = {result["probe"]: result["requests"] for result in json.loads(target.read_text())["results"]}
    assert all(requests[probe.name] > 0 for probe in PROBES), requests


def test_the_bar_fits_in_a_line_and_obeys_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    bar = _Bar(True)
    bar.show("a long\x1b[2J word of a stranger " * 20, 0.5)
    bar.clear()
    first, second = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert first.startswith("[============            ]  50 %  a long") and len(first) < 80 and "\x1b" not in first and second == ""


def test_an_interrupted_audit_reports_what_it_found(faulty: _Thread) -> None:
    settings = AuditSettings(ClientSettings(faulty.url, keys=KEYS), depth=Depth.QUICK)

    async def interrupted() -> Report:
        done = asyncio.Event()
        task = asyncio.create_task(audit(settings, lambda _what, share: done.set() if share >= 1 / len(PROBES) else None))
        await done.wait()
        task.cancel()
        return await task

    report = asyncio.run(interrupted())
    assert report.stopped.startswith("interrupted") and report.exit_status == 1
    assert any(finding.rule == "limits.silent-truncation" for result in report.results for finding in result.findings)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_is_ended_has_its_reports(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(number, signal.SIG_DFL)

    async def ends(settings: AuditSettings, progress: object) -> Report:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return Report({"address": settings.client.url}, {}, "2026-01-01T00:00:00Z", stopped="interrupted")
        raise AssertionError("nobody said so")

    monkeypatch.setattr(command, "audit", ends)
    try:
        assert main(["http://h/v1", "--quiet", "--json", str(tmp_path / "r.json")]) == 2
        assert json.loads((tmp_path / "r.json").read_text())["stopped"] == "interrupted"
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("closed", [False, True])
def test_reports_are_written_also_where_the_summary_cannot_be(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freeze, report = tmp_path / "freeze.txt", tmp_path / "r.json"
    freeze.write_text("vllm==0.20.2\n")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", None if closed else full)
        status = main(["--packages", str(freeze), "--json", str(report)])
        monkeypatch.undo()
    assert json.loads(report.read_text())["results"] and status == (1 if closed else 2)
    assert ("standard output cannot be written: No space left" in capsys.readouterr().err) is not closed


def test_numbers_of_thousands_of_digits_in_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many, log, freeze = "9" * 5_000, tmp_path / "log", tmp_path / "freeze"
    log.write_text(f"GPU KV cache size: {many} tokens\nllama_context: n_ctx = {many}\nmax_seq_len={many}\n")
    freeze.write_text(f"vllm=={many}\n")
    assert main(["--log", str(log), "--packages", str(freeze)]) == 2
    assert "no version that can be compared: vllm 999" in capsys.readouterr().out


def test_without_anything_to_audit() -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "Audit only servers that are yours" in said and "exit status" in said and "--dry-run" in said


def test_the_documentation_says_of_each_rule_what_to_do() -> None:
    root = Path(__file__).parents[2]
    told = (root / "docs" / "audit.md").read_text().partition("## What to do with a finding")[2].partition("\n## ")[0]
    sources = "".join(path.read_text() for path in (root / "kvseal" / "audit").rglob("*.py"))
    rules = set(re.findall(r'"((?:limits|leak|reuse|isolation|aborts|honesty|offline|audit)\.[a-z-]+)', sources))
    assert len(rules) > 45 and [rule for rule in sorted(rules) if f"`{rule}" not in told] == []


def test_a_server_that_sends_lone_surrogates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON can hold half a character, UTF-8 cannot: the reports are written all the same."""
    server = _Thread("odd-ids").start()
    try:
        paths = [tmp_path / form for form in ("json", "junit", "sarif", "html")]
        options = [word for path in paths for word in (f"--{path.name}", str(path))]
        assert main([server.url, "--keys", *KEYS, "--only", "limits", "--depth", "quick", "--quiet", *options]) == 1
    finally:
        server.stop()
    assert "limits.silent-truncation" in capsys.readouterr().out
    assert all("limits.silent-truncation" in path.read_text("utf-8") for path in paths)


def test_offline_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freeze, log = tmp_path / "freeze.txt", tmp_path / "serve.log"
    freeze.write_text("vllm==0.7.1\n")
    log.write_text("max_total_num_tokens=681280, context_len=1048576\n")
    assert main(["--packages", str(freeze), "--log", str(log)]) == 1
    said = capsys.readouterr().out
    assert "CVE-2025-25183" in said and "offline.pool-below-context" in said
    freeze.write_text("vllm==0.33.0\n")
    assert main(["--packages", str(freeze)]) == 0
