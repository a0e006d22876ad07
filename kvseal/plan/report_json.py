"""A report as plain JSON values. Owns the names of the fields; bytes are integers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvseal.plan.classes import family_source
from kvseal.plan.footprint import Footprint
from kvseal.plan.planner import Report
from kvseal.plan.promise import PromiseResult
from kvseal.plan.shape import ModelShape, State

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def plain(value: DataclassInstance) -> dict[str, Any]:
    """A dataclass as a dictionary, all the way down; enums are strings already."""
    return asdict(value)


def footprint_json(sized: Footprint, context_tokens: int, users: int) -> dict[str, Any]:
    if sized.unavailable:
        return {"layout": sized.kv_format.name, "unavailable": sized.unavailable}
    one = sized.sequence_bytes(context_tokens)
    return {
        "layout": sized.kv_format.name,
        "growing_bytes_per_token": sized.growing_per_token,
        "windowed_bytes_per_token": sized.windowed_per_token,
        "windows": [
            {"bytes_per_token": group.windowed_per_token, "window": group.window_tokens}
            for group in sized.groups
            if group.windowed_per_token
        ],
        "state_bytes_per_sequence": sized.constant_per_sequence,
        "sequence_bytes": one,
        "all_users_bytes": one * users,
    }


def model_json(shape: ModelShape) -> dict[str, Any]:
    groups = []
    for group in shape.groups:
        entry = plain(group.cache) | {"layers": group.layers}
        if isinstance(group.cache, State):
            entry |= {"conv_elements": group.cache.conv_elements, "recurrent_elements": group.cache.recurrent_elements}
        groups.append(entry)
    return {
        "name": shape.name,
        "architecture": shape.architecture,
        "model_type": shape.model_type,
        "family": shape.family,
        "layers": len(shape.layers),
        "draft_layers": len(shape.draft_layers),
        "query_heads": shape.query_heads,
        "max_context_tokens": shape.max_context_tokens,
        "model_dtype": shape.model_dtype,
        "layer_groups": groups,
        "rules": list(shape.rules),
        "source": family_source(shape.family),
        "class_defaults_used": list(shape.defaults),
        "notes": list(shape.notes),
    }


def promise_json(result: PromiseResult) -> dict[str, Any]:
    return {
        "promised_tokens": result.promised_tokens,
        "held": result.held,
        "verdict": "HELD" if result.held else "BROKEN",
        "largest_true_context_tokens": result.largest_true_context,
        "limit_tokens": None if result.limit is None else result.limit.tokens,
        "limit_source": None if result.limit is None else result.limit.source,
        "beyond_limit": result.beyond_limit,
        "pools": [
            plain(verdict.claim)
            | {
                "held": verdict.held,
                "certain": verdict.certain,
                "missing_tokens": verdict.missing_tokens,
                "missing_bytes_per_gpu": verdict.missing_bytes,
                "missing_gib_per_gpu": None if verdict.missing_bytes is None else round(verdict.missing_bytes / 2**30, 3),
                "warning": verdict.warning,
            }
            for verdict in result.verdicts
        ],
    }


def report_json(report: Report) -> dict[str, Any]:
    """Everything `--json` prints for one model."""
    context, users = report.context_tokens, report.users
    return {
        "model": model_json(report.shape),
        "parallel": plain(report.parallel),
        "kv_dtype": report.kv_format.name,
        "kv_dtype_source": report.kv_format_source,
        "context_tokens": context,
        "context_source": report.context_source,
        "users": users,
        "per_gpu": footprint_json(report.main, context, users),
        "by_kv_dtype": {name: footprint_json(sized, context, users) for name, sized in report.formats},
        "engine": None if report.engine is None else plain(report.engine),
        "users_fit": report.users_fit,
        "promise": None if report.promise is None else promise_json(report.promise),
    }
