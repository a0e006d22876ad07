"""How much of a GPU is left for KV: weights, activation peak, non-torch memory and graphs, as an interval.

Owns the estimates and their spread; nothing here is exact unless the user gave the figure. Fitted to published memory identities
(sizing note 2.1): sampler logits in float32 and the widest MLP activation explain the activation peak of every published row but one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvseal.plan.engines.base import Budget, Settings
from kvseal.plan.gpu import find_gpu
from kvseal.plan.shape import ModelShape
from kvseal.plan.units import GIB, MIB, gib
from kvseal.plan.weights import estimate

SAMPLER_COPIES = 9.7
"""Times sequences x vocabulary x 4 bytes that the sampler's warm-up holds at its peak (vLLM V1 before 0.2x)."""
SAMPLER_COPIES_LATE = 6.5
ROUNDING = 8 * MIB
NON_TORCH_ONE = 140 * MIB
NON_TORCH_MANY = 560 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its honest bounds."""

    best: int
    low: int
    high: int
    how: str

    @classmethod
    def given(cls, value: int, what: str) -> Estimate:
        return cls(best=value, low=max(value - ROUNDING, 0), high=value + ROUNDING, how=f"{what} as given (logs round to 0.01 GiB)")


def gpu_memory(settings: Settings) -> tuple[int, str] | None:
    """Bytes the driver shows, or None when no GPU was named."""
    if settings.gpu_memory_bytes is not None:
        return settings.gpu_memory_bytes, "GPU memory as given"
    if settings.gpu is None:
        return None
    gpu = find_gpu(settings.gpu)
    return gpu.memory_bytes, f"{gpu.name}: {gib(gpu.memory_bytes)} GiB visible ({gpu.source})"


def weights_per_gpu(shape: ModelShape, settings: Settings, room: int | None = None) -> Estimate:
    """One rank of the heaviest pipeline stage. Experts are spread over data-parallel ranks too, everything else is copied there.

    `room` is what the GPU offers: weights of an unstated format that do not fit in 16 bit must be served in fewer bits, or partly from
    the host, and the low end says so; the best figure stays what the file says, so that no pool is promised which is not there.
    """
    if settings.weights_bytes is not None:
        return Estimate.given(settings.weights_bytes, "weights per GPU")
    found = _share(shape, settings, settings.weights_dtype)
    unstated = settings.weights_dtype is None and shape.weights.quantization is None and shape.weights.file_bytes is None
    if room is None or found.best < room or not (unstated or found.low >= room):
        return found
    smallest = _share(shape, settings, "int4")
    if unstated and smallest.best < room:
        how = f"{found.how}: {gib(found.best)} GiB DO NOT FIT; the upper end supposes fewer bits: say --weights-dtype fp8 or int4 if so"
        return Estimate(best=found.best, low=smallest.low, high=found.high, how=how)
    return Estimate(
        best=found.best, low=0, high=found.high, how=f"{found.how} do not fit; the upper end supposes that they lie on the host"
    )


def _share(shape: ModelShape, settings: Settings, dtype: str | None) -> Estimate:
    total = estimate(shape, dtype)
    tp, pp, dp = settings.parallel.tp, settings.parallel.pp, settings.parallel.dp
    pad = 1.0 if pp == 1 else 1.05
    part = total.expert_share / (tp * pp * dp) + (1 - total.expert_share) / (tp * pp)
    return Estimate(
        best=int(total.total_bytes * pad * part),
        low=int(total.low_bytes * part),
        high=int(total.high_bytes * pad * 1.02 * part),
        how=f"weights: {total.how}" + (f", one of {tp * pp * dp} GPUs" if tp * pp * dp > 1 else ""),
    )


def activation(shape: ModelShape, settings: Settings, batched_tokens: int) -> Estimate:
    """The transient peak of the profile run: the widest layer of a full batch, or the sampler's logits, whichever is larger."""
    if settings.activation_bytes is not None:
        return Estimate.given(settings.activation_bytes, "activation peak")
    weights = shape.weights
    wide = max(weights.intermediate, weights.expert_intermediate * 8 if weights.experts else 0, shape.hidden)
    layer = batched_tokens * (3 * wide // settings.parallel.tp + 3 * shape.hidden) * 2
    sequences = settings.max_sequences or default_sequences(settings)
    copies = 1.0 if settings.version < (0, 8, 0) else SAMPLER_COPIES if settings.version < (0, 20) else SAMPLER_COPIES_LATE
    sampler = int(sequences * shape.vocab * 4 * copies)
    best = max(layer, sampler)
    return Estimate(
        best=best,
        low=min(layer, sampler) // 3 + min(best // 4, 512 * MIB),
        high=int(1.6 * (layer + sampler)) + 512 * MIB,
        how=f"activation peak: {batched_tokens:,} tokens x widest layer {gib(layer)} GiB, {sequences} x logits {gib(sampler)} GiB",
    )


def default_sequences(settings: Settings) -> int:
    """Default max_num_seqs of the OpenAI server."""
    memory = gpu_memory(settings)
    name = (settings.gpu or "").lower()
    big = memory is not None and memory[0] >= 70 * GIB and "a100" not in name and "gb10" not in name
    return 1024 if big and settings.version >= (0, 8, 0) else 256


def vllm_budget(shape: ModelShape, settings: Settings, batched_tokens: int) -> Budget | None:
    """available = ceil(total x utilization) - weights - activation - non-torch - graphs (since 0.21)."""
    memory = gpu_memory(settings)
    if memory is None:
        return None
    total, how_gpu = memory
    default = 0.92 if settings.version >= (0, 30, 0) else 0.90
    fraction = settings.memory_fraction if settings.memory_fraction is not None else default
    usable = -int(-(total * fraction) // 1)
    peak = activation(shape, settings, batched_tokens)
    many = settings.parallel.tp * settings.parallel.pp > 1
    other = _non_torch(settings, many)
    graphs = _graphs(settings)
    weights = weights_per_gpu(shape, settings, usable - peak.low - other.low - graphs.low)
    kv = usable - weights.best - peak.best - other.best - graphs.best
    return Budget(
        gpu_total=total,
        usable=usable,
        weights=weights.best,
        activation=peak.best,
        non_torch=other.best,
        graphs=graphs.best,
        kv=max(kv, 0),
        kv_low=max(usable - weights.high - peak.high - other.high - graphs.high, 0),
        kv_high=max(usable - weights.low - peak.low - other.low - graphs.low, 0),
        how=(how_gpu, f"x {fraction:g} usable", weights.how, peak.how, other.how, graphs.how),
    )


def _non_torch(settings: Settings, many: bool) -> Estimate:
    if settings.non_torch_bytes is not None:
        return Estimate.given(settings.non_torch_bytes, "non-torch memory")
    best = NON_TORCH_MANY if many else NON_TORCH_ONE
    return Estimate(best=best, low=best // 2, high=best * 3 if many else best * 4, how=f"non-torch memory about {gib(best)} GiB")


def _graphs(settings: Settings) -> Estimate:
    if settings.version < (0, 21, 0):
        return Estimate(best=0, low=0, high=0, how="CUDA graphs are not subtracted before 0.21")
    if settings.graph_bytes is not None:
        return Estimate.given(settings.graph_bytes, "CUDA graphs")
    return Estimate(best=300 * MIB, low=64 * MIB, high=1536 * MIB, how="CUDA graph estimate (since 0.21)")


def sglang_budget(shape: ModelShape, settings: Settings) -> Budget | None:
    """available = total x mem_fraction_static - weights; activations and graphs live in the rest."""
    memory = gpu_memory(settings)
    if memory is None:
        return None
    total, how_gpu = memory
    fraction = settings.memory_fraction
    default, how_fraction = _sglang_fraction(total, settings)
    other = _non_torch(settings, settings.parallel.tp * settings.parallel.pp > 1)
    used = fraction if fraction is not None else default
    usable = int(total * used)
    weights = weights_per_gpu(shape, settings, usable - other.low)
    kv = usable - weights.best - other.best
    spread = 0.0 if fraction is not None else 0.04
    return Budget(
        gpu_total=total,
        usable=usable,
        weights=weights.best,
        activation=total - usable,
        non_torch=other.best,
        graphs=0,
        kv=max(kv, 0),
        kv_low=max(int(total * (used - spread)) - weights.high - 2 * other.high, 0),
        kv_high=max(int(total * min(used + spread, 0.99)) - weights.low, 0),
        how=(how_gpu, how_fraction if fraction is None else f"mem_fraction_static {fraction:g} as given", weights.how, other.how),
    )


def _sglang_fraction(total: int, settings: Settings) -> tuple[float, str]:
    """Default mem_fraction_static: what a reserve for activations and graphs leaves (sizing note 2.2)."""
    size = total / MIB
    tp, pp = settings.parallel.tp, settings.parallel.pp
    chunk = settings.max_batched_tokens or (2048 if size < 20480 else 4096 if size < 61440 else 8192 if size < 163840 else 16384)
    graphs = 8 if size < 20480 else (48 if tp < 4 else 160) if size < 61440 else (256 if tp < 4 else 512)
    reserve = 512 + 1.5 * max(chunk, 2048) + tp * pp / 8 * 1024 + 2 * graphs
    if size > 61440 and settings.version >= (0, 5, 4):
        reserve = max(reserve, 10 * 1024)
    if settings.dp_attention:
        reserve += graphs * tp * 3
    return round(
        (size - reserve) / size, 3
    ), f"default mem_fraction_static {round((size - reserve) / size, 3)} (reserve {reserve / 1024:.1f} GiB)"
