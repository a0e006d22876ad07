"""The exported folder is the same model: KVSeal reads it back to equal weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvseal.bench.peers.convert import export_folder, hugging_face_config
from kvseal.core.errors import ModelUnsupported
from kvseal.exec.loader import load_model
from kvseal.serve.tokenizer_files import load_tokenizer

from .fakes import small_model


def test_the_folder_holds_the_same_model(tmp_path: Path) -> None:
    model, folder = small_model(tmp_path), tmp_path / "exported"
    export_folder(model, folder)
    before, after = load_model(model), load_model(folder)
    assert replace(after.spec, rope=before.spec.rope) == replace(before.spec, bos_token=after.spec.bos_token)
    np.testing.assert_allclose(after.spec.rope.inverse_frequencies, before.spec.rope.inverse_frequencies, rtol=1e-6)
    np.testing.assert_array_equal(after.embedding.to_float32(), before.embedding.to_float32())
    for one, other in ((before.layers[0], after.layers[0]), (before.layers[-1], after.layers[-1])):
        for first, second in ((one.q, other.q), (one.k, other.k), (one.o, other.o), (one.down, other.down)):
            np.testing.assert_array_equal(first.to_float32(), second.to_float32())
    assert load_tokenizer(folder).encode("Some1234<|im_end|>!") == load_tokenizer(model).encode("Some1234<|im_end|>!") != []


def test_what_is_no_plain_llama_is_refused(tmp_path: Path) -> None:
    spec = load_model(small_model(tmp_path)).spec
    for odd in (
        replace(spec, qk_norm=True),
        replace(spec, q_k_v_bias=True),
        replace(spec, logits_divisor=8.0),
        replace(spec, family="phi3"),
    ):
        with pytest.raises(ModelUnsupported):
            hugging_face_config(odd, 10_000.0)
