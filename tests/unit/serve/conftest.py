"""Fixtures of this folder; the helpers that make them are in `tiny_model`."""

from __future__ import annotations

import pytest

from kvseal.serve.chat_template import ChatTemplate
from kvseal.serve.served import ServedModel
from kvseal.serve.tokenizer import Tokenizer
from kvseal.serve.tokenizer_files import from_gguf_metadata

from .tiny_model import TEMPLATE, start_report, tiny_metadata


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return from_gguf_metadata(tiny_metadata())


@pytest.fixture(scope="session")
def model(tiny: Tokenizer) -> ServedModel:
    template = ChatTemplate(TEMPLATE, tiny.special_texts)
    return ServedModel(name="tiny", tokenizer=tiny, template=template, report=start_report(), created_s=1)
