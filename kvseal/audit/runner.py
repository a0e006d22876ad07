"""Runs an audit: discovery, then each probe in turn, within the budget; and makes the plan of a dry run.

Owns the order and the bookkeeping. Laws: whatever a server does ends as a result; a spent budget leaves a note, not a traceback.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kvseal.audit.advisories import load
from kvseal.audit.backoff import BUSY, TurnedAway
from kvseal.audit.budget import Allowance, Budget, BudgetSpent
from kvseal.audit.canary import Aviary
from kvseal.audit.client import Client, ClientSettings
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult, Report
from kvseal.audit.probes import aborts, honesty, isolation, leak, limits, reuse
from kvseal.audit.probes.base import Cost, Depth, Probe, Scene, exhibit, hung
from kvseal.audit.probes.offline import Shown, look
from kvseal.audit.probes.patience import crowded
from kvseal.audit.probes.review import review
from kvseal.audit.probes.shape import shape_floor
from kvseal.audit.prompts import filler
from kvseal.audit.redact import key_name
from kvseal.audit.target import CannotAudit, Target, meet, read_metrics, survey

PROBES: tuple[Probe, ...] = (limits.PROBE, leak.PROBE, reuse.PROBE, isolation.PROBE, aborts.PROBE, honesty.PROBE)
NAMES = (*(probe.name for probe in PROBES), "offline")
_DISCOVERY = Cost(36, 3_000)

Progress = Callable[[str, float], None]
"""Told what is going on, and the share of the whole that is done (0 to 1)."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """What to audit and how far to go. `only` empty means every probe; `fresh` that no audit with this seed was here before."""

    client: ClientSettings
    model: str = ""
    context_tokens: int | None = None
    allowance: Allowance = field(default_factory=Allowance)
    depth: Depth = Depth.NORMAL
    only: tuple[str, ...] = ()
    seed: int = 0
    fresh: bool = True
    shown: Shown = field(default_factory=Shown)
    logprobs: bool = True

    def probes(self) -> tuple[Probe, ...]:
        return tuple(probe for probe in PROBES if not self.only or probe.name in self.only)


def no_progress(what: str, share: float) -> None:
    """The progress of an audit that nobody watches."""


async def audit(settings: AuditSettings, progress: Progress = no_progress) -> Report:
    """One audit of one server. Never raises for anything that the server did; `Report.stopped` says why there is no verdict.

    Cancelled (Ctrl-C), it returns what it has.
    """
    budget = Budget(settings.allowance)
    seed = settings.seed or random.SystemRandom().randrange(1, 1 << 48)
    draw = random.Random(seed)
    report = Report({"address": settings.client.url}, _shown(settings, seed), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    async with Client(settings.client, budget) as client:
        try:
            async with _ticking(client, "Looking around", progress):
                scene = await _first_look(settings, client, draw)
            report.target |= scene.target.describe()
            await _run_probes(settings, scene, report, progress)
            report.results.append(review(scene))
            if not settings.only or "offline" in settings.only:
                await _look_offline(settings, scene, report)
        except CannotAudit as error:
            report.stopped = str(error)
        except TurnedAway as error:
            report.stopped = f"{error}: {_why_turned_away(error)}"
        except BudgetSpent as error:
            report.stopped = report.stopped or f"{error}; raise it with --budget"
        except asyncio.CancelledError:
            report.stopped = "interrupted; below is what was found until then"
        report.requests, report.tokens, report.seconds = budget.requests, budget.tokens, budget.elapsed_s
    return report


async def _first_look(settings: AuditSettings, client: Client, draw: random.Random) -> Scene:
    """What the server says about itself, and a few small questions."""
    target = await survey(client, model=settings.model, context_tokens=settings.context_tokens)
    await meet(client, target, draw, logprobs=settings.logprobs)
    scene = Scene(client, target, Aviary(draw), draw, settings.depth, max(1, len(settings.client.keys)), settings.client.concurrency)
    scene.fresh = settings.fresh
    if (shape := await shape_floor(scene)) is not None:
        scene.floor = shape
        target.notes.append(f"the same tokens in another batch shape, nothing reused, move its logprobs by {shape:.3g} nats")
    return scene


async def _run_probes(settings: AuditSettings, scene: Scene, report: Report, progress: Progress) -> None:
    """Each probe in turn, within its share; then, with what others left, once more those that their share cut off."""
    probes = settings.probes()
    budget, spent = scene.client.budget, ""
    cut_off: list[tuple[Probe, ProbeResult]] = []
    for index, probe in enumerate(probes):
        result = ProbeResult(probe.name, probe.title)
        report.results.append(result)
        if spent:
            result.skipped = spent
            continue
        budget.share(*_parts(probes[index:], scene))
        planned = probe.cost(scene.target, scene.depth, scene.concurrency).requests
        try:
            async with _ticking(scene.client, probe.title, progress, index / len(probes), 1 / len(probes), planned):
                unfinished = await _run_probe(scene, probe, result)
            if unfinished:
                _note_cut_off(result, unfinished)
                cut_off.append((probe, result))
                spent = "the budget is spent; raise it with --budget" if budget.spent else ""
            if not spent and (dead := await _dead(scene)) is not None:
                result.find(dead)
                spent = "the server stopped answering"
        except TurnedAway as error:
            spent = _turned_away(result, error)
    if not spent:
        await _run_again(scene, cut_off, progress)
    report.target |= scene.target.describe()
    for note in scene.target.notes:
        report.target.setdefault("notes", "")
        report.target["notes"] = (report.target["notes"] + "; " + note).strip("; ")
    progress("done", 1.0)


@asynccontextmanager
async def _ticking(
    client: Client, title: str, progress: Progress, begin: float = 0.0, part: float = 0.0, planned: int = 1
) -> AsyncIterator[None]:
    """Tells `progress` every half second what is going on, and how far it has come by its requests: from `begin` on through `part` of the
    whole, once all that are `planned` are sent. It may take minutes."""
    budget, before = client.budget, client.budget.requests

    async def tick() -> None:
        while True:
            done = min(1.0, (budget.requests - before) / max(1, planned))
            waits = f", waiting {left_s:.0f} s as the server asks" if (left_s := client.backoff.left_s) >= 1.0 else ""
            progress(f"{title.partition(':')[0]} ({budget.requests} requests, {budget.elapsed_s:.0f} s{waits})", begin + part * done)
            await asyncio.sleep(0.5)

    ticker = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticker.cancel()


async def _run_probe(scene: Scene, probe: Probe, result: ProbeResult) -> str:
    """Runs `probe` within the present share, and books what it took. Returns why it could not finish, or nothing."""
    budget, unfinished = scene.client.budget, ""
    began_s, requests, tokens = time.monotonic(), budget.requests, budget.tokens
    try:
        await probe.run(scene, result)
    except BudgetSpent as error:
        unfinished = str(error)
    finally:
        budget.share(1.0)
        result.requests += budget.requests - requests
        result.tokens += budget.tokens - tokens
        result.seconds += time.monotonic() - began_s
    return unfinished


def _note_cut_off(result: ProbeResult, why: str) -> None:
    result.cut_off = True
    result.unproven.append(f"not finished: {why}; raise it with --budget")


async def _run_again(scene: Scene, cut_off: list[tuple[Probe, ProbeResult]], progress: Progress) -> None:
    """Runs the probes that their share cut off from the start, where what is left is clearly more than what they had. What was found
    stays found."""
    budget = scene.client.budget
    for index, (probe, result) in enumerate(cut_off):
        budget.share(1.0 / (len(cut_off) - index))
        if budget.left_s < 1.5 * result.seconds:
            budget.share(1.0)
            continue
        progress(f"{probe.name} once more, with what is left of the budget", 1.0)
        again = ProbeResult(probe.name, probe.title, findings=result.findings)
        try:
            unfinished = await _run_probe(scene, probe, again)
        except TurnedAway as error:
            _turned_away(result, error)
            return
        if not unfinished or len(again.proved) > len(result.proved):
            result.proved, result.unproven, result.series, result.cut_off = again.proved, again.unproven, again.series, False
            if unfinished:
                _note_cut_off(result, unfinished)
        result.requests += again.requests
        result.tokens += again.tokens
        result.seconds += again.seconds
        if budget.spent:
            return


def _parts(ahead: tuple[Probe, ...], scene: Scene) -> tuple[float, float]:
    """How much of what is left of the budget the first of `ahead` may take: of requests and tokens, and of the time.

    All requests and tokens when the plan fits, else by its share of the plan's cost. Nobody knows beforehand how long a server takes, so
    time is always shared out, by requests and tokens in equal parts; what a probe leaves goes to those after it.
    """
    costs = [each.cost(scene.target, scene.depth, scene.concurrency) for each in ahead]
    plan, own, budget = sum(costs, Cost(0, 0)), costs[0], scene.client.budget
    left_requests, left_tokens = budget.allowance.requests - budget.requests, budget.allowance.tokens - budget.tokens
    by_requests, by_tokens = own.requests / max(1, plan.requests), own.tokens / max(1, plan.tokens)
    fits = plan.requests <= left_requests and plan.tokens <= left_tokens
    return 1.0 if fits else by_requests, 1.0 if len(ahead) == 1 else (by_requests + by_tokens) / 2


async def _look_offline(settings: AuditSettings, scene: Scene, report: Report) -> None:
    """The offline probe, with the live server's own metrics and context where the operator gave none."""
    shown = settings.shown
    metrics = shown.metrics
    if metrics is None and scene.target.metrics:
        try:
            metrics = await read_metrics(scene.client) or None
        except BudgetSpent:  # What was shown is looked at all the same, and what was found stands.
            metrics = None
    if shown.anything() or metrics is not None:
        context = shown.context_tokens or scene.target.context_tokens
        report.results.append(look(Shown(shown.log, metrics, shown.packages, context, shown.notes), load()))


def audit_offline(shown: Shown) -> Report:
    """An audit that asks no server: only of what the operator shows."""
    report = Report(
        {"address": "what the operator shows; no server was asked"}, {"probes": "offline"}, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    )
    report.results.append(look(shown, load()))
    return report


async def _dead(scene: Scene) -> Finding | None:
    """A finding when the server does not answer one small request three times in a row. Raises `TurnedAway` when it refuses all three."""
    answer = None
    for _ in range(3):
        try:
            answer = await scene.client.ask(scene.ask(filler(4, scene.draw).lstrip(), tokens=16, max_tokens=1, label="still there?"))
        except BudgetSpent:
            return None
        if answer.status and answer.status not in BUSY:
            return None
    if answer is not None and answer.status:
        return None
    if answer is not None and hung(answer) and crowded():
        note = "requests were silent while the auditor's own machine had no time either; a server on it may be slow for that reason alone"
        scene.target.notes += [] if note in scene.target.notes else [note]
        return None
    return Finding(
        "audit.server-died",
        Grade.HANG,
        Confidence.LIKELY,
        "the server stopped answering during the audit",
        f"Three small requests in a row got no response ({answer.note if answer else ''}). The requests before it are in the report.",
        "Read the server's log of this minute.",
        (exhibit(answer),) if answer else (),
    )


def _turned_away(result: ProbeResult, error: TurnedAway) -> str:
    """The server answered before, and now refuses everything: a finding where it says 503. Returns why nothing more is asked."""
    why = _why_turned_away(error)
    if error.answer.status == 503:
        result.find(
            Finding(
                "audit.server-refuses",
                Grade.HANG,
                Confidence.LIKELY,
                "the server stopped taking requests during the audit",
                f"{error}. The requests before were answered; {why}.",
                "Read the server's log of this minute. A server that cannot recover must end, so that something starts it again.",
                (exhibit(error.answer),),
            )
        )
    else:
        result.cut_off = True
        result.unproven.append(f"not finished: {error}: {why}")
    return "the server refuses every request"


def _why_turned_away(error: TurnedAway) -> str:
    if error.answer.status == 429:
        return "what it allows is used up, or less than an audit needs: try later, with another key, or with less --concurrency"
    return "it is not ready, has more to do than it can, or serves nobody any more"


def _shown(settings: AuditSettings, seed: int) -> dict[str, str]:
    return {
        "probes": ", ".join(probe.name for probe in settings.probes()),
        "depth": settings.depth.name.lower(),
        "concurrency": str(settings.client.concurrency),
        "keys": ", ".join(key_name(key) for key in settings.client.keys if key) or "none",
        "budget": str(settings.allowance),
        "seed": str(seed),
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """What an audit would send, at most. `target` is what the server publishes, or a guess when it could not be asked."""

    target: Target
    guessed: str
    parts: tuple[tuple[Probe, Cost], ...]

    @property
    def total(self) -> Cost:
        return sum((cost for _, cost in self.parts), _DISCOVERY)


async def plan(settings: AuditSettings) -> Plan:
    """The plan and its cost. Generates nothing: reads what the server publishes, and guesses where it cannot."""
    guessed = ""
    async with Client(settings.client, Budget(settings.allowance)) as client:
        try:
            target = await survey(client, model=settings.model, context_tokens=settings.context_tokens)
        except (CannotAudit, BudgetSpent) as error:
            guessed = str(error)
            target = Target(settings.model or "?", context_tokens=settings.context_tokens)
    target.completions = target.chat = True
    if target.context_tokens is None:
        guessed = guessed or "the server does not say its context"
    parts = tuple((probe, probe.cost(target, settings.depth, settings.client.concurrency)) for probe in settings.probes())
    return Plan(target, guessed, parts)
