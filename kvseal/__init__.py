"""KVSeal: a language-model server whose KV cache cannot leak.

``from kvseal import LLM`` runs batches in this process; ``kvseal serve`` is the OpenAI-compatible server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvseal.core.request import SamplingParams

if TYPE_CHECKING:
    from kvseal.serve.llm import LLM

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    # The engine is imported when it is first asked for, so that `kvseal size` and `kvseal --help` stay instant.
    if name == "LLM":
        from kvseal.serve.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
