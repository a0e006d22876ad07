"""Detection and false-alarm rates of the auditor against the stand-in: ``python -m tests.audit.rates --seeds 20 --out rates.jsonl``.

Each switch is run with each seed and the probe that is due, at depth quick (more depth finds no less); each honest server, of many kinds,
gets the whole audit. Prints the tables that stand in docs/audit.md. One line of JSON a run goes to ``--out``, so that a job can be stopped
and taken up again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvseal.audit.client import ClientSettings
from kvseal.audit.findings import Report
from kvseal.audit.probes.base import Depth
from kvseal.audit.runner import AuditSettings, audit
from kvseal.audit.statistics import zero_upper_bound

from .standin import FAULTS, Standin, Traits

KEYS = ("key-one", "key-two")
TIMEOUT_S = 4.0  # A machine with more work than cores takes a second for what takes 50 ms on a quiet one.


def traits_for(fault: str, seed: int) -> Traits:
    """The server that has `fault`: with logprobs, counts and metrics, and noise of one of four sizes."""
    traits = Traits(keys=KEYS, noise=random.Random(seed).choice((0.0, 0.0, 1e-4, 2e-3)))
    if fault in ("overload-hang", "no-retry-after"):
        return replace(traits, places=2, queue=1)
    if fault == "shared-timing-only":
        return replace(traits, prefill_s=8e-4, cached_counts=False)
    # Generating must take longer than sending, or there is nothing to hang up on, and nobody beside anybody.
    if fault in ("keeps-generating", "abort-garbles-neighbour", "abort-kills-neighbour"):
        return replace(traits, step_s=3e-3)
    if fault in ("crash-under-load", "stream-cut", "abort-as-finish"):
        return replace(traits, step_s=1e-3)
    return traits


async def run_one(
    fault: str, seed: int, *, traits: Traits, only: tuple[str, ...] = (), depth: Depth = Depth.NORMAL, timeout_s: float = TIMEOUT_S
) -> Report:
    """One audit of one stand-in."""
    async with Standin(fault, seed, traits).server() as server:
        client = ClientSettings(server.url, keys=traits.keys, timeout_s=timeout_s)
        return await audit(AuditSettings(client, only=only, depth=depth, seed=seed))


def found(fault: str, report: Report) -> bool:
    return any(finding.rule in FAULTS[fault][1] for finding in report.findings)


def honest_traits(seed: int) -> Traits:
    return Traits.drawn(seed)


def _jobs(seeds: int, honest: int, first: int, switches: list[str]) -> Iterator[tuple[str, int]]:
    for seed in range(first, max(seeds, honest) + 1):
        if seed <= honest:
            yield "", seed
        if seed <= seeds:
            for fault in switches:
                yield fault, seed


def _run_job(job: tuple[str, int]) -> dict[str, Any]:
    """One line of the measurement."""
    fault, seed = job
    if fault:
        report = asyncio.run(run_one(fault, seed, traits=traits_for(fault, seed), only=(FAULTS[fault][0],), depth=Depth.QUICK))
    else:
        report = asyncio.run(run_one("", seed, traits=honest_traits(seed), timeout_s=20.0))
    detected = found(fault, report) if fault else False
    return {
        "fault": fault,
        "seed": seed,
        "rules": [finding.rule for finding in report.findings],
        "detected": detected,
        # Why a switch was missed: what the probe says it could not tell.
        "open": [text for result in report.results for text in result.unproven] if fault and not detected else [],
        "stopped": report.stopped,
        "requests": report.requests,
        "seconds": round(report.seconds, 2),
    }


def _run_missing(path: Path, jobs: list[tuple[str, int]], workers: int) -> list[dict[str, Any]]:
    """Runs those of `jobs` that are not in `path` yet, `workers` at once: most of an audit of a server that hangs is waiting."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    have = {(row["fault"], row["seed"]) for row in rows}
    with ProcessPoolExecutor(workers) as pool, path.open("a") as file:
        for done in as_completed([pool.submit(_run_job, job) for job in jobs if job not in have]):
            rows.append(done.result())
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The two tables, as Markdown."""
    lines = ["| switch | probe | found | what was reported |", "| --- | --- | --- | --- |"]
    total = hits = 0
    for fault, (probe, _) in FAULTS.items():
        runs = [row for row in rows if row["fault"] == fault]
        rules = sorted({rule for row in runs for rule in row["rules"]})
        good = sum(row["detected"] for row in runs)
        total, hits = total + len(runs), hits + good
        lines.append(f"| {fault} | {probe} | {good}/{len(runs)} | {', '.join(rules)} |")
    honest = [row for row in rows if not row["fault"]]
    alarms = [row for row in honest if row["rules"] or row["stopped"]]
    lines += ["", f"Detected: {hits} of {total} runs over {len(FAULTS)} switches."]
    lines.append(
        f"False alarms: {len(alarms)} in {len(honest)} whole audits of honest servers"
        f" (95 % upper bound {100 * zero_upper_bound(len(honest)):.1f} % if none)."
    )
    lines += [f"- seed {row['seed']}: {row['rules']} {row['stopped']}" for row in alarms]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--honest", type=int, default=60)
    parser.add_argument("--first", type=int, default=1, help="begin with this seed, to share the work among processes")
    parser.add_argument("--switches", default=",".join(FAULTS), help="only these, parted by commas (default: all)")
    parser.add_argument("--out", type=Path, default=Path("audit-rates.jsonl"))
    parser.add_argument("--workers", type=int, default=2, help="so many audits at once, each in a process of its own")
    options = parser.parse_args()
    jobs = list(_jobs(options.seeds, options.honest, options.first, options.switches.split(",")))
    print(table(_run_missing(options.out, jobs, options.workers)))


if __name__ == "__main__":
    main()
