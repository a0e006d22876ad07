"""The fields of our requests, and what we do with those that we do not serve.

Owns the typed bodies (msgspec) and the tables of refused and unserved fields. Nulls are legal for every optional field. Semantics and
bounds are `parse`'s. Field names follow OpenAI's, and vLLM's for extensions.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    """What both kinds of completion share."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    user: str | None = None
    service_tier: str | None = None


class ChatBody(_Common, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class CompletionBody(_Common, kw_only=True):
    prompt: str | list[Any]
    """A string, strings, token ids, or lists of token ids."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "grammar": (),
    "audio": (),
    "prediction": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "lora_path": (),
    "documents": ([],),
    "prompt_embeds": (),
    "logits_processors": ([],),
}
"""Fields that would change the answer and that we do not compute, with the values that ask for nothing. Null asks for nothing, too."""

FORBIDDEN_FIELDS = ("chat_template", "kv_transfer_params")
"""Fields that are the operator's alone."""

UNSERVED_FIELDS = (
    "metadata",
    "safety_identifier",
    "parallel_tool_calls",
    "verbosity",
    "prompt_cache_options",
    "prompt_cache_retention",
    "spaces_between_special_tokens",
    "separate_reasoning",
)
"""Known fields that change no token of the answer here. Listed in the response header when given, and legal under --strict-fields."""
