"""The question asked of all parts at once: model, formats, engine, pools, promise. What `kvseal size` and the library call.

Owns the order of things and the typed result; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvseal.core.config import KV_DTYPES
from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import KVFormat, parse_format
from kvseal.plan.engines import kvseal, llamacpp, sglang, vllm
from kvseal.plan.engines.base import EnginePlan, Pool, Settings, parse_version
from kvseal.plan.footprint import Footprint, Parallel, footprint, resolve_format
from kvseal.plan.promise import Limit, PoolClaim, PromiseResult, judge
from kvseal.plan.shape import ModelShape
from kvseal.plan.units import gib

ENGINES: dict[str, Callable[[ModelShape, Settings], EnginePlan]] = {
    "vllm": vllm.plan,
    "sglang": sglang.plan,
    "llama.cpp": llamacpp.plan,
    "kvseal": kvseal.plan,
}
DEFAULT_VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23", "llama.cpp": "2026", "kvseal": "0.1.0"}
SIDE_BY_SIDE = ("bf16", "fp8", "int8", "int4")
FALLBACK_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question in full. `settings.kv_format` is resolved from `kv_dtype` by `answer`."""

    kv_dtype: str = "auto"
    engine: str | None = None
    engine_version: str | None = None
    context_tokens: int | None = None
    users: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    promise_tokens: int | None = None
    claims: tuple[PoolClaim, ...] = ()
    pool_bytes: tuple[tuple[str, int], ...] = ()
    """Pools given in bytes per rank, by name (prefill, decode)."""
    model_limit_tokens: int | None = None
    """The model's limit after rope scaling or an override; None: what its config says."""
    server_limit_tokens: int | None = None
    """The context that a running server admits, from its log or metrics."""
    settings: Settings = field(default_factory=lambda: Settings(kv_format=KVFormat("bf16")))
    """Everything else the engine may be told; its engine, version, context, users, parallel and format are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer. Bytes are those of one rank unless a name says `total`."""

    shape: ModelShape
    kv_format: KVFormat
    kv_format_source: str
    context_tokens: int
    context_source: str
    users: int
    parallel: Parallel
    main: Footprint
    formats: tuple[tuple[str, Footprint], ...]
    engine: EnginePlan | None
    promise: PromiseResult | None

    @property
    def sequence_bytes(self) -> int:
        """One sequence of the context, engine left aside."""
        return self.main.sequence_bytes(self.context_tokens)

    @property
    def all_users_bytes(self) -> int:
        return self.users * self.sequence_bytes

    @property
    def users_fit(self) -> bool | None:
        """Whether all users' full-length requests are in one replica's pool at once; None without a pool."""
        plan = self.engine
        if plan is None or plan.pool is None:
            return None
        if plan.engine == "llama.cpp":
            return plan.starts
        slots = [count for name, count, _ in plan.pool.sub_pools if name == "state slots"]
        return self.users <= plan.pool.concurrency and all(self.users <= count for count in slots)


def answer(shape: ModelShape, ask: Ask) -> Report:
    """Sizes a model. Raises ConfigError for a split, a format or an option that cannot be."""
    kv_format, source = resolve_format(shape, ask.kv_dtype)
    drafts = ask.settings.drafts
    context, context_source = _context(shape, ask)
    engine_name = ask.engine or ("vllm" if _needs_engine(ask) else None)
    settings = _settings(ask, engine_name or "vllm", kv_format, context)
    shown = _shown_format(engine_name, shape, kv_format)
    main = footprint(shape, shown, ask.parallel, drafts=drafts)
    if main.unavailable:
        raise ConfigError(f"--kv-dtype {kv_format.name}: {main.unavailable}")
    names = KV_DTYPES if engine_name == "kvseal" else SIDE_BY_SIDE
    formats = tuple((name, footprint(shape, _side(name, shape, engine_name), ask.parallel, drafts=drafts)) for name in names)
    plan = ENGINES[engine_name](shape, settings) if engine_name else None
    promise = _promise(shape, ask, ask.promise_tokens, plan, main, settings) if ask.promise_tokens is not None else None
    plan = _beyond_the_model(_without_room(plan), limit_of(shape, ask), context)
    return Report(
        shape=shape,
        kv_format=shown,
        kv_format_source=source,
        context_tokens=context,
        context_source=context_source,
        users=ask.users,
        parallel=ask.parallel,
        main=main,
        formats=formats,
        engine=plan,
        promise=promise,
    )


def _needs_engine(ask: Ask) -> bool:
    settings = ask.settings
    return any(value is not None for value in (settings.gpu, settings.gpu_memory_bytes, settings.kv_bytes, settings.pool_tokens)) or bool(
        ask.pool_bytes
    )


def _context(shape: ModelShape, ask: Ask) -> tuple[int, str]:
    if ask.context_tokens is not None:
        return ask.context_tokens, "--context"
    if ask.promise_tokens is not None:
        return ask.promise_tokens, "--promise"
    if ask.model_limit_tokens is not None:
        return ask.model_limit_tokens, "--model-limit"
    if shape.max_context_tokens is not None:
        return shape.max_context_tokens, "the model's own limit"
    return FALLBACK_CONTEXT_TOKENS, "no limit in the config; give --context"


def _settings(ask: Ask, engine: str, kv_format: KVFormat, context: int) -> Settings:
    text = ask.engine_version or DEFAULT_VERSIONS[engine]
    return replace(
        ask.settings,
        engine=engine,
        version=parse_version(text),
        version_text=text,
        context_tokens=context,
        users=ask.users,
        parallel=ask.parallel,
        kv_format=kv_format,
    )


def _shown_format(engine: str | None, shape: ModelShape, kv_format: KVFormat) -> KVFormat:
    if engine == "sglang":
        return sglang.resolve_layout(shape, kv_format)
    if engine == "llama.cpp":
        return llamacpp.resolve_layout(shape, kv_format)
    if engine == "kvseal":
        return kvseal.resolve_format(kv_format)
    return vllm.resolve_layout(shape, kv_format)


def _side(name: str, shape: ModelShape, engine: str | None) -> KVFormat:
    """The side-by-side columns: what the engine makes of the plain name."""
    kv_format = parse_format(name)
    if engine == "llama.cpp":
        return {"fp8": KVFormat("q8_0"), "int8": KVFormat("q8_0"), "int4": KVFormat("q4_0"), "bf16": KVFormat("fp16")}[name]
    return vllm.resolve_layout(shape, kv_format)


def _promise(shape: ModelShape, ask: Ask, promised: int, plan: EnginePlan | None, main: Footprint, settings: Settings) -> PromiseResult:
    claims = list(ask.claims)
    for name, size in ask.pool_bytes:
        claims.append(_claim_of_bytes(shape, settings, main, name, size))
    if plan is not None and plan.pool is not None and not claims:
        claims.append(_claim_of_plan(plan))
    if not claims:
        raise ConfigError("--promise needs a pool to hold it: give --prefill-pool, --decode-pool, --kv-gib, --gpu, --log or --metrics")

    def bytes_of(tokens: int) -> int:
        if plan is not None and plan.engine == "vllm":
            return vllm.plan(
                shape, replace(settings, context_tokens=max(tokens, 1), kv_bytes=None, pool_tokens=None, gpu=None, gpu_memory_bytes=None)
            ).request_bytes
        return main.sequence_bytes(tokens)

    warning = plan.outcome if plan is not None and plan.starts is False else ""
    return judge(promised, claims, bytes_of, warning, limit_of(shape, ask))


_BEYOND = {
    "vllm": "refuses to start with a context above the model's own limit of {limit:,} unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
    "sglang": "refuses to start with a context above the model's own limit of {limit:,} unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
    "llama.cpp": "starts with a warning: dangerous, the model was trained for {limit:,} tokens only",
    "kvseal": "never advertises more than the model's own limit of {limit:,}",
}


def _without_room(plan: EnginePlan | None) -> EnginePlan | None:
    """Weights that do not fit are the reason, not the pool of nothing that they leave."""
    if plan is None or plan.budget is None or plan.pool is None or plan.pool.available_bytes or plan.budget.weights < plan.budget.usable:
        return plan
    text = f"does not start: weights of {gib(plan.budget.weights)} GiB per GPU do not fit in {gib(plan.budget.usable)} GiB"
    return replace(plan, starts=False, outcome=f"{text}; say --weights-dtype if they are served in fewer bits")


def _beyond_the_model(plan: EnginePlan | None, limit: Limit | None, context: int) -> EnginePlan | None:
    """The pool may hold a context that the engine refuses for the model's sake."""
    if plan is None or limit is None or context <= limit.tokens:
        return plan
    return replace(plan, outcome=f"{_BEYOND[plan.engine].format(limit=limit.tokens)}; as for the pool alone: {plan.outcome}")


def limit_of(shape: ModelShape | None, ask: Ask) -> Limit | None:
    """A running server knows best what it admits; else the model's stated limit. A class default is nobody's word and decides nothing."""
    if ask.server_limit_tokens is not None:
        return Limit(
            tokens=ask.server_limit_tokens, source="the server's own context", remedy="start it with a longer context to use the whole pool"
        )
    if ask.model_limit_tokens is not None:
        return Limit(tokens=ask.model_limit_tokens, source="the model's own limit", remedy="as given with --model-limit")
    if shape is None or shape.max_context_tokens is None or not shape.context_stated:
        return None
    return Limit(
        tokens=shape.max_context_tokens,
        source="the model's own limit",
        remedy="with rope scaling or an override, say --model-limit",
    )


def _claim_of_plan(plan: EnginePlan) -> PoolClaim:
    return PoolClaim(
        name="pool",
        tokens=_longest(plan, plan.pool) or 0,
        source=f"{plan.engine} {plan.version}",
        low_tokens=_longest(plan, plan.pool_low),
        high_tokens=_longest(plan, plan.pool_high),
    )


def _longest(plan: EnginePlan, pool: Pool | None) -> int | None:
    """SGLang's pool is compared by its tokens, as its operators do; the others by the longest request they admit."""
    if pool is None:
        return None
    return pool.tokens if plan.engine == "sglang" else pool.largest_context_tokens


def _claim_of_bytes(shape: ModelShape, settings: Settings, main: Footprint, name: str, size: int) -> PoolClaim:
    """A pool in bytes becomes the longest request that the engine could hold in it."""
    plan = ENGINES[settings.engine](shape, replace(settings, kv_bytes=size, pool_tokens=None))
    claim = _claim_of_plan(plan)
    return replace(claim, name=name, source=f"{size / 2**30:.2f} GiB per GPU, as {plan.engine} {plan.version} allocates it")
