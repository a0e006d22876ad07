"""What a sequence says to the step that computes it, and to the world after it.

Owns the making of rows and events one by one, for all who do not simply decode (`decoders`), and the proof that results are those of a
batch (L6). Decides nothing.
"""

from __future__ import annotations

from operator import itemgetter

from kvseal.core.batch import Batch, BatchResult, Row, RowResult
from kvseal.core.errors import LawBroken
from kvseal.core.events import TokensEvent
from kvseal.core.laws import Law
from kvseal.core.outcome import Completed, FinishReason
from kvseal.sched.sequence import Sequence

_ID = itemgetter(0)
"""The request's id in a `Row` and in a `RowResult`."""


def rows_of(batch: Batch | None, result: BatchResult) -> tuple[Row, ...]:
    """The rows that these are the results of. Raises `LawBroken` (L6) unless each bears the id of its own."""
    if batch is None or result.step != batch.step or len(result.rows) != len(batch.rows):
        raise LawBroken(Law.L6, "the result is not that of the batch in flight")
    if list(map(_ID, batch.rows)) != list(map(_ID, result.rows)):
        raise LawBroken(Law.L6, "a result row bears another request's id than its batch row")
    return batch.rows


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
