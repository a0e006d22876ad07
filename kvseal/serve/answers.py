"""What an answer looks like in JSON: OpenAI's shapes, whole and in chunks, for chats and for completions.

Owns every response shape of the two generation endpoints. Never decides anything: it writes down what `generation` says.
Usage numbers are always numbers, never null: what was cached is 0 when nothing was.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvseal.core.batch import TokenLogprobs
from kvseal.serve.generation import Choice, Delta, Finish
from kvseal.serve.parse import GenerationAsk
from kvseal.serve.served import ServedModel

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; this is OpenAI's number for "too unlikely"."""
OBFUSCATION_STEP_CHARS = 32

Json = dict[str, Any]


@dataclass(slots=True)
class ChoiceText:
    """Everything that one choice has said, for an answer in one piece."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish = delta.finish or self.finish


@dataclass(frozen=True, slots=True)
class Answer:
    """The head that all chunks share, and the way to write each part."""

    ask: GenerationAsk
    model: ServedModel
    id: str
    created_s: int
    extra: Json = field(default_factory=dict)
    """Fields beside the answer itself, of one in one piece."""

    # --- in one piece ---

    def whole(self, texts: Sequence[ChoiceText], choices: Sequence[Choice]) -> Json:
        """The complete response. With best_of the best choices of each prompt are shown, by mean logprob."""
        shown = self._shown(choices)
        write = self._chat_choice if self.ask.chat else self._text_choice
        body = self._head("chat.completion" if self.ask.chat else "text_completion")
        body["choices"] = [write(position, choices[index], texts[index]) for position, index in enumerate(shown)]
        body["usage"] = self.usage(choices)
        body |= self.extra
        if self.ask.chat and self.ask.return_token_ids:
            body["prompt_token_ids"] = list(self.ask.prompts[0].tokens)
        if self.ask.chat and self.ask.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(0, texts[0].prompt_logprobs)
        return body

    def _shown(self, choices: Sequence[Choice]) -> list[int]:
        if self.ask.drawn == self.ask.choices:
            return list(range(len(choices)))
        shown: list[int] = []
        for start in range(0, len(choices), self.ask.drawn):
            group = range(start, start + self.ask.drawn)
            ranked = sorted(group, key=lambda i: choices[i].logprob_sum / max(1, choices[i].completion_tokens), reverse=True)
            shown += ranked[: self.ask.choices]
        return shown

    def _chat_choice(self, position: int, choice: Choice, text: ChoiceText) -> Json:
        result: Json = {
            "index": position,
            "message": {"role": "assistant", "content": "".join(text.text), "refusal": None},
            "logprobs": self._chat_logprobs(text.logprobs) if self.ask.logprobs is not None else None,
        }
        return result | self._ending(text.finish) | self._token_ids(text.tokens)

    def _text_choice(self, position: int, choice: Choice, text: ChoiceText) -> Json:
        prompt_index = choice.index // self.ask.drawn
        echoed = self.prompt_text(prompt_index) if self.ask.echo else ""
        result: Json = {
            "index": position,
            "text": echoed + ("" if self.ask.scoring_only else "".join(text.text)),
            "logprobs": self._whole_text_logprobs(prompt_index, text) if self.ask.logprobs is not None else None,
        }
        result |= self._ending(text.finish) | self._token_ids([] if self.ask.scoring_only else text.tokens)
        if self.ask.return_token_ids:
            result["prompt_token_ids"] = list(self.ask.prompts[prompt_index].tokens)
        if self.ask.prompt_logprobs is not None:
            result["prompt_logprobs"] = self._prompt_logprobs(prompt_index, text.prompt_logprobs)
        return result

    def _whole_text_logprobs(self, prompt_index: int, text: ChoiceText) -> Json:
        generated = [] if self.ask.scoring_only else _named(text.logprobs)
        if not self.ask.echo:
            return self.text_logprobs(generated, 0)
        tokens = self.ask.prompts[prompt_index].tokens
        return self.text_logprobs([*_aligned(tokens, text.prompt_logprobs), *generated], 0)

    # --- in chunks ---

    def chunk(self, choices: Iterable[Json], usage: Json | None = None) -> Json:
        body = self._head("chat.completion.chunk" if self.ask.chat else "text_completion")
        body["choices"] = list(choices)
        if self.ask.include_usage or self.ask.continuous_usage:
            body["usage"] = usage
        return body

    def template(self, index: int) -> tuple[bytes, ...] | None:
        """A content chunk of one choice as an event, without its text (and its padding, if there is any): what goes around them.
        None where chunks hold more than text."""
        ask = self.ask
        if ask.logprobs is not None or ask.return_token_ids or ask.continuous_usage or ask.echo or ask.scoring_only:
            return None
        text, padding = secrets.token_hex(16), secrets.token_hex(16)
        chunk = self.chunk([self.delta_choice(Delta(index, text), 0, with_echo=False)])
        if ask.obfuscate:
            chunk["obfuscation"] = padding
        around, event = [], as_event(chunk)
        for mark in (text, padding) if ask.obfuscate else (text,):
            before, event = event.split(msgspec.json.encode(mark))
            around.append(before)
        return (*around, event)

    def first_chunk(self, index: int) -> Json:
        """A chat choice opens with its role."""
        opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        body = self.chunk([opening])
        if self.ask.return_token_ids:
            body["prompt_token_ids"] = list(self.ask.prompts[0].tokens)
        return body

    def delta_choice(self, delta: Delta, text_offset: int, *, with_echo: bool) -> Json:
        """A content chunk's choice. `text_offset` is where the delta's text begins in the choice's text."""
        return self._chat_delta(delta) if self.ask.chat else self._text_delta(delta, text_offset, with_echo)

    def _chat_delta(self, delta: Delta) -> Json:
        result: Json = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": self._chat_logprobs(delta.logprobs) if self.ask.logprobs is not None else None,
            "finish_reason": None,
        }
        return result | self._token_ids(delta.tokens)

    def _text_delta(self, delta: Delta, text_offset: int, with_echo: bool) -> Json:
        prompt_index = delta.index // self.ask.drawn
        text, entries = ("", []) if self.ask.scoring_only else (delta.text, _named(delta.logprobs))
        if with_echo:
            text = self.prompt_text(prompt_index) + text
            entries = [*_aligned(self.ask.prompts[prompt_index].tokens, delta.prompt_logprobs), *entries]
        result: Json = {
            "index": delta.index,
            "text": text,
            "logprobs": self.text_logprobs(entries, text_offset) if self.ask.logprobs is not None else None,
            "finish_reason": None,
        }
        if with_echo and self.ask.return_token_ids:
            result["prompt_token_ids"] = list(self.ask.prompts[prompt_index].tokens)
        return result | self._token_ids(delta.tokens)

    def last_choice(self, index: int, finish: Finish) -> Json:
        """The chunk that only says why it ended."""
        nothing: Json = {"delta": {}} if self.ask.chat else {"text": ""}
        return {"index": index, **nothing, "logprobs": None, **self._ending(finish)}

    # --- parts ---

    def usage(self, choices: Sequence[Choice]) -> Json:
        """Prompts are counted once, answers each. What was written is the prompt's full pages that were not cached already."""
        firsts = choices[:: self.ask.drawn]
        prompt_tokens = sum(len(prompt.tokens) for prompt in self.ask.prompts)
        completion_tokens = 0 if self.ask.scoring_only else sum(choice.completion_tokens for choice in choices)
        cached_tokens = sum(choice.cached_tokens for choice in firsts)
        page = self.model.report.page_tokens
        written = sum(max(0, len(c.request.prompt_tokens) // page * page - c.cached_tokens) for c in firsts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": written, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def prompt_text(self, prompt_index: int) -> str:
        prompt = self.ask.prompts[prompt_index]
        return prompt.text if prompt.text is not None else self.model.tokenizer.decode(prompt.tokens)

    def text_logprobs(self, entries: Sequence[tuple[int, TokenLogprobs | None]], offset: int) -> Json:
        """The four parallel arrays of /v1/completions. An entry without logprobs is the first token of a prompt."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, known in entries:
            text = self.model.tokenizer.text_of(token)
            tokens.append(self._name(token, text))
            token_logprobs.append(None if known is None else _number(known.logprob))
            top.append(None if known is None else self._top_logprobs(known))
            offsets.append(offset)
            offset += len(text)
        return {"tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top, "text_offset": offsets}

    def _top_logprobs(self, known: TokenLogprobs) -> dict[str, float]:
        """By text, as OpenAI has it: the token itself is always among them. Of two tokens with one text the likelier one counts."""
        pairs = [(known.token, known.logprob), *reversed(known.top)] if known.top else []
        return {self._name(token): _number(logprob) for token, logprob in pairs}

    def _chat_logprobs(self, entries: Sequence[TokenLogprobs]) -> Json:
        content = []
        for entry in entries:
            top = [self._chat_token(token, logprob) for token, logprob in entry.top]
            content.append({**self._chat_token(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> Json:
        return {"token": self._name(token), "logprob": _number(logprob), "bytes": list(self.model.tokenizer.bytes_of(token))}

    def _prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> list[Json | None]:
        """vLLM's shape: by token id, the prompt's own token always among them. Ranks count from 1; 0 is "beyond the ones asked for"."""
        result: list[Json | None] = []
        for entry in entries:
            if entry is None:
                result.append(None)
                continue
            ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
            ranked.setdefault(entry.token, (entry.logprob, 0))
            text_of = self.model.tokenizer.text_of
            result.append({str(t): {"logprob": _number(p), "rank": rank, "decoded_token": text_of(t)} for t, (p, rank) in ranked.items()})
        return result

    def _name(self, token: int, text: str | None = None) -> str:
        if self.ask.tokens_as_ids:
            return f"token_id:{token}"
        return self.model.tokenizer.text_of(token) if text is None else text

    def _token_ids(self, tokens: Sequence[int]) -> Json:
        return {"token_ids": list(tokens)} if self.ask.return_token_ids else {}

    def _ending(self, finish: Finish | None) -> Json:
        return {
            "finish_reason": finish.reason.value if finish is not None else None,
            "stop_reason": finish.stopped_by if finish is not None else None,
        }

    def _head(self, kind: str) -> Json:
        head: Json = {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model.name,
            "system_fingerprint": f"kvseal-{self.model.report.kv_format}",
        }
        if self.ask.service_tier is not None:
            head["service_tier"] = "default"  # What was really done, whatever tier was asked for.
        return head


def as_event(chunk: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def obfuscation(text_chars: int) -> str:
    """Padding that hides the length of a token from whoever watches the size of packets."""
    padding = OBFUSCATION_STEP_CHARS - text_chars % OBFUSCATION_STEP_CHARS
    return secrets.token_urlsafe(OBFUSCATION_STEP_CHARS)[:padding]


def _named(entries: Sequence[TokenLogprobs]) -> list[tuple[int, TokenLogprobs | None]]:
    return [(entry.token, entry) for entry in entries]


def _aligned(tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[tuple[int, TokenLogprobs | None]]:
    """Each prompt token with its logprobs, or with None where there are none."""
    known = [*entries, *[None] * (len(tokens) - len(entries))]
    return list(zip(tokens, known, strict=False))


def _number(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN compares false and becomes the lowest, too.
