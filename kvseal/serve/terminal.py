"""``kvseal run``: one answer in the terminal, streamed.

Owns how an answer looks on a terminal: the text alone on standard output, so that it can be piped; what was counted on standard error.
"""

from __future__ import annotations

import sys
import time

from kvseal.core.config import EngineConfig
from kvseal.core.errors import SetupError
from kvseal.core.outcome import FinishReason
from kvseal.core.request import SamplingParams
from kvseal.serve.llm import LLM, Generated


def answer_once(config: EngineConfig, prompt: str, *, system: str | None, max_tokens: int | None, temperature: float, seed: int) -> int:
    """Prints the answer as it grows; returns the exit status. Raises `SetupError` and `RequestError`."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    with LLM.from_config(config) as llm:
        start_s = time.monotonic()
        first_s = start_s
        finished: Generated | None = None
        for piece in llm.stream_chat(messages, SamplingParams(temperature=temperature, seed=seed), max_tokens=max_tokens):
            first_s = first_s if first_s > start_s else time.monotonic()
            _print(piece.text)
            finished = piece.finished
        _print("\n")
        if finished is not None and sys.stderr.isatty():
            print(_summary(finished, first_s - start_s, time.monotonic() - first_s), file=sys.stderr)
    return 0


def _print(text: str) -> None:
    """What the terminal's encoding does not have becomes "?". Raises `SetupError` when standard output takes no more, as a full disk."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, errors="replace").decode(encoding), end="", flush=True)
    except BrokenPipeError:  # The reader has had enough: the command line's own exit status.
        raise
    except OSError as error:
        raise SetupError(f"the answer cannot be written to standard output ({error.strerror or type(error).__name__})") from error


def _summary(answer: Generated, first_token_s: float, rest_s: float) -> str:
    after_first_tokens = len(answer.tokens) - 1
    rate = f", then {after_first_tokens / rest_s:.0f} tokens/s" if after_first_tokens > 0 and rest_s > 0 else ""
    cut = " (cut at the limit)" if answer.finish_reason is FinishReason.LENGTH else ""
    return f"\n[{answer.prompt_tokens} prompt + {len(answer.tokens)} output tokens{cut}; first after {first_token_s:.2f} s{rate}]"
