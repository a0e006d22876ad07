"""What a format of weights or of the KV cache costs in accuracy: ``kvseal bench accuracy [MODEL] --text DIR``.

Owns the comparison of variants (weights/KV, e.g. auto/int8) with a reference (fp32/fp32: everything dequantised exactly, float32
activations and cache) on the same windows of real text, token by token, through the engine's own backend. Never judges.

Per token, of the next token's distribution p (reference) and q (variant):

* perplexity: exp of the mean of -log q(the token that follows); beside it the paired difference of -log with its standard error, which
  needs far fewer tokens than two perplexities do;
* KL divergence sum p log(p / q), its mean and 99th percentile: how far the variant's predictions are from the reference's;
* agreement: how often both find the same token the likeliest, i.e. how often greedy decoding goes the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvseal.bench._texts import Window, read_texts, windows_of
from kvseal.bench.suite.command import thread_count
from kvseal.bench.suite.reports import check_files, written
from kvseal.core.config import KV_DTYPES, WEIGHT_FORMATS
from kvseal.core.errors import ConfigError
from kvseal.exec.backend import Float32, Int32, StepArrays
from kvseal.exec.backends.cpu import CPUBackend
from kvseal.exec.loader import load_model
from kvseal.exec.weights.types import ModelWeights
from kvseal.kv.geometry import KVDtype, KVGeometry
from kvseal.node.models import resolve_model
from kvseal.serve.tokenizer_files import load_tokenizer

Float64 = npt.NDArray[np.float64]

DEFAULT_VARIANTS = "fp32/fp16,fp32/int8,fp32/int4,bf16/fp32,q8/fp32,auto/fp32,q4/fp32,auto/fp16,auto/int8,auto/int4"
CHUNK_TOKENS = 512
LOGITS_ROWS = 64
DEPTHS = (0, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Bounds of the position ranges that are reported apart: errors of a cache grow with what is read from it."""


@dataclass(frozen=True, slots=True)
class Variant:
    weights: str
    kv_dtype: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Raises ConfigError for anything but WEIGHTS/KV of known formats."""
        weights, _, kv_dtype = text.partition("/")
        if weights not in WEIGHT_FORMATS or kv_dtype not in KV_DTYPES:
            raise ConfigError(f"{text!r} is no variant: give WEIGHTS/KV, of {', '.join(WEIGHT_FORMATS)} and {', '.join(KV_DTYPES)}")
        return cls(weights, kv_dtype)

    @property
    def name(self) -> str:
        return f"{self.weights}/{self.kv_dtype}"


@dataclass(frozen=True, slots=True)
class Scores:
    """One number per predicted token, [n] each."""

    reference_nll: Float64
    nll_change: Float64
    divergence: Float64
    agrees: npt.NDArray[np.bool_]
    position: Int32
    """Of the state that predicts, in its window."""

    def where(self, chosen: npt.NDArray[np.bool_]) -> Scores:
        return Scores(
            self.reference_nll[chosen], self.nll_change[chosen], self.divergence[chosen], self.agrees[chosen], self.position[chosen]
        )

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        return cls(
            np.concatenate([part.reference_nll for part in parts]),
            np.concatenate([part.nll_change for part in parts]),
            np.concatenate([part.divergence for part in parts]),
            np.concatenate([part.agrees for part in parts]),
            np.concatenate([part.position for part in parts]),
        )

    def summary(self) -> dict[str, float | int]:
        count = len(self.divergence)
        reference = float(np.exp(self.reference_nll.mean()))
        perplexity = float(np.exp((self.reference_nll + self.nll_change).mean()))
        return {
            "tokens": count,
            "reference_perplexity": reference,
            "perplexity": perplexity,
            "nll_change": float(self.nll_change.mean()),
            "nll_change_standard_error": float(self.nll_change.std() / max(1, count) ** 0.5),
            "kl_mean": float(self.divergence.mean()),
            "kl_standard_error": float(self.divergence.std() / max(1, count) ** 0.5),
            "kl_p99": float(np.quantile(self.divergence, 0.99)),
            "agreement": float(self.agrees.mean()),
        }


class Reader:
    """One variant's backend, reading windows in chunks."""

    def __init__(self, weights: ModelWeights, variant: Variant, *, longest_tokens: int, threads: int) -> None:
        spec = weights.spec
        geometry = KVGeometry(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            kv_dtype=KVDtype(variant.kv_dtype),
            weights_digest=weights.digest,
        )
        self._pages = geometry.pages_for(longest_tokens)
        self._backend = CPUBackend(weights, geometry, pages=self._pages, weight_format=variant.weights, threads=threads)
        self._ledger = np.zeros(self._pages, dtype=np.uint64)
        self._nonce = 0

    def hidden(self, window: Window) -> Float32:
        """[length, hidden_size] after the final norm."""
        self._ledger[:] = np.arange(self._nonce + 1, self._nonce + 1 + self._pages, dtype=np.uint64)
        self._nonce += self._pages
        table = array("Q", [number for page in range(self._pages) for number in (page, int(self._ledger[page]))])
        parts = []
        for start in range(0, len(window.tokens), CHUNK_TOKENS):
            tokens = window.tokens[start : start + CHUNK_TOKENS]
            output = self._backend.forward(
                StepArrays(
                    tokens=tokens,
                    row_offsets=np.array([0, len(tokens)], dtype=np.int32),
                    start_positions=np.array([start], dtype=np.int32),
                    tables=[table],
                    scopes=np.ones((1, 2), dtype=np.uint64),
                    hidden_counts=np.array([len(tokens)], dtype=np.int32),
                    ledger_nonces=self._ledger,
                )
            )
            if output.breaks:
                raise SystemExit(f"broken seals in a benchmark: {output.breaks}")
            parts.append(output.hidden)
        return np.concatenate(parts)

    def logits(self, hidden: Float32) -> Float32:
        return self._backend.logits(hidden)

    def close(self) -> None:
        self._backend.close()


def compare(reference: Float32, variant: Float32, following: Int32) -> tuple[Float64, Float64, Float64, npt.NDArray[np.bool_]]:
    """[n, vocab] logits of both, [n] tokens that follow -> reference -log p, change of -log, KL, same likeliest token; [n] each.

    With d = variant - reference, less about its mean under p: KL = log sum p exp(d) - sum p d. As sums of small numbers both keep their
    digits where p and q hardly differ; where they differ much the sum of exponentials is taken over the variant's own logits.
    """
    rows = np.arange(len(following))
    top, variant_top = reference.max(axis=1, keepdims=True), variant.max(axis=1, keepdims=True)
    p = np.exp(reference - top)
    total = p.sum(axis=1, keepdims=True)
    p /= total
    change = variant - reference
    centre = (p * change).sum(axis=1, keepdims=True)
    change -= centre
    near = np.log1p((p * (np.exp(np.minimum(change, 20.0)) - 1.0)).sum(axis=1, dtype=np.float64))
    variant_total = np.exp(variant - variant_top).sum(axis=1, dtype=np.float64)
    far = np.log(variant_total / total[:, 0]) + (variant_top - top - centre)[:, 0]
    grown = np.where(far > 0.1, far, near)
    reference_nll = np.log(total[:, 0], dtype=np.float64) + top[:, 0] - reference[rows, following]
    agrees = reference.argmax(axis=1) == variant.argmax(axis=1)
    return reference_nll, grown - change[rows, following], grown - (p * change).sum(axis=1, dtype=np.float64), agrees


def scores_of(reference: Reader, reference_hidden: Float32, variant: Reader, hidden: Float32, window: Window) -> Scores:
    """Every token of a window but the first is predicted from those before it."""
    last = len(window.tokens) - 1
    parts = []
    for start in range(0, last, LOGITS_ROWS):
        stop = min(start + LOGITS_ROWS, last)
        found = compare(
            reference.logits(reference_hidden[start:stop]), variant.logits(hidden[start:stop]), window.tokens[start + 1 : stop + 1]
        )
        parts.append(Scores(*found, position=np.arange(start, stop, dtype=np.int32)))
    return Scores.joined(parts)


def measure(
    weights: ModelWeights, windows: Sequence[Window], variants: Sequence[Variant], against: Variant, *, threads: int
) -> Iterator[tuple[Variant, list[Scores], float]]:
    """Variant by variant, the scores of each window and the seconds taken. Two variants are in memory at a time."""
    longest = max(len(window.tokens) for window in windows)
    reference = Reader(weights, against, longest_tokens=longest, threads=threads)
    expected = [reference.hidden(window) for window in windows]
    for variant in variants:
        began = time.perf_counter()
        reader = Reader(weights, variant, longest_tokens=longest, threads=threads)
        found = [scores_of(reference, hidden, reader, reader.hidden(w), w) for w, hidden in zip(windows, expected, strict=True)]
        reader.close()
        yield variant, found, time.perf_counter() - began
    reference.close()


def summaries(windows: Sequence[Window], found: Sequence[Scores]) -> dict[str, dict[str, dict[str, float | int]]]:
    """By text and length, and over all texts of a length; by depth for long windows."""
    groups: dict[str, list[Scores]] = {}
    for window, scores in zip(windows, found, strict=True):
        groups.setdefault(f"{window.text} {len(window.tokens)}", []).append(scores)
        groups.setdefault(f"all {len(window.tokens)}", []).append(scores)
    whole = {name: Scores.joined(parts) for name, parts in groups.items()}
    depths: dict[str, dict[str, float | int]] = {}
    everything = Scores.joined(list(found))
    for low, high in pairwise(DEPTHS):
        part = everything.where((everything.position >= low) & (everything.position < high))
        if len(part.position):
            depths[f"{low}-{high - 1}"] = part.summary()
    return {"texts": {name: scores.summary() for name, scores in sorted(whole.items())}, "positions": depths}


def table_of(results: dict[str, dict[str, dict[str, dict[str, float | int]]]], kind: str, names: Sequence[str]) -> list[str]:
    head = f"{'variant':14} {'on':28} {'tokens':>7} {'ppl ref':>9} {'ppl':>9} {'nll change':>19} {'KL mean':>17} {'KL p99':>8} {'agree':>8}"
    lines = [head]
    for variant, found in results.items():
        for name in names:
            s = found[kind].get(name)
            if s is not None:
                lines.append(
                    f"{variant:14} {name:28} {s['tokens']:7} {s['reference_perplexity']:9.3f} {s['perplexity']:9.3f} "
                    f"{s['nll_change']:+10.5f}±{s['nll_change_standard_error']:.5f}"
                    f"  {s['kl_mean']:9.2e}±{s['kl_standard_error']:.0e} {s['kl_p99']:8.1e} {100 * s['agreement']:7.2f}%"
                )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    variants, against = [Variant.parse(text) for text in options.variants.split(",")], Variant.parse(options.against)
    check_files({"--json": options.json})
    path = resolve_model(options.model)
    weights, tokenizer, texts = load_model(path), load_tokenizer(path), read_texts(options.text)
    windows: list[Window] = []
    for length, tokens in ((options.length, options.tokens), (options.long_length, options.long_tokens)):
        if tokens:
            windows += windows_of(texts, tokenizer, length=min(length, weights.spec.context_tokens), tokens=tokens)
    if not windows:
        raise ConfigError(f"no text is {options.length} tokens long; give longer ones, or a smaller --length")
    total = sum(len(window.tokens) for window in windows)
    print(f"{path.name}: {total} tokens in {len(windows)} windows, against {against.name}", flush=True)
    results = {}
    for variant, found, seconds in measure(weights, windows, variants, against, threads=options.threads):
        results[variant.name] = summaries(windows, found)
        lengths = sorted({len(window.tokens) for window in windows})
        for line in table_of({variant.name: results[variant.name]}, "texts", [f"all {length}" for length in lengths])[1:]:
            print(f"{line}  ({seconds:.0f} s)", file=sys.stderr, flush=True)
    names = sorted({name for found in results.values() for name in found["texts"]})
    print("\n".join(table_of(results, "texts", names)))
    print("\n".join(["", "by position in the window", *table_of(results, "positions", list(next(iter(results.values()))["positions"]))]))
    if options.json is not None:
        record = {"model": path.name, "against": against.name, "tokens": total, "texts": sorted(texts), "variants": results}
        return 0 if written("--json", options.json, partial(options.json.write_text, json.dumps(record, indent=1))) else 1
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvseal bench accuracy", description="Perplexity, KL divergence and agreement of formats.")
    parser.add_argument("model", nargs="?", help="directory, .gguf file, or hub id; default: the demo model")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="PATH", help="files or directories (default: Python's reference)"
    )
    parser.add_argument("--variants", default=DEFAULT_VARIANTS, help="WEIGHTS/KV, comma-separated (default: %(default)s)")
    parser.add_argument("--against", default="fp32/fp32", help="the reference (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in such windows per text; 0: none (default: %(default)s)")
    parser.add_argument("--long-length", type=int, default=8192, help="tokens of a long window (default: %(default)s)")
    parser.add_argument("--long-tokens", type=int, default=0, help="tokens in long windows per text (default: none)")
    parser.add_argument("--threads", type=thread_count, default=0, help="0: one per core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
