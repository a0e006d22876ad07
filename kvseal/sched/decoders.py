"""All who decode, side by side.

Owns `Decoders`: what a step says of each of them in columns, one for each field of its row and of its event. Nearly all of it is the same
from step to step, so a step costs a few operations over whole columns and not a page of Python for each request. Made anew when who
decodes has changed. Decides nothing. Laws: L5 (committed before it is told), L6 (all columns are in the order of the rows).
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from itertools import repeat

from kvseal.core.batch import Row, RowResult
from kvseal.core.events import Event, TokensEvent
from kvseal.kv.manager import Grant, KVManager
from kvseal.sched.sequence import Sequence

_new_tuple = tuple.__new__
"""``_new_tuple(Row, fields)`` is ``Row(*fields)`` in a third of the time, and can be mapped over columns."""


class Decoders:
    def __init__(self, sequences: Several[Sequence], page_tokens: int) -> None:
        """All of them `Decoding`."""
        self.sequences = sequences
        self.grants: list[Grant] = [sequence.grant for sequence in sequences]
        self.starts = [grant.table.valid_tokens for grant in self.grants]
        """Where the token of this step stands."""
        self._ids = [sequence.request_id for sequence in sequences]
        self._tables = [grant.table for grant in self.grants]
        self._samplings = [sequence.sampling for sequence in sequences]
        self._histories = [sequence.tokens for sequence in sequences]
        self._prompts = [sequence.prompt_tokens for sequence in sequences]
        self._cached = [sequence.cached_tokens or 0 for sequence in sequences]
        self.last: Several[int] = [tokens[-1] for tokens in self._histories]
        """The token of this step."""
        self._stops: frozenset[int] = frozenset().union(*{sequence.stop_token_ids for sequence in sequences})
        self._steps_left = min((sequence.last_tokens - len(sequence.tokens) for sequence in sequences), default=0)
        """Until the first of them has all its tokens."""
        self._step = 0
        self._page_tokens = page_tokens
        self._turns: list[list[Sequence]] = [[] for _ in range(page_tokens)]
        """By the steps from the first one until their next token begins a page."""
        for sequence, start in zip(sequences, self.starts, strict=True):
            self._turns[-start % page_tokens].append(sequence)

    def __len__(self) -> int:
        return len(self.sequences)

    def due(self) -> list[Sequence]:
        """Those whose token begins a page."""
        return self._turns[self._step % self._page_tokens]

    def rows(self) -> list[Row]:
        """All their tokens but the last are computed."""
        fields = zip(
            self._ids,
            zip(self.last, strict=False),  # each in a tuple of its own
            self.starts,
            self._tables,
            self._samplings,
            repeat(True),
            self._histories,
            self._prompts,
            strict=False,
        )
        return list(map(_new_tuple, repeat(Row), fields))

    def apply(self, kv: KVManager, results: Several[RowResult], events: list[Event]) -> Several[int] | None:
        """If each result is a token and no more than that: commits what was computed, moves everybody on by one token and tells of it;
        returns the tokens. Else None, and nothing has changed."""
        if not results:
            return ()
        _, tokens, logprobs, _, digests, broken, failed = zip(*results, strict=True)
        if not (logprobs.count(None) == broken.count(None) == failed.count(None) == len(results)) or None in tokens:
            return None
        kv.commit_each(self.grants, self.starts, self.last, digests)
        for history, token in zip(self._histories, tokens, strict=True):
            history.append(token)
        self.starts = [start + 1 for start in self.starts]
        self.last = tokens
        self._step += 1
        self._steps_left -= 1
        fields = zip(self._ids, zip(tokens, strict=False), repeat(()), repeat(()), self._cached, strict=False)
        events += map(_new_tuple, repeat(TokensEvent), fields)
        return tokens

    def may_end(self) -> bool:
        """Whether the last token can be the end of anybody."""
        return self._steps_left <= 0 or not self._stops.isdisjoint(self.last)
