"""One answer in the terminal: ``kvseal run``.

Owns what is printed: the answer on standard output as it grows, figures on standard error.
"""

from __future__ import annotations

import sys
import time

from kvseal.core.config import EngineConfig
from kvseal.core.request import SamplingParams
from kvseal.serve.llm import LLM


def answer_once(config: EngineConfig, prompt: str, *, system: str | None, max_tokens: int | None, temperature: float, seed: int) -> int:
    """Streams the answer; returns the exit status. Raises `KVSealError`."""
    messages = ([{"role": "system", "content": system}] if system is not None else []) + [{"role": "user", "content": prompt}]
    with LLM.from_config(config) as llm:
        started_s = time.monotonic()
        first_s = 0.0
        tokens = 0
        for piece in llm.stream_chat(messages, SamplingParams(temperature=temperature, seed=seed), max_tokens=max_tokens):
            first_s = first_s or time.monotonic() - started_s
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            if piece.finished is not None:
                tokens = len(piece.finished.tokens)
        elapsed_s = time.monotonic() - started_s
    sys.stdout.write("\n")
    decoding_s = elapsed_s - first_s
    rate = f", {(tokens - 1) / decoding_s:.0f} tokens/s" if tokens > 1 and decoding_s > 0 else ""
    print(f"[{tokens} tokens, first after {first_s * 1000:.0f} ms{rate}]", file=sys.stderr)
    return 0
