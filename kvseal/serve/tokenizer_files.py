"""Where a model's tokenizer comes from: a directory in Hugging Face layout, or the header of a GGUF file.

Owns the reading of those files. Whatever they say that we do not understand is a `ModelError` naming the key, never a guess.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from kvseal.core.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from kvseal.core.files import read_file
from kvseal.exec.weights.gguf_header import NumberArray, StringArray, read_header
from kvseal.serve.pretokenizers import cut_rule, pre_tokenizer
from kvseal.serve.tokenizer import Tokenizer, is_byte_level

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# Values of tokenizer.ggml.token_type: GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a turn in the families that we serve. Many GGUF files name only the end of a document."""


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model directory or .gguf file."""
    tokenizer = _from_directory(model) if model.is_dir() else _from_gguf(model)
    tokenizer.prepare()
    return tokenizer


# --- Hugging Face layout -----------------------------------------------------------------------------------


def _from_directory(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not os.path.lexists(file):
        raise ModelNotFound(f"{directory} has no tokenizer.json; KVSeal needs it to turn text into tokens")
    content = _read(file)
    try:
        core = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # The library raises nothing narrower.
        raise ModelCorrupt(f"{file} cannot be read as a tokenizer: {error}") from error
    core.no_truncation()
    core.no_padding()
    config = _json_file(directory / "tokenizer_config.json")
    special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    special |= {
        name: text for name, value in _json_file(directory / "special_tokens_map.json").items() if (text := _token_text(value)) is not None
    }
    _mark_special(core, special.values())
    default, named = _templates(directory, config)
    return Tokenizer(
        core=core,
        byte_level=is_byte_level(core),
        bos_token=_id_of(core, special.get("bos_token")),
        eos_tokens=_end_tokens(core, directory, special.get("eos_token")),
        adds_bos=bool(ids := core.encode("").ids) and ids[0] == _id_of(core, special.get("bos_token")),
        chat_template=default,
        named_templates=named,
        special_texts=special,
        source="tokenizer.json",
    )


def _end_tokens(core: tokenizers.Tokenizer, directory: Path, eos_text: str | None) -> tuple[int, ...]:
    """Every end-of-sequence id: tokenizer_config.json's and generation_config.json's (chat models often have two)."""
    generation = _json_file(directory / "generation_config.json").get("eos_token_id")
    ids = generation if isinstance(generation, list) else [generation]
    named = _id_of(core, eos_text)
    return tuple(dict.fromkeys(id_ for id_ in [named, *ids] if isinstance(id_, int)))


def _templates(directory: Path, config: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    jinja = directory / "chat_template.jinja"
    stored = _decoded(jinja) if os.path.lexists(jinja) else config.get("chat_template")
    if stored is None:
        stored = _json_file(directory / "chat_template.json").get("chat_template")
    if isinstance(stored, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in stored if isinstance(entry, dict) and "template" in entry}
        return named.get("default"), named
    return (stored, {}) if isinstance(stored, str) else (None, {})


def _json_file(file: Path) -> dict[str, Any]:
    if not os.path.lexists(file):
        return {}
    try:
        value = json.loads(_decoded(file))
    except ValueError as error:
        raise ModelCorrupt(f"{file} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{file} holds no JSON object")
    return value


def _decoded(file: Path) -> str:
    try:
        return _read(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelCorrupt(f"{file} is no UTF-8 (byte {error.start})") from error


def _read(file: Path) -> bytes:
    try:
        return read_file(file)
    except OSError as error:
        raise ModelNotFound(f"{file}: cannot be read: {error.strerror}") from error


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_of(core: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else core.token_to_id(text)


def _mark_special(core: tokenizers.Tokenizer, texts: Any) -> None:
    """Tokens that only the configuration calls special, though tokenizer.json does not."""
    known = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(texts) if text not in known and core.token_to_id(text) is not None]
    if missing:
        core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


# --- GGUF --------------------------------------------------------------------------------------------------


def _from_gguf(file: Path) -> Tokenizer:
    metadata = read_header(file).metadata
    own = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    return from_gguf_metadata({key: value.decode() if isinstance(value, StringArray) else value for key, value in own.items()})


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF header describes (keys ``tokenizer.ggml.*``)."""
    kind = metadata.get("tokenizer.ggml.model")
    pieces: Sequence[str] = _required(metadata, "tokenizer.ggml.tokens")
    types = _numbers(metadata.get("tokenizer.ggml.token_type")) or [1] * len(pieces)
    if len(types) != len(pieces):
        raise ModelCorrupt(f"tokenizer.ggml.token_type has {len(types)} entries for {len(pieces)} tokens")
    if kind == "gpt2":
        core, adds_bos = _byte_level_bpe(metadata, pieces)
    elif kind == "llama":
        core, adds_bos = _sentencepiece(metadata, pieces, types)
    else:
        raise ModelUnsupported(f"tokenizer.ggml.model is {kind!r}; KVSeal reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)")
    core.add_special_tokens([_added(pieces[i], special=True) for i, type_ in enumerate(types) if type_ in (_CONTROL, _UNKNOWN)])
    core.add_tokens([_added(pieces[i], special=False) for i, type_ in enumerate(types) if type_ == _USER_DEFINED])
    bos = _gguf_id(metadata, "bos_token_id", len(pieces))
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and bos is not None
    if adds_bos and bos is not None:
        core.post_processor = processors.TemplateProcessing(single=f"{pieces[bos]}:0 $A:0", pair=None, special_tokens=[(pieces[bos], bos)])
    special = {
        name: pieces[id_]
        for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "padding_token_id"))
        if (id_ := _gguf_id(metadata, key, len(pieces))) is not None
    }
    template = metadata.get("tokenizer.chat_template")
    ends = [_gguf_id(metadata, key, len(pieces)) for key in _GGUF_END_KEYS]
    ends += [i for i, type_ in enumerate(types) if type_ in (_CONTROL, _USER_DEFINED) and pieces[i] in _TURN_ENDS]
    return Tokenizer(
        core=core,
        byte_level=kind == "gpt2",
        bos_token=bos,
        eos_tokens=tuple(dict.fromkeys(id_ for id_ in ends if id_ is not None)),
        adds_bos=adds_bos,
        chat_template=template if isinstance(template, str) else None,
        special_texts=special,
        source=f"GGUF {kind}",
    )


def _byte_level_bpe(metadata: Mapping[str, Any], pieces: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    rule = cut_rule(str(metadata.get("tokenizer.ggml.pre", "default")))
    merges = []
    for merge in _required(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise ModelCorrupt("tokenizer.ggml.merges holds an entry that is not two pieces")
        merges.append((left, right))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    try:
        core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    except Exception as error:  # The library raises nothing narrower.
        raise ModelCorrupt(f"tokenizer.ggml.merges and tokenizer.ggml.tokens do not fit together: {error}") from error
    core.pre_tokenizer = pre_tokenizer(rule)
    core.decoder = decoders.ByteLevel()
    return core, rule.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE: merges happen in order of the scores of what they make, so the merge list follows from the vocabulary."""
    scores = _numbers(_required(metadata, "tokenizer.ggml.scores")) or []
    if len(scores) != len(pieces):
        raise ModelCorrupt(f"tokenizer.ggml.scores has {len(scores)} entries for {len(pieces)} tokens")
    vocab = {piece: i for i, piece in enumerate(pieces)}
    mergeable = {piece for i, piece in enumerate(pieces) if types[i] == 1 or types[i] == _USER_DEFINED}
    ranked: list[tuple[float, int, str, str]] = []
    for piece in mergeable:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[vocab[piece]], vocab[left], left, right))
    ranked.sort(key=lambda entry: (entry[0], entry[1], vocab[entry[3]]))
    unknown = _gguf_id(metadata, "unknown_token_id", len(pieces))
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for _, _, left, right in ranked],
            unk_token=pieces[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    core.normalizer = normalizers.Sequence(steps)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core, True


def _numbers(values: Any) -> list[Any] | None:
    """A GGUF array as a list, whether it came as one or as it stands in a header."""
    return values.tolist() if isinstance(values, NumberArray) else None if values is None else list(values)


def _added(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)


def _gguf_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ModelCorrupt(f"tokenizer.ggml.{key} is {value}; the vocabulary has {vocab_size} tokens")
    return value


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ModelCorrupt(f"the GGUF header has no {key}")
    return metadata[key]
