"""How each family of byte-level BPE tokenizers cuts text before merging, by the name that a GGUF file gives it.

Owns the table from ``tokenizer.ggml.pre`` to the split rules. A name that is not here is `ModelUnsupported`: a wrong cut gives other tokens
than the model was trained on, and nothing would show it. The rules are those of the families' own ``tokenizer.json`` files.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from kvseal.core.errors import ModelUnsupported

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class CutRule:
    """Regular expressions applied one after the other, each match a piece of its own; then bytes are mapped to characters."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whole words of the vocabulary are taken as they are, without merging."""
    adds_bos: bool = False
    """What holds when the file does not say ``tokenizer.ggml.add_bos_token``."""


_PLAIN = CutRule((_GPT2,))
_DIGITS = CutRule((_DIGIT, _GPT2))
_LLAMA = CutRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN = CutRule((_QWEN2,))

_RULES: dict[str, CutRule] = {
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN,
    "mpt": _PLAIN,
    "exaone4": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "minerva-7b": _DIGITS,
    "exaone": _DIGITS,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "falcon3": _LLAMA,
    "dbrx": CutRule((_LLAMA3,)),
    "smaug-bpe": CutRule((_LLAMA3,)),
    "glm4": CutRule((_LLAMA3,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "stablelm2": _QWEN,
    "megrez": _QWEN,
    "tekken": CutRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": CutRule((_GPT4O,)),
    "llama4": CutRule((_GPT4O,)),
}


def cut_rule(name: str) -> CutRule:
    """The rule of ``tokenizer.ggml.pre``. Raises `ModelUnsupported` naming it."""
    if name not in _RULES:
        raise ModelUnsupported(
            f"tokenizer.ggml.pre is {name!r}, a way of cutting text that KVSeal does not know; it knows {', '.join(sorted(_RULES))}"
        )
    return _RULES[name]


def pre_tokenizer(rule: CutRule) -> pre_tokenizers.PreTokenizer:
    """The rule as the tokenizers library runs it."""
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False) for pattern in rule.patterns
    ]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
