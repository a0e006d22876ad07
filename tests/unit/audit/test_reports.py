"""Reports of hostile text: nothing a server says becomes markup, and every form stays readable by its own parser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from urllib.parse import urlsplit
from xml.etree import ElementTree

from kvseal.audit.findings import Confidence, Exhibit, Finding, Grade, ProbeResult, Report, Series, Verdict
from kvseal.audit.report import html, junit, sarif, terminal
from kvseal.audit.report import json as json_report

_URI_LETTERS = r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-F]{2})+"
EVIL = "<script>alert(1)</script>\x00\x1b[31m]]>&\ud800\"'"


def _report(findings: bool = True) -> Report:
    result = ProbeResult("limits", "Limits", proved=[EVIL], unproven=[EVIL])
    if findings:
        shown = (Exhibit(EVIL, EVIL, EVIL, EVIL),)
        sources = ("javascript:alert(1)", "https://example.org/?a=1&b=<x>")
        result.find(Finding("limits.x", Grade.LEAK, Confidence.PROVEN, EVIL, EVIL, EVIL, shown, sources))
    result.series.append(Series(EVIL, EVIL, "s", (0.0, 0.5, 1.0)))
    result.series.append(Series("all zero", "none", "nats", (0.0, 0.0)))
    return Report({"address": EVIL}, {"keys": EVIL}, "2026-01-01T00:00:00Z", [result])


def _stopped() -> Report:
    return Report({"address": "http://x/v1"}, {}, "2026-01-01T00:00:00Z", stopped="nobody")


def test_html_holds_no_markup_of_a_stranger() -> None:
    page = html.render(_report())
    assert "<script" not in page and "javascript:alert(1)" in page and 'href="javascript' not in page
    assert "Content-Security-Policy" in page and page.count("<svg") == 2


def test_a_terminal_obeys_no_stranger() -> None:
    """Model names, ids and messages may hold escape sequences, bells, and marks that turn the direction of writing."""
    report = _report()
    report.target["model"] = "a\x1b[2J\r\n\x9b\u202eb" + "x" * 100_000
    finding = report.results[0].findings[0]
    bad = replace(finding, proof="p\x1b]0;title\x07", exhibits=(Exhibit("r", "w", "\x1b[31m", "id\x1b"),))
    report.results[0].findings = [bad]
    said = terminal.render(report)
    assert all(char.isprintable() or char == "\n" for char in said) and len(said) < 20_000
    assert "a\\x1b[2J  \\x9b\\x202eb" in said and "\\x1b[31m" in said


def test_html_fetches_nothing() -> None:
    """Links may lead elsewhere; nothing is loaded from there, and nothing runs."""
    fetched: list[tuple[str, str]] = []
    links: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "iframe", "img", "object", "embed", "base", "form", "audio", "video", "source", "use"), tag
            for name, value in attrs:
                assert not name.startswith("on"), name
                if name in ("src", "srcset", "xlink:href", "action", "background", "poster", "data"):
                    fetched.append((name, value or ""))
                if name == "href":
                    links.append(value or "")

    page = html.render(_report())
    Reader().feed(page)
    assert fetched == [] and links == ["#limits-limits.x", "https://example.org/?a=1&b=<x>"]
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in page


def test_sarif_is_as_its_schema_says() -> None:
    """The parts of the SARIF 2.1.0 schema that concern this report: required and known properties, their types and enumerations."""
    for report in (_report(), _report(findings=False), _stopped()):
        log = json.loads(sarif.render(report))
        assert log.keys() == {"$schema", "version", "runs"} and log["version"] == "2.1.0"
        (run,) = log["runs"]
        assert run.keys() <= {"tool", "automationDetails", "invocations", "results"} and "tool" in run
        driver = run["tool"]["driver"]
        assert driver.keys() <= {"name", "informationUri", "rules", "version"} and driver["name"]
        assert urlsplit(driver["informationUri"]).scheme == "https"
        known = {"id", "name", "shortDescription", "fullDescription", "defaultConfiguration", "properties", "help", "helpUri"}
        for rule in driver["rules"]:
            assert rule.keys() <= known and rule["id"] and rule["shortDescription"]["text"]
            assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
            assert len(set(rule["properties"]["tags"])) == len(rule["properties"]["tags"])
        assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
        for invocation in run["invocations"]:
            assert isinstance(invocation["executionSuccessful"], bool) and isinstance(invocation["exitCode"], int)
            assert datetime.fromisoformat(invocation["startTimeUtc"])
            assert all(note["message"]["text"] for note in invocation.get("toolExecutionNotifications", []))
        for result in run["results"]:
            assert result.keys() == {"ruleId", "ruleIndex", "level", "rank", "message", "locations", "partialFingerprints"}
            assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
            assert result["level"] in ("none", "note", "warning", "error") and 0.0 <= result["rank"] <= 100.0
            assert result["message"]["text"] and result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"]


def test_sarif_is_what_code_scanning_takes() -> None:
    """GitHub refuses a file in which one result has no file, or one whose name is an address or is empty; and wants each rule explained."""
    for address in (EVIL, "http://localhost:8000/v1", "https://[::1]:8000/v1/", "http://", "what the operator shows; no server was asked"):
        report = _report()
        report.target["address"] = address
        (run,) = json.loads(sarif.render(report))["runs"]
        assert "version" in run["tool"]["driver"]
        for rule in run["tool"]["driver"]["rules"]:
            assert rule["fullDescription"]["text"] and rule["help"]["text"]
            assert rule["name"].isidentifier() and rule["name"][0].isupper()
            assert 0.0 < float(rule["properties"]["security-severity"]) <= 10.0 and "security" in rule["properties"]["tags"]
            assert re.fullmatch(_URI_LETTERS, rule["helpUri"]) and rule["helpUri"].startswith("https://")
        for result in run["results"]:
            place = result["locations"][0]["physicalLocation"]
            assert place["region"]["startLine"] == 1
            parts = urlsplit(place["artifactLocation"]["uri"])
            assert not parts.scheme and not parts.netloc and parts.path and not parts.path.startswith("/")
            assert re.fullmatch(_URI_LETTERS, place["artifactLocation"]["uri"])
            assert run["automationDetails"]["id"] == place["artifactLocation"]["uri"] + "/"


def test_sarif_knows_a_finding_again_and_tells_servers_apart() -> None:
    """By their fingerprints the alerts of two audits are matched: the same rule at the same server is one, also found once more by another
    probe, and at another server it is another one."""
    report = _report()
    report.results.append(ProbeResult("aborts", "Aborts", findings=list(report.results[0].findings)))

    def prints(address: str) -> list[str]:
        report.target["address"] = address
        (run,) = json.loads(sarif.render(report))["runs"]
        return [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]

    first, other = prints("http://a:1/v1"), prints("http://b:1/v1")
    assert len(set(first + other)) == 4 and prints("http://a:1/v1") == first


def test_sarif_says_what_did_not_come_to_its_end() -> None:
    report = Report({"address": "http://x/v1"}, {}, "2026-01-01T00:00:00Z", [ProbeResult("leak", "Leak", cut_off=True)])
    (invocation,) = json.loads(sarif.render(report))["runs"][0]["invocations"]
    assert invocation["exitCode"] == 2
    assert [note["level"] for note in invocation["toolExecutionNotifications"]] == ["warning"]
    assert "leak" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_junit_counts_its_cases() -> None:
    for report in (_report(), Report({"address": "http://x/v1"}, {}, "2026-01-01T00:00:00Z", [ProbeResult("leak", "Leak")], stopped="x")):
        for suite in ElementTree.fromstring(junit.render(report).encode("utf-8", "replace")).iter("testsuite"):
            cases = list(suite.iter("testcase"))
            assert suite.get("tests") == str(len(cases))
            assert suite.get("failures") == str(sum(case.find("failure") is not None for case in cases))
            assert suite.get("errors") == str(sum(case.find("error") is not None for case in cases))
            assert suite.get("skipped") == str(sum(case.find("skipped") is not None for case in cases))


def test_junit_has_what_its_readers_know() -> None:
    """Elements and attributes are those of the schema by which Jenkins reads; a case has one outcome, in which every finding stands."""
    report = _report()
    report.results[0].find(Finding("limits.y", Grade.HANG, Confidence.LIKELY, "second", "proof of it"))
    report.stopped = "nobody"
    known = {
        "testsuites": {"name", "time", "tests", "failures", "errors"},
        "testsuite": {"name", "time", "tests", "failures", "errors", "skipped", "timestamp"},
        "testcase": {"name", "time", "classname"},
        "failure": {"type", "message"},
        "error": {"type", "message"},
        "skipped": {"type", "message"},
        "system-out": set(),
    }
    root = ElementTree.fromstring(junit.render(report).encode("utf-8", "replace"))
    for element in root.iter():
        assert set(element.attrib) <= known[element.tag], element.tag
        assert re.fullmatch(r"\d{1,3}(\.\d*)?|\d*\.\d*", element.get("time", "0"))
    for case in root.iter("testcase"):
        assert sum(child.tag in ("failure", "error", "skipped") for child in case) <= 1
    (failure,) = root.iter("failure")
    assert failure.get("type") == "limits.x" and "second" in str(failure.get("message"))
    assert "[limits.y]" in str(failure.text) and "proof of it" in str(failure.text)


def test_junit_is_xml_and_sarif_and_json_are_json() -> None:
    root = ElementTree.fromstring(junit.render(_report()).encode("utf-8", "replace"))
    assert root.get("failures") == "1" and root.find(".//failure") is not None
    run = json.loads(sarif.render(_report()))["runs"][0]
    assert run["results"][0]["ruleIndex"] == 0 and run["tool"]["driver"]["rules"][0]["id"] == "limits.x"
    assert json.loads(json_report.render(_report()))["results"][0]["verdict"] == "found"


def test_a_stopped_audit_is_an_error_in_every_form() -> None:
    report = Report({"address": "http://x/v1"}, {}, "2026-01-01T00:00:00Z", stopped="nobody there")
    assert report.exit_status == 2
    assert ElementTree.fromstring(junit.render(report)).get("errors") == "1"
    assert json.loads(sarif.render(report))["runs"][0]["invocations"][0]["executionSuccessful"] is False
    assert "Could not audit" in html.render(report) and "Could not audit: nobody there" in terminal.render(report)


def test_exit_status_and_verdicts() -> None:
    assert _report().exit_status == 1 and _report(findings=False).exit_status == 0
    nothing = ProbeResult("leak", "Leak")
    assert nothing.verdict is Verdict.UNPROVEN
    assert Report({}, {}, "", [nothing]).exit_status == 2
    nothing.skipped = "budget"
    assert nothing.verdict is Verdict.SKIPPED


def test_an_audit_that_did_not_come_to_its_end_is_not_clean() -> None:
    """Not for a CI job that reads the exit status, and in no form of the report."""
    done, cut = ProbeResult("limits", "Limits", proved=["a"]), ProbeResult("leak", "Leak", proved=["b"], cut_off=True)
    offline, answers = ProbeResult("offline", "Offline", proved=["c"]), ProbeResult("answers", "Answers", proved=["d"])
    assert Report({}, {}, "", [done, offline]).exit_status == 0 and Report({}, {}, "", [offline]).exit_status == 0
    assert Report({}, {}, "", [ProbeResult("leak", "Leak"), offline, answers]).exit_status == 2
    report = Report({"address": "http://x/v1"}, {}, "2026-01-01T00:00:00Z", [done, cut, offline])
    assert report.exit_status == 2 and report.incomplete == ["leak"] and cut.verdict is Verdict.UNPROVEN
    assert "Clean" not in terminal.render(report) and "did not come to its end: leak" in terminal.render(report)
    assert "Clean" not in html.render(report) and 'skipped="1"' in junit.render(report)


def test_clean_points_at_what_was_not_proved_only_where_there_is_something() -> None:
    for unproven in ([], ["a"]):
        report = Report(
            {"address": "http://x/v1"}, {}, "2026-01-01T00:00:00Z", [ProbeResult("limits", "L", proved=["b"], unproven=unproven)]
        )
        assert ("listed above" in terminal.render(report)) is bool(unproven)


def test_one_rule_is_reported_once() -> None:
    result = ProbeResult("leak", "Leak")
    for title in ("first", "second"):
        result.find(Finding("leak.x", Grade.LEAK, Confidence.PROVEN, title, ""))
    assert [finding.title for finding in result.findings] == ["first"]


def test_findings_are_sorted_worst_first() -> None:
    result = ProbeResult("leak", "Leak")
    for rule, grade in (("a", Grade.SETTING), ("b", Grade.LEAK), ("c", Grade.LIMIT)):
        result.find(Finding(rule, grade, Confidence.PROVEN, rule, ""))
    assert [finding.rule for finding in Report({}, {}, "", [result]).findings] == ["b", "c", "a"]
