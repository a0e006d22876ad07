"""A report as text that a person reads at a glance. Owns columns and wording; computes nothing that is not in the report."""

from __future__ import annotations

from kvseal.plan.classes import family_source
from kvseal.plan.engines.base import EnginePlan, Pool
from kvseal.plan.footprint import Footprint, GroupBytes
from kvseal.plan.planner import Report
from kvseal.plan.promise import PoolVerdict, PromiseResult
from kvseal.plan.shape import Attention, Compressed, Index, Latent
from kvseal.plan.units import gib, human_bytes

Row = list[str]


def columns(rows: list[Row], right: set[int] | None = None) -> list[str]:
    """Aligned columns, two spaces apart; the columns named in `right` are aligned right."""
    right = right or set()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def render(report: Report) -> str:
    """The whole page."""
    parts = [_head(report), _groups(report), _totals(report)]
    if report.engine is not None:
        parts.append(_engine(report.engine, report))
    if report.promise is not None:
        parts.append(render_promise(report.promise))
    parts.append(_small_print(report))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Report) -> str:
    shape, parallel = report.shape, report.parallel
    owners = sum(1 for layer in shape.layers if layer)
    layers = f"{len(shape.layers)} layers" + (f", {owners} of them with a cache" if owners != len(shape.layers) else "")
    limit = f"{shape.max_context_tokens:,} tokens" if shape.max_context_tokens else "not in the config"
    split = f"TP {parallel.tp}" + "".join(
        f", {name.upper()} {value}" for name, value in (("pp", parallel.pp), ("dp", parallel.dp), ("dcp", parallel.dcp)) if value > 1
    )
    return (
        f"{shape.name}  ({shape.architecture or shape.model_type}, family {shape.family})\n"
        f"{layers}; {shape.query_heads} query heads; context limit {limit}; KV {report.kv_format.name} ({report.kv_format_source})\n"
        f"bytes below are those of one GPU at {split}" + (", all pipeline stages together" if parallel.pp > 1 else "")
    )


def _groups(report: Report) -> str:
    rows: list[Row] = [["group", "layers", "KV heads", "K", "V", "window", "growing B/token", "to window B/token", "B/sequence"]]
    rows += [_group_row(group) for group in report.main.groups]
    total = report.main
    if len(total.groups) > 1:
        rows.append(
            [
                "total",
                "",
                "",
                "",
                "",
                "",
                _number(total.growing_per_token),
                _number(total.windowed_per_token),
                _number(total.constant_per_sequence),
            ]
        )
    return "\n".join(columns(rows, {1, 2, 3, 4, 5, 6, 7, 8}))


def _number(value: int) -> str:
    return f"{value:,}" if value else "-"


def _group_row(group: GroupBytes) -> Row:
    cache, layers = group.group.cache, f"{group.group.layers}"
    grow = _number(group.growing_per_token)
    if group.growing_block_bytes:
        grow = f"{group.growing_block_bytes:,} per {group.growing_block_tokens}"
    end = [grow, _number(group.windowed_per_token), _number(group.constant_per_sequence)]
    window = f"{group.window_tokens:,}" if group.window_tokens else "-"
    if isinstance(cache, Attention):
        if group.per_encoder_token:
            end[0] = f"{group.per_encoder_token:,} per image token"
        return [str(cache.kind), layers, f"{cache.kv_heads}", f"{cache.k_dim}", f"{cache.v_dim}", window, *end]
    if isinstance(cache, Latent):
        return ["mla", layers, "none", f"{cache.latent_dim}+{cache.rope_dim}", "-", window, *end]
    if isinstance(cache, Index):
        return [str(cache.kind), layers, "none", f"{cache.index_dim}", "-", "-", *end]
    if isinstance(cache, Compressed):
        name = f"dsv4 ratio {cache.ratio}" if cache.ratio > 1 else "dsv4 sliding"
        return [name, layers, "1", f"{cache.head_dim}", "-", window, *end]
    return [str(cache.kind), layers, f"{cache.heads or '-'}", "-", "-", "-", *end]


def _totals(report: Report) -> str:
    context, users = report.context_tokens, report.users
    rows: list[Row] = [["KV dtype", "growing/token", "to window/token", "per sequence", f"1 x {context:,}", f"{users} users"]]
    for name, sized in report.formats:
        rows.append(_format_row(name, sized, context, users))
    if report.kv_format.name not in {name for name, _ in report.formats} | {"fp8_ds_mla", "fp16", "q8_0", "q4_0"}:
        rows.append(_format_row(report.kv_format.name, report.main, context, users))
    lines = columns(rows, {1, 2, 3, 4, 5})
    return f"for {context:,} tokens ({report.context_source}), bytes the model needs before any engine rounds them:\n" + "\n".join(lines)


def _format_row(name: str, sized: Footprint, context: int, users: int) -> Row:
    label = name if sized.kv_format.name == name else f"{name} ({sized.kv_format.name})"
    if sized.unavailable:
        return [label, "not available", "", "", "", ""]
    one = sized.sequence_bytes(context)
    return [
        label,
        human_bytes(sized.growing_per_token) if sized.growing_per_token else "-",
        human_bytes(sized.windowed_per_token) if sized.windowed_per_token else "-",
        human_bytes(sized.constant_per_sequence) if sized.constant_per_sequence else "-",
        f"{gib(one)} GiB",
        f"{gib(one * users)} GiB",
    ]


def _engine(plan: EnginePlan, report: Report) -> str:
    lines = [f"{plan.engine} {plan.version}, KV {plan.kv_format}:"]
    rows: list[Row] = [["  block table", "layers", "block tokens", "page bytes", "blocks/request"]]
    rows += [
        [f"  {group.kind}", f"{group.layers or '-'}", f"{group.block_tokens:,}", f"{group.page_bytes:,}", f"{group.blocks_per_request:,}"]
        for group in plan.groups
    ]
    if plan.groups:
        lines += columns(rows, {1, 2, 3, 4})
    lines.append(
        f"  one request of {report.context_tokens:,} tokens takes {gib(plan.request_bytes)} GiB ({plan.blocks_per_request:,} blocks)"
    )
    if plan.budget is not None:
        budget = plan.budget
        lines.append(
            f"  memory: {gib(budget.usable)} usable of {gib(budget.gpu_total)} GiB, less weights {gib(budget.weights)}, activation "
            f"{gib(budget.activation)}, other {gib(budget.non_torch)}, graphs {gib(budget.graphs)}"
        )
        lines.append(f"  KV pool {gib(budget.kv)} GiB, honestly between {gib(budget.kv_low)} and {gib(budget.kv_high)} (estimates below)")
    if plan.pool is not None:
        lines += _pool_lines(plan, plan.pool)
    if report.users_fit is not None and plan.pool is not None:
        need = f"{report.users:,} x {plan.blocks_per_request:,} = {report.users * plan.blocks_per_request:,} blocks of {plan.pool.blocks:,}"
        word = "fit at once" if report.users_fit else "do NOT fit at once: the rest wait, or are preempted and recomputed"
        lines.append(f"  load: {report.users:,} requests of {report.context_tokens:,} tokens {word} ({need})")
    lines.append(f"  outcome: {plan.outcome}")
    return "\n".join(lines)


def _pool_lines(plan: EnginePlan, pool: Pool) -> list[str]:
    def spread(name: str) -> str:
        if plan.pool_low is None or plan.pool_high is None:
            return ""
        low, high = _figure(plan.pool_low, name), _figure(plan.pool_high, name)
        return f" ({low:,} to {high:,})"

    blocks, tokens = f"{pool.blocks:,} blocks{spread('blocks')}", f"{pool.tokens:,} tokens{spread('tokens')}"
    lines = [f"  pool: {gib(pool.available_bytes)} GiB, {blocks}, {tokens} as logged"]
    lines.append(
        f"  longest single request {pool.largest_context_tokens:,} tokens{spread('longest')}; full-length requests {pool.concurrency:.2f}"
    )
    lines += [f"  sub-pool {name}: {count:,} ({gib(size)} GiB)" for name, count, size in pool.sub_pools]
    lines += [f"  {text}" for text in pool.detail]
    if plan.log_line and plan.starts is not False:
        lines.append(f"  expect in the log: {plan.log_line}")
    return lines


def _figure(pool: Pool, name: str) -> int:
    """One of the three figures that have an interval."""
    return {"blocks": pool.blocks, "tokens": pool.tokens, "longest": pool.largest_context_tokens}[name]


def render_promise(result: PromiseResult) -> str:
    """The verdict, largest first."""
    word = "HELD" if result.held else "BROKEN"
    lines = [f"PROMISE {word}: {result.promised_tokens:,} tokens promised; the largest true context is {result.largest_true_context:,}"]
    lines += [_verdict_line(verdict, result.promised_tokens) for verdict in result.verdicts]
    if result.limit is not None and result.beyond_limit:
        lines.append(
            f"  {result.limit.source} is {result.limit.tokens:,} tokens: longer requests are refused, whatever the pool holds "
            f"({result.limit.remedy})"
        )
    return "\n".join(lines)


def _verdict_line(verdict: PoolVerdict, promised: int) -> str:
    claim = verdict.claim
    text = f"  {claim.name}: holds {claim.tokens:,} tokens ({claim.source})"
    if not verdict.held:
        missing = f", {gib(verdict.missing_bytes)} GiB per GPU" if verdict.missing_bytes is not None else ""
        text += f" = {100 * claim.tokens / promised:.1f} % of the promise; missing {verdict.missing_tokens:,} tokens{missing}"
    if not verdict.certain:
        bounds = [bound for bound in (claim.low_tokens, claim.high_tokens) if bound is not None]
        text += f"; NOT CERTAIN: the estimate spans {min(bounds):,} to {max(bounds):,}"
    if verdict.warning:
        text += f"\n    {verdict.warning}"
    return text


def _small_print(report: Report) -> str:
    shape = report.shape
    lines = [f"rule: {text}" for text in shape.rules] + [f"source: {family_source(shape.family)}"]
    if report.engine is not None:
        lines.append(f"engine rule: {report.engine.rule}")
        lines += [f"note: {text}" for text in report.engine.notes]
        if report.engine.budget is not None:
            lines += [f"estimate: {text}" for text in report.engine.budget.how]
    lines += [f"note: {text}" for text in shape.notes]
    if shape.draft_layers:
        lines.append(f"note: {len(shape.draft_layers)} draft (MTP) layers exist; counted only with --speculative-tokens")
    if shape.defaults:
        lines.append("class defaults used (absent from the file): " + "; ".join(shape.defaults))
    return "\n".join(lines)
