"""Text that grows with the tokens of a stream: whole characters only, nothing past a stop string.

Owns `Detokenizer`. A token costs time in proportion to the text that it adds, however long the answer is already: bytes go through an
incremental UTF-8 decoder, and stop strings through an automaton that remembers how much of each string the text ends with.

Two promises. What has been released is never taken back. And what is released does not depend on how tokens arrive (one by one, or many in
one event): the first stop string that *ends* wins, the longest of those that end on the same character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvseal.serve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Released:
    """What may be shown now."""

    text: str
    tokens: int
    """How many more tokens of the stream are wholly inside the released text (for logprobs and token ids)."""


class Detokenizer:
    """One choice's text. Feed it tokens with `push`, then call `finish` once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_StopMatcher(text) for text in stop if text]
        self._include_stop = include_stop_in_output
        self._min_tokens = min_tokens
        self._held: list[str] = []
        self._held_chars = 0
        self._pushed_tokens = 0
        self._seen_chars = 0
        self._released_chars = 0
        self._token_ends: deque[int] = deque()
        """For each token not yet released: how many characters of text there were when it had been added."""
        self.stopped_by: str | None = None
        self._pending = False
        """Bytes of a character that is not complete wait in `_utf8` (kept by `text_of` alone)."""

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    @property
    def watches(self) -> bool:
        """Whether text may be held back, because it could begin a stop string."""
        return bool(self._matchers)

    def text_of(self, token: int) -> str:
        """`push` where nothing is watched for: what the token adds is released with it, and so is the token."""
        self._pushed_tokens += 1
        if token in self._skipped:
            return ""
        if not self._pending:
            whole = self._tokenizer.whole_text(token)
            if whole is not None:
                return whole
        text = self._utf8.decode(self._tokenizer.bytes_of(token))
        self._pending = bool(self._utf8.getstate()[0])
        return text

    def push(self, token: int) -> Released:
        """Adds one token. After a stop string has been found nothing more is released."""
        if self.stopped:
            return Released("", 0)
        self._pushed_tokens += 1
        added = b"" if token in self._skipped else self._tokenizer.bytes_of(token)
        return self._add(self._utf8.decode(added))

    def finish(self) -> Released:
        """The end: bytes that never became a character become U+FFFD, and held text that could have begun a stop string is released."""
        if self.stopped:
            return Released("", 0)
        tail = self._add(self._utf8.decode(b"", final=True), counts=False)
        rest = Released("", 0) if self.stopped else self._release(self._held_chars)
        return Released(tail.text + rest.text, tail.tokens + rest.tokens + self._leave_none())

    def _leave_none(self) -> int:
        left = 0 if self.stopped else len(self._token_ends)
        self._token_ends.clear()
        return left

    def _add(self, text: str, *, counts: bool = True) -> Released:
        active = self._matchers if self._pushed_tokens > self._min_tokens or not counts else []
        for at, char in enumerate(text if self._matchers else ""):
            longest = max((len(m.text) for m in self._matchers if m.feed(char)), default=0)
            if longest and active:
                return self._stop(text[: at + 1], longest, counts)
        self._hold(text)
        if counts:
            self._token_ends.append(self._seen_chars)
        keep = max((m.matched for m in self._matchers), default=0)
        return self._release(self._held_chars - min(keep, self._held_chars))

    def _stop(self, text: str, stop_chars: int, counts: bool) -> Released:
        self._hold(text)
        if counts:
            self._token_ends.append(self._seen_chars)
        whole = "".join(self._held)
        self.stopped_by = whole[len(whole) - stop_chars :]
        shown = self._held_chars if self._include_stop else self._held_chars - stop_chars
        return self._release(shown)

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)
            self._held_chars += len(text)
            self._seen_chars += len(text)

    def _release(self, chars: int) -> Released:
        text = ""
        if chars:
            whole = "".join(self._held)
            text, rest = whole[:chars], whole[chars:]
            self._held = [rest] if rest else []
            self._held_chars = len(rest)
            self._released_chars += chars
        tokens = 0
        while self._token_ends and self._token_ends[0] <= self._released_chars:
            self._token_ends.popleft()
            tokens += 1
        return Released(text, tokens)


class _StopMatcher:
    """Knuth, Morris and Pratt: how many characters of one stop string the text ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Of the *proper* prefix: a whole match falls back to its longest border, so that overlapping text goes on matching."""
        self._border = [0] * (len(text) + 1)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._border[length]
            length += text[i] == text[length]
            self._border[i + 1] = length

    def feed(self, char: str) -> bool:
        """True when the stop string ends with this character."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self._border[self.matched]
        self.matched += char == self.text[self.matched]
        if self.matched == len(self.text):
            self.matched = self._border[self.matched]
            return True
        return False
