"""What the search found, in words and as JSON.

Owns the wording: which placement is recommended, by how much, what holds each back, and plainly where splitting loses. Never simulates.
"""

from __future__ import annotations

from kvseal.bench.place.search import Answer, Found
from kvseal.bench.place.simulate import Placement
from kvseal.bench.place.slo import seconds

THRIFTY = 0.05
EVEN = 0.02
"""Differences below this are no differences: requests of one run are a sample."""


def text(answer: Answer, *, runners_up: int = 6) -> str:
    lines = _head(answer)
    if answer.impossible:
        return "\n".join([*lines, "", f"no placement: {answer.impossible}"])
    best = answer.found[0]
    lines += ["", f"recommended   {best.placement.name}", f"              {_figures(answer, best)}", f"why           {_why(answer)}"]
    lines += _notes(answer, best)
    others = _runners_up(answer, runners_up)
    if others:
        lines += ["", f"{'runners-up':60}{'req/s':>8}{'/worker':>9}{'of best':>9}  known from"]
        lines += [_row(one, best) for one in others]
        if any(job.blocks for job in answer.question.trace.jobs):
            lines.append("(shared prefixes count only where the scheduler itself was simulated)")
    return "\n".join(lines)


def _head(answer: Answer) -> list[str]:
    q, trace = answer.question, answer.question.trace
    prompt, output = trace.means()
    arrivals = "Poisson arrivals"
    if trace.timed and not q.poisson:
        arrivals = "its own arrivals, stretched to each rate"
    recorded = f", recorded at {trace.rate:.3g} req/s" if trace.timed else ""
    idle = answer.idle.typical()
    together = "together, " if "," in str(answer.slo) else ""
    lines = [
        f"trace         {trace.name}: {len(trace.jobs)} requests{recorded}, mean {prompt:.0f} tokens in, {output:.0f} out; {arrivals}",
        f"limits        {answer.slo}; {together}for {q.target:.0%} of all requests sent",
        f"model         {q.latency.model}; times from {q.latency.source}",
        f"alone         TTFT {seconds(idle.ttft_s)}, TPOT {seconds(idle.tpot_s)} (median request, idle worker)",
    ]
    if trace.spread and not q.poisson:
        lines.insert(1, "              (its clock ticks coarsely: requests of one tick are spread evenly to the next)")
    return lines


def _figures(answer: Answer, found: Found) -> str:
    held = f"; above that {found.held_by.upper()} is missed first" if found.held_by else ""
    return (
        f"{found.rate:.3g} req/s in all, {found.per_worker:.3g} per worker, {found.attainment:.0%} in time "
        f"(simulated, seed {answer.question.seed}){held}"
    )


def _why(answer: Answer) -> str:
    shared, split = answer.best(split=False), answer.best(split=True)
    if split is None or not split.rate:
        if answer.question.workers < 2 * min(kind.width for kind in answer.question.latency.kinds):
            return "a split needs at least one worker for prefill and one for decode"
        return "no split meets the limits: what a hand-off or a single worker takes is too long for them"
    if shared is None or not shared.rate:
        return "no colocated placement meets the limits: prompts beside decoders hold them up too long, or wait too long for them"
    ratio = split.rate / shared.rate
    held_shared = (
        f" ({shared.placement.name}: {shared.held_by.upper()} is missed first)" if shared.held_by else f" ({shared.placement.name})"
    )
    if ratio > 1 + EVEN:
        return (
            f"splitting gives {ratio:.2f} times the best colocated rate{held_shared}: "
            + ("prompts no longer hold up decoding, " if shared.held_by in ("tpot", "tbt") else "prompts no longer wait for decoding, ")
            + "and each side is sized for its own limit"
        )
    if ratio < 1 - EVEN:
        held = f"{split.placement.name}: {split.held_by.upper() or 'a limit'} is missed first"
        return (
            f"splitting loses here: {ratio:.2f} of the colocated rate ({held}). Neither side can lend its idle time to the "
            "other, and that costs more than the interference that it saves"
        )
    return f"splitting changes nothing here ({ratio:.2f} of the colocated rate): take the simpler one, colocated{held_shared}"


def _notes(answer: Answer, best: Found) -> list[str]:
    lines = []
    idle = answer.question.workers - best.placement.workers
    if idle:
        lines.append(f"note          {idle} of {answer.question.workers} workers would not help: no placement found serves more with them")
    thrifty = max(answer.found, key=lambda one: one.per_worker)
    if thrifty.per_worker > best.per_worker * (1 + THRIFTY):
        less = f"{thrifty.rate:.3g} req/s with {thrifty.placement.workers} workers, {thrifty.per_worker:.3g} for each"
        lines.append(f"note          {thrifty.placement.name} serves {less}: better if the others have something else to do")
    return lines


def _runners_up(answer: Answer, most: int) -> list[Found]:
    """The next best, no two alike: of splits, one for each pair of kinds and each way to lean."""
    best = answer.found[0]
    chosen: list[Found] = []
    seen = {_alike(best.placement)}
    for one in answer.found[1:]:
        if one.rate > 0 and (one.promised or _alike(one.placement) not in seen):
            seen.add(_alike(one.placement))
            chosen.append(one)
    return chosen[:most]


def _alike(placement: Placement) -> tuple[object, ...]:
    whole = placement.workers
    kinds = (placement.shared_kind, placement.prefill_kind, placement.decode_kind)
    names = tuple(kind.name if kind else "" for kind in kinds)
    return (*names, placement.chunk_tokens, round(16 * placement.prefill / whole), round(16 * placement.decode / whole))


def _row(found: Found, best: Found) -> str:
    known = "the scheduler itself" if found.promised else "the fast model"
    return f"{found.placement.name:60}{found.rate:8.3g}{found.per_worker:9.3g}{found.rate / best.rate:9.2f}  {known}"


def as_json(answer: Answer) -> dict[str, object]:
    q = answer.question
    idle = answer.idle.typical()
    return {
        "trace": {"name": q.trace.name, "requests": len(q.trace.jobs), "recorded_rate": q.trace.rate, "spread": q.trace.spread},
        "arrivals": "trace" if q.trace.timed and not q.poisson else "poisson",
        "slo": {name: limit for name, limit in answer.slo.limits() if limit is not None},
        "target": q.target,
        "workers": q.workers,
        "seed": q.seed,
        "model": q.latency.model,
        "source": q.latency.source,
        "idle": dict(idle.limits()),
        "impossible": answer.impossible or None,
        "recommended": _found_json(answer.found[0]) if answer.found and answer.found[0].rate else None,
        "why": "" if answer.impossible or not answer.found else _why(answer),
        "found": [_found_json(one) for one in answer.found if one.rate > 0],
    }


def _found_json(found: Found) -> dict[str, object]:
    place = found.placement
    names = {
        name: kind.name
        for name, kind in (("shared", place.shared_kind), ("prefill", place.prefill_kind), ("decode", place.decode_kind))
        if kind
    }
    return {
        "name": place.name,
        "shared": place.shared,
        "prefill": place.prefill,
        "decode": place.decode,
        "kinds": names,
        "chunk_tokens": place.chunk_tokens,
        "workers": place.workers,
        "rate": round(found.rate, 6),
        "rate_per_worker": round(found.per_worker, 6),
        "attainment": round(found.attainment, 4) if found.promised else None,
        "promised": found.promised,
        "held_by": found.held_by or None,
    }
