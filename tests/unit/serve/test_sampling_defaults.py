"""Requests that say nothing are sampled as the model's makers recommend, and the server says so."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvseal.core.errors import ConfigError
from kvseal.core.request import SamplingParams
from kvseal.serve.parse import read_completion
from kvseal.serve.sampling_defaults import describe, sampling_defaults
from kvseal.serve.served import ServedModel


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"temperature": 0.6}, {}),
        ({"do_sample": True, "temperature": None, "top_k": True}, {}),
    ],
)
def test_directories(tmp_path: Path, config: dict[str, object] | None, expected: dict[str, float]) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert describe(sampling_defaults(tmp_path)) == expected


def test_recommendations_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": -1}')
    with pytest.raises(ConfigError, match="temperature"):
        sampling_defaults(tmp_path)


def test_the_demo_model_is_sampled_as_its_card_says(demo_model_path: Path) -> None:
    assert describe(sampling_defaults(demo_model_path)) == {"temperature": 0.2, "top_p": 0.9}


def test_requests_win(model: ServedModel) -> None:
    own = replace(model, defaults=SamplingParams(temperature=0.2, top_p=0.9, top_k=5))

    def sampled(**fields: object) -> SamplingParams:
        return asyncio.run(read_completion({"prompt": "x"} | fields, own, strict=False, obfuscate=False)).sampling

    said_nothing, said = sampled(), sampled(temperature=1, top_p=1, top_k=-1)
    assert (said_nothing.temperature, said_nothing.top_p, said_nothing.top_k) == (0.2, 0.9, 5)
    assert (said.temperature, said.top_p, said.top_k) == (1, 1, 0)
