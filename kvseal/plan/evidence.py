"""A log (or metrics page) against the promise and against the formula, with the difference explained in words.

Owns the explanations: rank minimum, rounding, reporting rule by version, groups, padding, sub-pools, draft layers. Reads nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvseal.plan.engines.base import EnginePlan, Settings, parse_version
from kvseal.plan.logs import Evidence
from kvseal.plan.planner import DEFAULT_VERSIONS, Ask, Report, answer
from kvseal.plan.promise import PoolClaim
from kvseal.plan.shape import ModelShape
from kvseal.plan.units import GIB, MIB, cdiv, gib

CLOSE = 0.005
"""Logs round GiB to two digits: half a per cent of tokens is agreement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the log says, what the formula says, and why they differ."""

    evidence: Evidence
    logged_tokens: int | None
    computed_tokens: int | None
    agrees: bool | None
    explanations: tuple[str, ...]


def ask_with(ask: Ask, evidence: Evidence) -> Ask:
    """The question completed by what the log states; what the user said wins."""
    parallel = ask.parallel
    if parallel.tp == 1 and evidence.tp:
        parallel = replace(parallel, tp=evidence.tp)
    if parallel.pp == 1 and evidence.pp:
        parallel = replace(parallel, pp=evidence.pp)
    kv_dtype = ask.kv_dtype
    if kv_dtype == "auto" and evidence.kv_dtype not in (None, "auto"):
        kv_dtype = str(evidence.kv_dtype)
    engine = ask.engine or (evidence.engine if evidence.engine in ("vllm", "sglang", "llama.cpp", "kvseal") else None)
    return replace(
        ask,
        engine=engine,
        engine_version=ask.engine_version or (evidence.version if engine == evidence.engine or evidence.engine is None else None),
        kv_dtype=kv_dtype,
        context_tokens=ask.context_tokens or evidence.context_tokens or evidence.concurrency_tokens,
        server_limit_tokens=ask.server_limit_tokens or evidence.context_tokens or evidence.concurrency_tokens,
        users=evidence.sequences if evidence.sequences and ask.users == 1 and engine == "llama.cpp" else ask.users,
        parallel=parallel,
        settings=_settings(ask.settings, evidence, engine),
    )


def _settings(settings: Settings, evidence: Evidence, engine: str | None) -> Settings:
    foreign = evidence.engine == "tensorrt-llm"  # Its allocation is not modelled: tokens and bytes per token are compared, blocks are not.
    known = engine != "llama.cpp" and evidence.pool_bytes is not None and not (engine == "sglang" and evidence.pool_tokens is not None)
    known = known and not foreign
    counted = engine in ("sglang", "kvseal")  # They state the pool in tokens; their GiB are rounded.
    known = known and not (engine == "kvseal" and evidence.pool_tokens is not None)
    return replace(
        settings,
        kv_bytes=settings.kv_bytes or (evidence.pool_bytes if known else None),
        pool_tokens=settings.pool_tokens or (evidence.pool_tokens if counted else None),
        memory_fraction=settings.memory_fraction or evidence.memory_fraction,
        weights_bytes=settings.weights_bytes or evidence.weights_bytes,
        activation_bytes=settings.activation_bytes or evidence.activation_bytes,
        non_torch_bytes=settings.non_torch_bytes or evidence.non_torch_bytes,
        gpu_memory_bytes=settings.gpu_memory_bytes or evidence.gpu_bytes,
        max_batched_tokens=settings.max_batched_tokens or evidence.max_batched_tokens,
        max_sequences=settings.max_sequences or evidence.max_sequences,
        block_tokens=settings.block_tokens or (evidence.block_tokens if counted else None),
        prefix_caching=settings.prefix_caching if evidence.prefix_caching is None else evidence.prefix_caching,
    )


def claim_of(evidence: Evidence) -> PoolClaim | None:
    """The pool as the log states it, for the promise. An engine that refused holds what it says it could."""
    if evidence.estimated_max_tokens is not None:
        return PoolClaim(name="pool", tokens=evidence.estimated_max_tokens, source=f"{evidence.engine or 'engine'} log, start refused")
    tokens = evidence.tokens
    if tokens is None:
        return None
    return PoolClaim(name="pool", tokens=tokens, source=f"{evidence.engine or 'engine'} log")


def compare(shape: ModelShape, ask: Ask, evidence: Evidence) -> tuple[Report, Comparison]:
    """The report for the completed question, and the comparison with the log."""
    full = _with_blocks(shape, ask_with(ask, evidence), evidence)
    claim = claim_of(evidence)
    report = answer(shape, replace(full, promise_tokens=None))
    plan, longest = report.engine, None
    if claim is not None and plan is not None and plan.pool is not None and _blocks_count(plan, claim, evidence):
        longest = plan.pool.largest_context_tokens
        if longest != claim.tokens:
            claim = replace(
                claim, tokens=longest, source=f"{claim.source} says {claim.tokens:,}; its blocks hold one request of {longest:,}"
            )
    if ask.promise_tokens is not None:
        given = (claim,) if claim is not None and not ask.claims and not ask.pool_bytes else ()
        report = answer(shape, replace(full, claims=ask.claims + given))
    return _sourced(report, ask, evidence), _explain(report, evidence, longest)


def _sourced(report: Report, ask: Ask, evidence: Evidence) -> Report:
    """What the log completed is not said to have come from an option."""
    if ask.kv_dtype == "auto" and evidence.kv_dtype not in (None, "auto"):
        report = replace(report, kv_format_source="as the running server has it")
    if ask.context_tokens is None and (evidence.context_tokens or evidence.concurrency_tokens):
        report = replace(report, context_source="the running server's context")
    return report


def _blocks_count(plan: EnginePlan, claim: PoolClaim, evidence: Evidence) -> bool:
    """Whether vLLM's blocks, rather than the logged tokens, say how long one request can be. With one group the logged figure is physical:
    when it is far from the formula, it is the formula that has the wrong format."""
    if plan.engine != "vllm" or plan.pool is None or evidence.engine not in ("vllm", None) or evidence.estimated_max_tokens is not None:
        return False
    return len(plan.groups) > 1 or abs(plan.pool.largest_context_tokens / max(claim.tokens, 1) - 1) <= CLOSE


def _with_blocks(shape: ModelShape, ask: Ask, evidence: Evidence) -> Ask:
    """vLLM's blocks say more than its rounded GiB; its token figure is turned back into blocks when nothing else is logged."""
    if (
        ask.engine != "vllm"
        or evidence.engine not in ("vllm", None)
        or not (evidence.blocks or evidence.tokens)
        or (ask.settings.kv_bytes and not evidence.blocks)
    ):
        return ask
    plan = answer(shape, replace(ask, promise_tokens=None)).engine
    if plan is None or not plan.bytes_per_block:
        return ask
    blocks = evidence.blocks
    if blocks is None and evidence.pool_tokens is not None:
        version = parse_version(ask.engine_version or DEFAULT_VERSIONS["vllm"])
        if version < (0, 21, 0):
            blocks = cdiv(evidence.pool_tokens, min(group.block_tokens for group in plan.groups)) * len(plan.groups)
        else:
            context = ask.context_tokens or evidence.pool_tokens
            blocks = cdiv(evidence.pool_tokens * plan.blocks_per_request, context)
    if blocks is None:
        return ask
    return replace(ask, settings=replace(ask.settings, kv_bytes=blocks * plan.bytes_per_block))


def _explain(report: Report, evidence: Evidence, longest: int | None) -> Comparison:
    logged, plan = evidence.tokens, report.engine
    computed = plan.pool.tokens if plan is not None and plan.pool is not None else None
    if evidence.estimated_max_tokens is not None and plan is not None and plan.pool is not None:
        logged, computed = evidence.estimated_max_tokens, plan.pool.largest_context_tokens
    if evidence.engine == "llama.cpp" and plan is not None:
        return _explain_llama(report, plan, evidence)
    if evidence.engine == "kvseal" and evidence.pool_bytes is not None and logged is not None and plan is not None:
        return _explain_kvseal(plan, evidence, logged, evidence.pool_bytes)
    if evidence.engine == "sglang" and evidence.pool_bytes is not None and logged is not None and plan is not None:
        return _explain_sglang(report, plan, evidence, logged, evidence.pool_bytes)
    words: list[str] = []
    if evidence.engine == "tensorrt-llm" and logged and evidence.pool_bytes:
        return _explain_per_token(report, evidence, logged, evidence.pool_bytes)
    if logged is None or computed is None:
        words.append("the log does not state the pool in a way that can be recomputed; give --kv-gib or the rest of the log")
        return Comparison(evidence=evidence, logged_tokens=logged, computed_tokens=computed, agrees=None, explanations=tuple(words))
    ratio = logged / computed if computed else 0.0
    agrees = abs(ratio - 1) <= CLOSE
    if agrees:
        words.append(f"log and formula agree ({100 * (ratio - 1):+.2f} %; the log rounds GiB to two digits)")
    else:
        words += _vllm_reasons(report, evidence, ratio)
    if longest is not None and logged is not None and longest > 1.2 * logged:
        words.append(
            f"one request can be as long as {longest:,} tokens: the logged figure is not a physical size in a model with several groups"
        )
    return Comparison(evidence=evidence, logged_tokens=logged, computed_tokens=computed, agrees=agrees, explanations=tuple(words))


def _vllm_reasons(report: Report, evidence: Evidence, ratio: float) -> list[str]:
    words = [f"the log says {100 * (ratio - 1):+.1f} % against the formula"]
    parallel = report.parallel
    if 0.75 < ratio < 1 and parallel.tp * parallel.pp > 1:
        words.append("GiB is logged by one worker, blocks are the minimum over all workers: another rank had less free memory")
    for factor, why in (
        (2.0, "the cache holds half the bytes per element (fp8) of what was assumed, or twice as many ranks share the heads"),
        (
            0.5,
            "the cache holds twice the bytes per element of what was assumed (fp8 weights do not make the cache fp8), or heads are copied",
        ),
        (float(parallel.tp), "the figure may be meant for all tensor-parallel ranks together"),
    ):
        if factor != 1 and abs(ratio / factor - 1) < 0.02:
            words.append(why)
    plan = report.engine
    if plan is not None and len(plan.groups) > 1:
        words.append("models with several groups: up to vLLM 0.20 the log divided blocks by groups, since 0.21 it is concurrency x context")
    if len(words) == 1:
        words.append("check version, tensor parallel, KV dtype, draft layers and max_num_batched_tokens: each changes bytes per block")
    return words


def _explain_sglang(report: Report, plan: EnginePlan, evidence: Evidence, logged: int, pool_bytes: int) -> Comparison:
    """SGLang states tokens and GiB of the same pool: bytes per token are compared."""
    page = max((group.block_tokens for group in plan.groups), default=1)
    per_token = plan.bytes_per_block / page if plan.groups else 0
    full = plan.groups[0].page_bytes / page if plan.groups else 0
    logged_bytes = pool_bytes / (logged + page)
    computed = int(pool_bytes / full) if full else None
    agrees = bool(full) and abs(logged_bytes / full - 1) <= CLOSE
    words = [f"log: {logged_bytes:,.0f} bytes per token; formula: {full:,.0f} (divided by {per_token:,.0f} with all sub-pools)"]
    if not agrees and full:
        words += _per_token_reasons(report, logged_bytes)
    return Comparison(evidence=evidence, logged_tokens=logged, computed_tokens=computed, agrees=agrees, explanations=tuple(words))


def _explain_kvseal(plan: EnginePlan, evidence: Evidence, logged: int, pool_bytes: int) -> Comparison:
    """KVSeal counts its pool in pages and prints their bytes rounded to a tenth, or in GiB to a hundredth: bytes of as many pages are
    compared, and the tokens are those of the pages."""
    if plan.engine != "kvseal" or not plan.groups:
        why = f"a log of KVSeal says nothing of {plan.engine}; leave --engine out"
        return Comparison(evidence=evidence, logged_tokens=logged, computed_tokens=None, agrees=None, explanations=(why,))
    page = plan.groups[0].block_tokens
    pages = evidence.blocks or logged // page
    formula, unit = pages * plan.bytes_per_block, GIB if pool_bytes >= GIB else MIB
    agrees = pages * page == logged and abs(pool_bytes - formula) <= 0.051 * unit
    words = [
        f"log: {pages:,} pages of {evidence.block_tokens or page}, {gib(pool_bytes)} GiB; formula: {gib(formula)} GiB for as many pages"
    ]
    if not agrees:
        words.append(f"the formula has pages of {page} tokens in {plan.kv_format}: check --kv-dtype, --block-size and the model")
    computed = pages * page if agrees else int(pool_bytes / plan.bytes_per_block) * page
    return Comparison(evidence=evidence, logged_tokens=logged, computed_tokens=computed, agrees=agrees, explanations=tuple(words))


def _explain_per_token(report: Report, evidence: Evidence, logged: int, pool_bytes: int) -> Comparison:
    """An engine whose allocator is not modelled: its pool in tokens and in bytes still gives bytes per token."""
    each, ours = pool_bytes / logged, report.main.growing_per_token
    agrees = bool(ours) and abs(each / ours - 1) <= CLOSE
    words = [f"log: {each:,.0f} bytes per token; formula: {ours:,}"]
    if not agrees:
        words += _per_token_reasons(report, each)
    computed = int(pool_bytes / ours) if ours else None
    return Comparison(evidence=evidence, logged_tokens=logged, computed_tokens=computed, agrees=agrees, explanations=tuple(words))


def _per_token_reasons(report: Report, logged_bytes: float) -> list[str]:
    """Other layouts and versions whose bytes per token fit the log."""
    shape, words = report.shape, []
    layers = len(shape.layers)
    if shape.is_mla:
        for row, name in ((656, "656-byte fp8 rows"), (576, "raw 576-byte fp8 rows"), (1152, "bf16 rows")):
            for count in (0, sum(g.layers for g in shape.groups if g.cache.kind.value == "dsa_indexer"), layers):
                if abs((layers * row + count * 132) / logged_bytes - 1) < 0.002:
                    words.append(f"fits {name} with an index key in {count} of {layers} layers")
    for factor, why in ((2.0, "twice the bytes: the cache is 16-bit, not 8-bit"), (0.5, "half the bytes: the cache is 8-bit, not 16-bit")):
        if abs(logged_bytes / max(report.main.growing_per_token, 1) / factor - 1) < 0.01:
            words.append(why)
    return words or ["check KV dtype, tensor parallel and draft layers: each changes bytes per token"]


def _explain_llama(report: Report, plan: EnginePlan, evidence: Evidence) -> Comparison:
    total = plan.request_bytes * report.users
    logged = (evidence.pool_bytes or 0) + (evidence.state_bytes or 0)
    agrees = None if not logged else abs(logged / total - 1) <= CLOSE
    words = [f"log: {gib(logged)} GiB; formula: {gib(total)} GiB for {report.users} sequence(s) of {report.context_tokens:,} tokens"]
    if agrees is False:
        words.append("check --kv-dtype (cache type), the number of sequences, and whether the file was converted with MLA tensors")
    return Comparison(
        evidence=evidence, logged_tokens=evidence.tokens, computed_tokens=report.context_tokens, agrees=agrees, explanations=tuple(words)
    )
