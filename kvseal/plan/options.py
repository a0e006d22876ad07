"""The options of `kvseal size`, read once and checked. Owns the parser and the way from words to an `Ask`.

Errors are one line: `OptionParser` raises ConfigError where argparse would print its usage and exit.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from kvseal.core.errors import ConfigError
from kvseal.plan.dtype import NAMES, KVFormat
from kvseal.plan.engines.base import Settings
from kvseal.plan.footprint import Parallel
from kvseal.plan.planner import DEFAULT_VERSIONS, ENGINES, Ask
from kvseal.plan.promise import PoolClaim
from kvseal.plan.units import is_tokens, parse_bytes, parse_gib, parse_tokens
from kvseal.plan.weights import WEIGHT_DTYPES

DESCRIPTION = """\
How much KV cache a model needs, what a pool holds, and whether a promised context is true.

Three numbers describe a cache, because one is not enough: bytes per token that grow for ever, bytes per token that stop at a
window, and constant bytes per sequence. Engines then allocate blocks, not tokens; with --engine you get that engine's own
figures, as its start-up log will print them."""

EXAMPLES = """\
examples:
  kvseal size config.json --context 32768 --users 8
  kvseal size Qwen/Qwen2.5-72B --gpu H100-80G --gpus 8 --engine vllm
  kvseal size glm/config.json --kv-dtype fp8 --engine sglang --tp 8 --pool-tokens 681280 --promise 1048576
  kvseal size config.json --promise 1M --prefill-pool 681,280 --decode-pool 52.7GiB
  kvseal size config.json --engine vllm --log start-up.log --promise 131072
  kvseal size a/config.json --compare b/config.json c/config.json --context 128k
  kvseal size model.gguf --engine llama.cpp --context 32768 --users 4

tokens may be written 131072, 131,072, 128k (x 1,000) or 128Ki (x 1,024); sizes 34.2GiB or 12GB (a bare number is GiB).
exit status: 0 fine or promise held, 1 promise broken, 2 the input cannot be used."""


class OptionParser(argparse.ArgumentParser):
    """Errors as exceptions, in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.replace("\n", " ") + " (see kvseal size --help)")


def build_parser() -> OptionParser:
    parser = OptionParser(
        prog="kvseal size",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="config.json, a directory, a GGUF file, or a hub id (owner/name)")
    _request_options(parser.add_argument_group("the load"))
    _engine_options(parser.add_argument_group("the engine and the hardware"))
    _memory_options(parser.add_argument_group("what you know already (replaces an estimate; per GPU)"))
    _detail_options(parser.add_argument_group("engine details"))
    _output_options(parser.add_argument_group("questions and output"))
    return parser


def _request_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--context", metavar="TOKENS", help="tokens of one request, prompt and output (default: the model's own limit)")
    group.add_argument("--users", metavar="N", default="1", help="requests of that length at once (default 1)")
    group.add_argument("--kv-dtype", "--kv-cache-dtype", metavar="NAME", default="auto", help=f"cache format: {', '.join(NAMES)}")
    group.add_argument(
        "--assume-gqa", action="store_true", help="size an unknown architecture as plain grouped-query attention; your responsibility"
    )


def _engine_options(group: argparse._ArgumentGroup) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in DEFAULT_VERSIONS.items())
    group.add_argument("--engine", choices=tuple(ENGINES), help="whose rules to apply")
    group.add_argument("--engine-version", metavar="V", help=f"rules change between versions (default: {versions})")
    group.add_argument("--gpu", metavar="NAME", help="H100-80G, A100-80G, RTX4090-24G, ...; any usual spelling")
    group.add_argument("--gpus", metavar="N", help="GPUs in all; without --tp they are all tensor parallel")
    group.add_argument("--gpu-memory-gib", metavar="GIB", help="memory of one GPU as the driver shows it, instead of --gpu")
    group.add_argument("--tp", "--tensor-parallel-size", metavar="N", help="tensor parallel")
    group.add_argument("--pp", "--pipeline-parallel-size", metavar="N", default="1", help="pipeline parallel")
    group.add_argument("--dp", "--data-parallel-size", metavar="N", default="1", help="data parallel: every replica has its own pool")
    group.add_argument("--dcp", "--decode-context-parallel-size", metavar="N", default="1", help="decode context parallel")
    group.add_argument(
        "--gpu-memory-utilization",
        "--mem-fraction",
        "--mem-fraction-static",
        metavar="F",
        dest="memory_fraction",
        help="the engine's memory fraction",
    )
    group.add_argument("--weights-dtype", choices=WEIGHT_DTYPES, metavar="NAME", help=f"weights as served: {', '.join(WEIGHT_DTYPES)}")


def _memory_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kv-gib", "--kv-bytes", "--kv-cache-memory-bytes", metavar="SIZE", dest="kv_size", help="memory of the KV pool")
    group.add_argument("--pool-tokens", metavar="TOKENS", help="the pool in tokens, as an SGLang log states it")
    group.add_argument("--weights-gib", metavar="GIB", help="loaded weights")
    group.add_argument("--activation-gib", metavar="GIB", help="activation peak of the profile run")
    group.add_argument("--non-torch-gib", metavar="GIB", help="memory outside the framework (NCCL, context)")
    group.add_argument("--graph-gib", metavar="GIB", help="CUDA graphs as estimated by vLLM 0.21 and later")


def _detail_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--block-size", "--page-size", metavar="TOKENS", help="tokens per block or page")
    group.add_argument(
        "--max-num-batched-tokens", "--chunked-prefill-size", metavar="TOKENS", dest="batched", help="largest batch of one step"
    )
    group.add_argument("--max-num-seqs", "--max-running-requests", metavar="N", dest="sequences", help="requests running at once")
    group.add_argument("--in-flight-batches", metavar="N", help="vLLM: batches scheduled and not yet settled (2 with async scheduling)")
    group.add_argument("--no-prefix-caching", action="store_true", help="vLLM: one state block per request instead of two")
    group.add_argument("--disable-hybrid-kv-cache-manager", action="store_true", help="vLLM: windows pay for the full length")
    group.add_argument("--kv-layout", choices=("LBNHC", "LBHNC", "BLHNC", "BLNHC"), help="vLLM: memory layout of the cache")
    group.add_argument("--speculative-tokens", metavar="N", default="0", help="draft tokens per step; also counts the model's draft layers")
    group.add_argument("--draft-model", metavar="MODEL", help="config of a separate draft model (EAGLE); its layers share the budget")
    group.add_argument("--swa-full-tokens-ratio", metavar="F", help="SGLang: sliding pool over full pool")
    group.add_argument("--mamba-full-memory-ratio", metavar="F", help="SGLang: state memory over token memory")
    group.add_argument("--max-total-tokens", metavar="TOKENS", help="SGLang: cap of the pool")
    group.add_argument("--enable-dp-attention", action="store_true", help="SGLang: attention is not split over the ranks")


def _output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--promise", metavar="TOKENS", help="the advertised context: HELD (exit 0) or BROKEN (exit 1)")
    group.add_argument(
        "--model-limit", metavar="TOKENS", help="longest request the model takes, when rope scaling or an override changes it"
    )
    group.add_argument("--prefill-pool", metavar="TOKENS|GIB", help="prefill pool in tokens (681,280) or per-GPU memory (34.2GiB)")
    group.add_argument("--decode-pool", metavar="TOKENS|GIB", help="decode pool, likewise")
    group.add_argument("--log", metavar="FILE", help="an engine's start-up log, or - for standard input")
    group.add_argument("--metrics", metavar="URL|FILE", help="a Prometheus endpoint or a saved page of it")
    group.add_argument("--compare", metavar="MODEL", nargs="+", help="the same question for further models, side by side")
    group.add_argument("--json", action="store_true", help="machine-readable output")
    group.add_argument("--html", metavar="FILE", help="write a self-contained page with plots")


def whole(text: str | None, flag: str, *, minimum: int = 1, maximum: int = 1 << 24) -> int | None:
    """A whole number in range, or None when the option is absent."""
    if text is None:
        return None
    digits = text.strip().replace(",", "").replace("_", "")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 15:
        raise ConfigError(f"{flag} is {text[:30]!r}; it must be a whole number of at least {minimum}")
    value = int(digits)
    if not minimum <= value <= maximum:
        raise ConfigError(f"{flag} is {value:,}; it must be between {minimum} and {maximum:,}")
    return value


def fraction(text: str | None, flag: str, *, above_one: bool = False) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{flag} is {text[:30]!r}; it must be a number like 0.9") from None
    if not 0 < value <= (1000 if above_one else 1):
        raise ConfigError(f"{flag} is {text[:30]}; it must be above 0 and at most {1000 if above_one else 1}")
    return value


def required(text: str, flag: str, *, minimum: int = 1, maximum: int = 1 << 24) -> int:
    value = whole(text, flag, minimum=minimum, maximum=maximum)
    if value is None:
        raise ConfigError(f"{flag} is empty")
    return value


def parallel_of(options: argparse.Namespace) -> Parallel:
    """`--gpus` fills in tensor parallel, or must be the product of all."""
    pp, dp, dcp = (
        required(text, flag, maximum=4096) for text, flag in ((options.pp, "--pp"), (options.dp, "--dp"), (options.dcp, "--dcp"))
    )
    gpus, tp = whole(options.gpus, "--gpus", maximum=65536), whole(options.tp, "--tp", maximum=4096)
    if tp is None:
        if gpus is not None and gpus % (pp * dp):
            raise ConfigError(f"--gpus {gpus} does not divide by --pp {pp} x --dp {dp}")
        tp = gpus // (pp * dp) if gpus is not None else 1
    elif gpus is not None and gpus % (tp * pp):
        raise ConfigError(f"--gpus {gpus} is not a multiple of --tp {tp} x --pp {pp}")
    elif gpus is not None and dp == 1:
        dp = gpus // (tp * pp)
    if options.engine == "llama.cpp":
        # It splits layers over the GPUs, never heads.
        tp, pp = 1, tp * pp
    return Parallel(tp=tp, pp=pp, dp=dp, dcp=dcp)


def _gib(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_gib(text, flag)


def _kv_size(text: str | None) -> int | None:
    """A number with a unit; a bare number is GiB when small and bytes when it could only be bytes."""
    if text is None:
        return None
    plain = text.replace(",", "").replace("_", "").strip()
    if plain.isdecimal() and len(plain) > 6:
        return parse_bytes(plain, "--kv-gib")
    return parse_gib(text, "--kv-gib")


def ask_of(options: argparse.Namespace) -> Ask:
    """The whole question. Raises ConfigError for the first option that cannot be."""
    speculative = required(options.speculative_tokens, "--speculative-tokens", minimum=0, maximum=64)
    settings = Settings(
        kv_format=KVFormat("bf16"),
        kv_bytes=_kv_size(options.kv_size),
        pool_tokens=parse_tokens(options.pool_tokens, "--pool-tokens") if options.pool_tokens else None,
        gpu=options.gpu,
        gpu_memory_bytes=_gib(options.gpu_memory_gib, "--gpu-memory-gib"),
        memory_fraction=fraction(options.memory_fraction, "--gpu-memory-utilization"),
        weights_bytes=_gib(options.weights_gib, "--weights-gib"),
        activation_bytes=_gib(options.activation_gib, "--activation-gib"),
        non_torch_bytes=_gib(options.non_torch_gib, "--non-torch-gib"),
        graph_bytes=_gib(options.graph_gib, "--graph-gib"),
        weights_dtype=options.weights_dtype,
        block_tokens=whole(options.block_size, "--block-size", maximum=65536),
        max_batched_tokens=whole(options.batched, "--max-num-batched-tokens"),
        max_sequences=whole(options.sequences, "--max-num-seqs"),
        in_flight_batches=whole(options.in_flight_batches, "--in-flight-batches", maximum=64),
        prefix_caching=not options.no_prefix_caching,
        hybrid_manager=not options.disable_hybrid_kv_cache_manager,
        layout=options.kv_layout,
        speculative_tokens=speculative,
        drafts=speculative > 0 or options.draft_model is not None,
        swa_ratio=fraction(options.swa_full_tokens_ratio, "--swa-full-tokens-ratio"),
        mamba_ratio=fraction(options.mamba_full_memory_ratio, "--mamba-full-memory-ratio", above_one=True),
        max_total_tokens=parse_tokens(options.max_total_tokens, "--max-total-tokens") if options.max_total_tokens else None,
        dp_attention=options.enable_dp_attention,
    )
    claims, sizes = _pools(options)
    return Ask(
        kv_dtype=options.kv_dtype,
        engine=options.engine,
        engine_version=options.engine_version,
        context_tokens=parse_tokens(options.context, "--context") if options.context else None,
        users=required(options.users, "--users"),
        parallel=parallel_of(options),
        promise_tokens=parse_tokens(options.promise, "--promise") if options.promise else None,
        claims=tuple(claims),
        pool_bytes=tuple(sizes),
        model_limit_tokens=parse_tokens(options.model_limit, "--model-limit") if options.model_limit else None,
        settings=settings,
    )


def _pools(options: argparse.Namespace) -> tuple[list[PoolClaim], list[tuple[str, int]]]:
    claims: list[PoolClaim] = []
    sizes: list[tuple[str, int]] = []
    for name, text in (("prefill", options.prefill_pool), ("decode", options.decode_pool)):
        if text is None:
            continue
        if is_tokens(text):
            claims.append(PoolClaim(name=name, tokens=parse_tokens(text, f"--{name}-pool"), source="as given"))
        else:
            sizes.append((name, parse_bytes(text, f"--{name}-pool")))
    return claims, sizes
