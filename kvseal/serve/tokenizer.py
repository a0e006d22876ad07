"""Text to token ids and back, for one model.

Owns `Tokenizer`: what a directory's tokenizer files or a GGUF header say, turned into one object. Never renders chat templates
(`chat_template`) and never joins tokens of a stream (`detokenizer`).

Whose text may contain special tokens: a raw prompt is the caller's own, so special tokens in it are recognised (as every peer does). In a
chat the *template* writes the turns; a message that contains the text of a special token is encoded as plain text, so that no content can
forge a turn. See `encode_chat` for how.
"""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import tokenizers

from kvseal.core.errors import InvalidRequest, ModelUnsupported

_SPM_SPACE = "\u2581"
_TURN_TOKEN = re.compile(r"<\|.+\|>|<(?:start|end)_of_turn>|\[/?INST\]")
_SPM_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Tokenizer:
    """Immutable; safe to use from several threads at once (the library releases the interpreter lock while it encodes)."""

    core: tokenizers.Tokenizer
    byte_level: bool
    """True: pieces are bytes in GPT-2's alphabet. False: SentencePiece pieces with "<0xNN>" bytes."""
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()
    adds_bos: bool = False
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    special_texts: Mapping[str, str] = field(default_factory=dict)
    """bos_token, eos_token, pad_token, ... as the model's files name them: what chat templates may use."""
    source: str = ""
    """For /tokenizer_info."""

    @cached_property
    def vocab_size(self) -> int:
        return int(self.core.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(id_ for id_, token in self.core.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _special_text(self) -> re.Pattern[str] | None:
        """Matches the text of any token that only a template may write, the longest first.

        These are the special ones, and whatever looks like them: some models leave the mark off the tokens that end a turn.
        """
        added = self.core.get_added_tokens_decoder().items()
        ends = (*self.eos_tokens, self.bos_token)
        texts = {t.content for id_, t in added if t.special or id_ in ends or _TURN_TOKEN.fullmatch(t.content)}
        texts = {text for text in texts if len(text) > 1}
        return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True))) if texts else None

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """[vocab_size] what each token adds to the text. Special tokens are their own text here."""
        vocab = self.core.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        to_bytes = _byte_level_bytes if self.byte_level else _spm_bytes
        for piece, id_ in vocab.items():
            table[id_] = to_bytes(piece)
        for id_, token in self.core.get_added_tokens_decoder().items():
            table[id_] = token.content.encode()
        return tuple(table)

    def prepare(self) -> None:
        """Builds the tables now rather than under the first request."""
        _ = self.token_bytes, self.special_ids, self._special_text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt: the text of a special token becomes that token. Raises `InvalidRequest` for what is no text."""
        # The fast variant leaves out the offsets of each token, which nobody here reads: half the time for the same ids.
        check_text(text, "text")
        return list(self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_chat(self, rendered: str, guard: ContentGuard) -> list[int]:
        """Token ids of a rendered template in which `guard` has marked what content must not forge.

        Without marks this is one ordinary encoding. With marks the text is encoded in parts, cut inside each forged token,
        so that no part contains it whole.
        """
        parts = rendered.split(guard.mark) if guard.used else [rendered]
        return [id_ for part in parts if part for id_ in self.encode(part, add_special_tokens=False)]

    def content_guard(self) -> ContentGuard:
        return ContentGuard(self._special_text)

    def bytes_of(self, token: int) -> bytes:
        """What one token adds to the text; nothing for ids that the vocabulary does not hold (padding rows of the model)."""
        return self.token_bytes[token] if 0 <= token < len(self.token_bytes) else b""

    def whole_text(self, token: int) -> str | None:
        """What one token adds behind complete characters; None when its own bytes are not complete characters."""
        return self._whole_texts[token] if 0 <= token < len(self._whole_texts) else ""

    @cached_property
    def _whole_texts(self) -> list[str | None]:
        return [_whole(raw) for raw in self.token_bytes]

    def text_of(self, token: int) -> str:
        """One token alone, for logprobs; bytes that are no character become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", errors="replace")

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        raw = b"".join(self.bytes_of(token) for token in tokens if token not in skipped)
        text = raw.decode("utf-8", errors="replace")
        # SentencePiece puts one space before the first word; it is not part of the text.
        return text[1:] if not self.byte_level and self._strips_first_space and text.startswith(" ") else text

    @cached_property
    def _strips_first_space(self) -> bool:
        return self.decoded_space_prefix(self.core)

    @staticmethod
    def decoded_space_prefix(core: tokenizers.Tokenizer) -> bool:
        """Whether encoding puts a space of its own before the first word."""
        first = core.encode("a", add_special_tokens=False).tokens[:1]
        return any(piece.startswith(_SPM_SPACE) for piece in first)


class ContentGuard:
    """Marks, inside message contents, every text that would be read as a special token. One per rendering.

    The mark cannot be guessed, so no caller can place one.
    """

    def __init__(self, special_text: re.Pattern[str] | None) -> None:
        self._special_text = special_text
        self.mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        self.used = False

    def protect(self, value: object) -> object:
        """A copy of a JSON value with every string guarded (keys too: a template may print them)."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        return value

    def _protect_text(self, text: str) -> str:
        pattern = self._special_text
        while pattern is not None and pattern.search(text):  # Again, since breaking one may leave another that overlapped it.
            text = pattern.sub(lambda found: found[0][0] + self.mark + found[0][1:], text)
            self.used = True
        return text


def check_text(text: str, param: str) -> str:
    """Returns the text, or raises `InvalidRequest` when it is no Unicode text (half a surrogate pair)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} holds half a surrogate pair, which is no character", param=param) from error
    return text


def _byte_level_bytes(piece: str) -> bytes:
    """A character for each byte; a piece with any other character stands for its own text."""
    try:
        return codecs.charmap_encode(piece, "strict", _BYTE_LEVEL)[0]
    except UnicodeEncodeError:
        return piece.encode()


def _spm_bytes(piece: str) -> bytes:
    if byte := _SPM_BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(_SPM_SPACE, " ").encode()


def _gpt2_alphabet() -> str:
    """[256] GPT-2's printable stand-ins for the bytes: printable Latin-1 stands for itself, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


_BYTE_LEVEL = codecs.charmap_build(_gpt2_alphabet())
"""The alphabet in the form that the interpreter encodes fastest with: a vocabulary is turned into bytes at every start."""


def is_byte_level(core: tokenizers.Tokenizer) -> bool:
    """Tells the two kinds of pieces apart by the decoder. Raises `ModelUnsupported` for any other kind."""
    described = repr(core.decoder)
    if "ByteLevel" in described:
        return True
    if "ByteFallback" in described or "Metaspace" in described or _SPM_SPACE in described:
        return False
    raise ModelUnsupported(f"tokenizer.json: decoder is {described.split('(')[0]}; KVSeal reads byte-level and SentencePiece tokenizers")


def _whole(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
