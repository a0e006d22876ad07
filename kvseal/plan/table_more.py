"""Text for logs and for several models side by side. Owns wording; computes nothing that is not in the report."""

from __future__ import annotations

from kvseal.plan.evidence import Comparison
from kvseal.plan.logs import Evidence
from kvseal.plan.planner import Report
from kvseal.plan.table import Row, columns
from kvseal.plan.units import gib, human_bytes


def render_evidence(evidence: Evidence) -> str:
    """What the log states, one line each."""
    rows: list[Row] = [["engine", f"{evidence.engine or 'not named'} {evidence.version or ''}".strip()]]

    def add(label: str, value: int | float | str | None, unit: str = "") -> None:
        if value is not None:
            rows.append([label, f"{value:,}{unit}" if not isinstance(value, str) else value])

    add("model", evidence.model)
    add("pool", evidence.pool_tokens, " tokens")
    add("blocks", evidence.blocks)
    add("tokens per block", evidence.block_tokens)
    for label, size in (
        ("pool memory", evidence.pool_bytes), ("state memory", evidence.state_bytes), ("weights", evidence.weights_bytes),
        ("activation peak", evidence.activation_bytes), ("non-torch", evidence.non_torch_bytes),
        ("needed for one request", evidence.needed_bytes),
    ):  # fmt: skip
        add(label, None if size is None else f"{gib(size)} GiB")
    add("sliding pool", evidence.sliding_tokens, " tokens")
    add("state slots", evidence.state_slots)
    add("context", evidence.context_tokens, " tokens")
    add("full-length requests", evidence.concurrency)
    add("estimated longest", evidence.estimated_max_tokens, " tokens")
    add("tensor parallel", evidence.tp)
    add("KV dtype", evidence.kv_dtype)
    head = "the engine REFUSED to start\n" if evidence.refused else ""
    return f"the log states:\n{head}" + "\n".join("  " + line for line in columns(rows)) + "\n"


def render_comparison(comparison: Comparison) -> str:
    word = {True: "AGREES", False: "DIFFERS", None: "CANNOT BE COMPARED"}[comparison.agrees]
    logged = "-" if comparison.logged_tokens is None else f"{comparison.logged_tokens:,}"
    computed = "-" if comparison.computed_tokens is None else f"{comparison.computed_tokens:,}"
    lines = [f"log against formula: {word} (log {logged} tokens, formula {computed})"]
    return "\n".join(lines + [f"  {text}" for text in comparison.explanations]) + "\n"


def render_side_by_side(reports: list[Report]) -> str:
    """One row per model."""
    first = reports[0]
    head = ["model", "family", "growing/token", "to window/token", "per sequence", "context", "1 request", f"{first.users} users"]
    rows: list[Row] = [head + (["engine blocks/request", "pool tokens", "full-length requests"] if first.engine else [])]
    for report in reports:
        sized = report.main
        row = [
            report.shape.name,
            report.shape.family,
            human_bytes(sized.growing_per_token) if sized.growing_per_token else "-",
            human_bytes(sized.windowed_per_token) if sized.windowed_per_token else "-",
            human_bytes(sized.constant_per_sequence) if sized.constant_per_sequence else "-",
            f"{report.context_tokens:,}",
            f"{gib(report.sequence_bytes)} GiB",
            f"{gib(report.all_users_bytes)} GiB",
        ]
        if report.engine is not None:
            pool = report.engine.pool
            row += [
                f"{report.engine.blocks_per_request:,}",
                f"{pool.tokens:,}" if pool else "-",
                f"{pool.concurrency:.2f}" if pool else "-",
            ]
        rows.append(row)
    return "\n".join(columns(rows, set(range(2, len(rows[0]))))) + "\n"
