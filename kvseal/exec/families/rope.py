"""Rotary frequencies, resolved once: theta, scaling and factors become plain numbers.

Owns every formula of rotary scaling, in double precision. Sources: linear (kaiokendev), llama3 (Meta's reference code for Llama 3.1),
YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753); parameter names as in Hugging Face's `rope_parameters`.

Frequencies here never depend on a sequence's length: a method that changes them as a sequence grows ("dynamic") would change K and V
already in the cache, so it is `ModelUnsupported`. LongRoPE has two sets, for short and for long sequences; which one is used is fixed by
the served context for all sequences (see `longrope`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvseal.exec.families.fields import Fields
from kvseal.exec.spec import RopeSpec

Float64 = npt.NDArray[np.float64]

PHI3_ORIGINAL_TOKENS = 4096
"""Default of transformers' Phi3Config for `original_max_position_embeddings`."""


def plain_frequencies(theta: float, rotary_dims: int) -> Float64:
    """[rotary_dims / 2]: theta ** (-2 i / rotary_dims)."""
    return theta ** -(np.arange(0, rotary_dims, 2, dtype=np.float64) / rotary_dims)


def spec_of(frequencies: Float64, magnitude: float = 1.0, scaling: str = "none") -> RopeSpec:
    return RopeSpec(
        rotary_dims=2 * len(frequencies),
        inverse_frequencies=tuple(float(np.float32(x)) for x in frequencies),
        magnitude=magnitude,
        scaling=scaling,
    )


def linear(frequencies: Float64, factor: float) -> RopeSpec:
    return spec_of(frequencies / factor, scaling=f"linear {factor:g}")


def llama3(frequencies: Float64, *, factor: float, low_factor: float, high_factor: float, original_tokens: int) -> RopeSpec:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    waves_in_context = original_tokens * frequencies / (2 * math.pi)
    smooth = np.clip((waves_in_context - low_factor) / (high_factor - low_factor), 0.0, 1.0)
    return spec_of(frequencies * ((1 - smooth) / factor + smooth), scaling=f"llama3 {factor:g}")


def yarn(
    frequencies: Float64,
    *,
    theta: float,
    factor: float,
    original_tokens: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    magnitude: float | None = None,
    truncate: bool = True,
) -> RopeSpec:
    """Dimensions turning more than beta_fast times within the original context are kept, below beta_slow divided by `factor`."""
    dims = 2 * len(frequencies)

    def dimension_turning(rotations: float) -> float:
        return dims * math.log(original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_turning(beta_fast), dimension_turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return spec_of(
        frequencies * (ramp / factor + (1 - ramp)),
        magnitude=yarn_magnitude(factor) if magnitude is None else magnitude,
        scaling=f"yarn {factor:g}",
    )


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def longrope(frequencies: Float64, factors: tuple[float, ...], *, magnitude: float, name: str) -> RopeSpec:
    return spec_of(frequencies / np.array(factors), magnitude=magnitude, scaling=f"longrope {name}")


def longrope_magnitude(factor: float, original_tokens: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_tokens))


def from_config(config: Fields, *, head_dim: int, default_theta: float, partial: bool, context_tokens: int | None) -> tuple[RopeSpec, int]:
    """Rotary embedding and the context that it promises, from `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta`.

    `partial`: whether the family rotates part of a head. `context_tokens`: the context asked for, which only LongRoPE looks at: beyond
    `original_max_position_embeddings` its long factors serve all sequences, else its short factors and no more than the original length.
    """
    promised = config.count("max_position_embeddings")
    key = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"  # with both, transformers takes the older one
    parameters = config.nested(key) or Fields({}, config.where)
    if any(isinstance(parameters.raw(kind), dict) for kind in ("full_attention", "sliding_attention")):
        raise config.unsupported(key, "differs by kind of layer; KVSeal computes one rotary embedding for all layers")
    theta = parameters.number("rope_theta", config.number("rope_theta", default_theta))
    factor_of_head = parameters.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if factor_of_head > 1 or (factor_of_head != 1 and not partial):
        raise config.unsupported("partial_rotary_factor", f"is {factor_of_head:g}, which this family does not have")
    rotary_dims = int(head_dim * factor_of_head)
    if rotary_dims < 2 or rotary_dims % 2:
        raise config.corrupt("partial_rotary_factor", f"gives {rotary_dims} rotating dimensions; they must be even")
    frequencies = plain_frequencies(theta, rotary_dims)
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind == "default":
        return spec_of(frequencies), promised
    if kind == "linear":
        return linear(frequencies, parameters.number("factor")), promised
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        if high <= low:
            raise parameters.corrupt("high_freq_factor", "must be above low_freq_factor")
        original = parameters.count("original_max_position_embeddings", promised)
        return llama3(frequencies, factor=parameters.number("factor"), low_factor=low, high_factor=high, original_tokens=original), promised
    if kind == "yarn" and not partial:
        return _yarn_from(parameters, frequencies, theta, promised)
    if partial and kind in ("longrope", "su", "yarn"):  # earlier names of the same method in Phi-3's configurations
        return _longrope_from(config, parameters, frequencies, promised, context_tokens)
    raise parameters.unsupported(
        "rope_type", f"is {kind!r}; KVSeal computes default, linear, llama3, yarn and Phi-3's longrope, whose frequencies stay fixed"
    )


def _yarn_from(parameters: Fields, frequencies: Float64, theta: float, promised: int) -> tuple[RopeSpec, int]:
    original = parameters.count("original_max_position_embeddings", promised)
    factor = parameters.number("factor", max(promised / original, 1.0))
    magnitude = parameters.number("attention_factor", 0.0, positive=False) or None
    if magnitude is None and "mscale" in parameters and "mscale_all_dim" in parameters:
        magnitude = yarn_magnitude(factor, parameters.number("mscale")) / yarn_magnitude(factor, parameters.number("mscale_all_dim"))
    spec = yarn(
        frequencies,
        theta=theta,
        factor=factor,
        original_tokens=original,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        magnitude=magnitude,
        truncate=parameters.flag("truncate", True),
    )
    return spec, max(promised, int(original * factor))


def _longrope_from(
    config: Fields, parameters: Fields, frequencies: Float64, promised: int, context_tokens: int | None
) -> tuple[RopeSpec, int]:
    key = "original_max_position_embeddings"
    original = config.count(key, parameters.count(key, PHI3_ORIGINAL_TOKENS))
    factor = parameters.number("factor", promised / original)
    magnitude = parameters.number("attention_factor", longrope_magnitude(factor, original))
    long = context_tokens is not None and context_tokens > original
    name = "long" if long else "short"
    factors = parameters.numbers(f"{name}_factor", len(frequencies))
    return longrope(frequencies, factors, magnitude=magnitude, name=name), promised if long else min(promised, original)
