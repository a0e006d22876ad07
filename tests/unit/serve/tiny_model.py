"""A byte-level tokenizer small enough to reason about, and the numbers of a small engine."""

from __future__ import annotations

from typing import Any

from kvseal.node.report import StartReport

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|doc|>", "<|im_start|>", "<|im_end|>")


def byte_alphabet() -> list[str]:
    """GPT-2's stand-ins for the bytes 0..255, in order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF header's tokenizer keys: 3 special tokens, 256 bytes, and "he", "ll", "hell"."""
    pieces = [*SPECIAL, *byte_alphabet(), "he", "ll", "hell"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(pieces) - 3),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    merged = metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in merged.items() if value is not None}


def start_report(**changes: Any) -> StartReport:
    values: dict[str, Any] = {
        "model_name": "tiny",
        "family": "llama",
        "backend": "reference",
        "instruction_set": "none",
        "weights_format": "fp32",
        "weights_bytes": 1,
        "threads": 1,
        "kv_dtype": "fp16",
        "kv_format": f"{7:016x}",
        "page_tokens": 16,
        "kv_token_bytes": 64,
        "kv_token_formula": "2 x 1 x 1 x 16 x 2 B",
        "pool_pages": 16,
        "pool_tokens": 256,
        "pool_bytes": 16384,
        "model_context_tokens": 128,
        "served_context_tokens": 128,
        "context_reason": "the model's own limit",
        "full_length_requests": 2,
        "max_running": 4,
        "max_queued": 8,
        "chunk_tokens": 32,
        "wipe_pages": False,
        "vocab_size": 262,
        "eos_tokens": (2,),
        "bos_token": 1,
    }
    return StartReport(**(values | changes))
