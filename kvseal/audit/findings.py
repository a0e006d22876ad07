"""What an audit says: findings, the verdict of each probe, and the report that holds them.

Owns the words of a result and their exit status. Never decides anything about a server: probes do. Holds no key, no prompt and no answer of
the user's; canaries and prompts in the evidence are synthetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Grade(StrEnum):
    """What kind of thing was found, worst first. `NOT_ISOLATED` is not a leak of text: it says that a cache can be sensed by others."""

    LEAK = "leak"
    CORRUPTION = "corruption"
    LIMIT = "limit"
    HANG = "hang"
    HONESTY = "honesty"
    NOT_ISOLATED = "not-isolated"
    ADVISORY = "advisory"
    SETTING = "setting"


class Confidence(StrEnum):
    """`PROVEN`: the evidence has no other explanation within the stated error bound. `LIKELY`: one exists but is contrived.
    `SUSPECTED`: worth a look; an innocent explanation is plausible."""

    PROVEN = "proven"
    LIKELY = "likely"
    SUSPECTED = "suspected"


class Verdict(StrEnum):
    PASSED = "passed"
    FOUND = "found"
    UNPROVEN = "could not prove"
    SKIPPED = "skipped"


NOT_ASKING = ("answers", "offline")
"""What looks at that which is there already: without anything else, it makes no audit of a server."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One request as evidence: what was sent in a few words, and what came back. Texts are cut; all of them are synthetic."""

    request: str
    what: str
    came_back: str
    server_id: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers for a plot of the report: one named group of measurements in one unit."""

    plot: str
    group: str
    unit: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `rule` is stable and short (``limits.silent-truncation``); CI systems key on it."""

    rule: str
    grade: Grade
    confidence: Confidence
    title: str
    proof: str
    remedy: str = ""
    exhibits: tuple[Exhibit, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(slots=True)
class ProbeResult:
    """What one probe found, what it proved, and what it could not. A probe that proved nothing, or was cut off, has not passed."""

    probe: str
    title: str
    findings: list[Finding] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    skipped: str = ""
    cut_off: bool = False
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        if self.findings:
            return Verdict.FOUND
        if self.skipped:
            return Verdict.SKIPPED
        return Verdict.PASSED if self.proved and not self.cut_off else Verdict.UNPROVEN

    def find(self, finding: Finding) -> None:
        """Adds `finding` unless the same rule was found already: the first proof is enough, its exhibits are the evidence."""
        if all(known.rule != finding.rule for known in self.findings):
            self.findings.append(finding)


@dataclass(slots=True)
class Report:
    """One audit. `target` and `settings` are for the reader; neither holds a key."""

    target: dict[str, str]
    settings: dict[str, str]
    started_utc: str
    results: list[ProbeResult] = field(default_factory=list)
    stopped: str = ""
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        grades = list(Grade)
        return sorted((f for result in self.results for f in result.findings), key=lambda f: (grades.index(f.grade), f.rule))

    @property
    def incomplete(self) -> list[str]:
        """The probes that were asked for and did not come to their end."""
        return [result.probe for result in self.results if result.skipped or result.cut_off]

    @property
    def exit_status(self) -> int:
        """0 clean, 1 findings, 2 could not audit: stopped, or a probe was left out or cut off, or none came to a verdict by asking."""
        if self.findings:
            return 1
        if self.stopped or self.incomplete:
            return 2
        asked = [result for result in self.results if result.probe not in NOT_ASKING] or self.results
        return 0 if any(result.verdict is Verdict.PASSED for result in asked) else 2
