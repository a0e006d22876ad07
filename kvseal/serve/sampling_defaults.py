"""What a request gets when it does not say how to sample: what the model's makers recommend, else OpenAI's neutral values.

Owns the reading of those recommendations: ``generation_config.json`` in a directory, ``general.sampling.*`` in a GGUF header, and for the
demo model its card. Small models talk nonsense at temperature 1. The start report and /version say what is in force; a request that
names a value gets that value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvseal.core.errors import ConfigError, InvalidRequest
from kvseal.core.files import read_text
from kvseal.core.request import SamplingParams
from kvseal.exec.weights.gguf_header import read_header

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_CARDS: dict[str, dict[str, float]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
"""By ``general.basename``: what the model card's own example uses, for headers that say nothing."""


def sampling_defaults(model: Path) -> SamplingParams:
    """Neutral values with the recommended ones in their places. Raises `ConfigError` when those are out of range."""
    found = _from_directory(model) if model.is_dir() else _from_gguf(model)
    given = {name: found[name] for name in FIELDS if isinstance(found.get(name), int | float) and not isinstance(found[name], bool)}
    if "top_k" in given:
        given["top_k"] = int(given["top_k"])
    try:
        return replace(SamplingParams(), **given).checked(vocab_size=1)
    except InvalidRequest as error:
        raise ConfigError(f"the model recommends a sampling value that cannot be: {error}") from error


def describe(defaults: SamplingParams) -> dict[str, float]:
    """Only what differs from neutral."""
    neutral = SamplingParams()
    values = {
        "temperature": (defaults.temperature, neutral.temperature),
        "top_p": (defaults.top_p, neutral.top_p),
        "top_k": (defaults.top_k, neutral.top_k),
        "min_p": (defaults.min_p, neutral.min_p),
        "repetition_penalty": (defaults.repetition_penalty, neutral.repetition_penalty),
    }
    return {name: value for name, (value, usual) in values.items() if value != usual}


def _from_directory(directory: Path) -> Mapping[str, Any]:
    file = directory / "generation_config.json"
    try:
        value = json.loads(read_text(file))
    except (OSError, ValueError):
        return {}  # The tokenizer's reader reports it.
    # Without do_sample the recommendation is greedy, and the other numbers are leftovers.
    return value if isinstance(value, dict) and value.get("do_sample") else {}


def _from_gguf(file: Path) -> Mapping[str, Any]:
    metadata = read_header(file).metadata
    own = {name: metadata.get(f"general.sampling.{_GGUF_NAMES.get(name, name)}") for name in FIELDS}
    own = {name: value for name, value in own.items() if value is not None}
    return own or _CARDS.get(str(metadata.get("general.basename", "")).lower(), {})
