"""What a sequence says to the step that computes it, and to the world after it.

Owns the making of rows and token events. Both are tuples made without their class's constructor: there is one of each for every running
request and step, and the constructor of a named tuple takes longer than all the rest of what is done for it. Decides nothing.
"""

from __future__ import annotations

from kvseal.core.batch import Row, RowResult
from kvseal.core.events import TokensEvent
from kvseal.core.outcome import Completed, FinishReason
from kvseal.kv.manager import Grant
from kvseal.sched.sequence import Sequence

new_tuple = tuple.__new__
"""``new_tuple(Row, (...))`` is ``Row(...)`` in a third of the time."""


def decode_row(sequence: Sequence, grant: Grant) -> Row:
    """All its tokens but the last are computed."""
    tokens = sequence.tokens
    return new_tuple(
        Row,
        (
            sequence.request_id,
            (tokens[-1],),
            sequence.computed_tokens,
            grant.table,
            sequence.sampling,
            True,
            tokens,
            sequence.prompt_tokens,
        ),
    )


def chunk_row(sequence: Sequence, end: int) -> Row:
    """From what is computed up to `end`."""
    tokens, start = sequence.tokens, sequence.computed_tokens
    return Row(
        sequence.request_id,
        tokens[start:end],
        start,
        sequence.grant.table,
        sequence.sampling,
        end == len(tokens),
        tokens,
        sequence.prompt_tokens,
    )


def full_event(sequence: Sequence, token: int, out: RowResult) -> TokensEvent:
    """With all that there may be to tell. `token` is the sequence's last one already."""
    logprobs = () if out.logprobs is None else (out.logprobs,)
    prompt_logprobs = tuple(sequence.prompt_logprobs) if sequence.output_tokens == 1 else ()
    return TokensEvent(sequence.request_id, (token,), logprobs, prompt_logprobs, sequence.cached_tokens or 0)


def completion(sequence: Sequence, token: int) -> Completed | None:
    """Whether this last token ends it: by what it is, or by how many there are."""
    produced = sequence.output_tokens
    if token in sequence.stop_token_ids and produced > sequence.sampling.min_tokens:
        return Completed(FinishReason.STOP, sequence.usage, token)
    if produced >= sequence.max_output_tokens:
        return Completed(FinishReason.LENGTH, sequence.usage)
    return None
