"""One request on its way: its tokens, how many of them are computed, and a state that holds exactly what it may touch.

Owns `Sequence` and its states. Never talks to the cache: a transition hands the grant back to the caller, who gives it up. Law L11: only
the transitions drawn here exist, and `Ended` is absorbing; anything else is `LawBroken`.

::

    Waiting --------admit-------> Prefilling --decode--> Decoding
       ^ |                          ^  |                    |
       | |--receive--> Received --admit|                    |
       | |                |            |                    |
       |-+----preempt-----+------------+--------------------|
         v                v            v                    v
         +--------------> Ended <------+--------------------+

While another node's pages are on their way there is no sequence here: they belong to the hand-off until its receipt (L9).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Several
from dataclasses import dataclass

from kvseal.core.batch import TokenLogprobs
from kvseal.core.errors import LawBroken
from kvseal.core.ids import Scope
from kvseal.core.laws import Law
from kvseal.core.outcome import Outcome, Usage
from kvseal.core.request import Request
from kvseal.kv.manager import Grant
from kvseal.kv.prefix_key import PackedTokens, pack_tokens


@dataclass(frozen=True, slots=True)
class Waiting:
    """Holds nothing."""


@dataclass(frozen=True, slots=True)
class Received:
    """It waits, with pages that came from another node and have been proven."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Prefilling:
    """More than one of its tokens is not computed yet."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Decoding:
    """All tokens but the last are computed; each step adds one."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Ended:
    outcome: Outcome


State = Waiting | Received | Prefilling | Decoding | Ended
Holding = Received | Prefilling | Decoding

WAITING = Waiting()


class Sequence:
    """Mutable; moved by the scheduler alone."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "deferred_to",
        "key",
        "last_tokens",
        "line_entry",
        "lost_tokens",
        "max_output_tokens",
        "overtaken",
        "packed",
        "prompt_logprobs",
        "prompt_tokens",
        "request",
        "request_id",
        "sampling",
        "starts",
        "state",
        "stop_token_ids",
        "tokens",
    )

    def __init__(self, request: Request, arrival: int, key: tuple[int, int], answer: Several[int] = ()) -> None:
        """`answer`: tokens of its output that are known already."""
        self.request = request
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.max_output_tokens = request.max_output_tokens
        self.arrival = arrival
        self.key = key
        """Fair order: the smaller runs first, see `policy.order_key`."""
        self.state: State = WAITING
        self.stop_token_ids = request.sampling.stop_token_ids
        self.packed: PackedTokens | None = pack_tokens(request.prompt_tokens)
        """Its tokens in the form that the cache compares; gone while it runs, made again after a preemption."""
        self.tokens = array("I", self.packed.data)
        """Prompt and output, typecode 'I', so that nobody below needs to convert them."""
        self.prompt_tokens = len(self.tokens)
        if answer:
            self.tokens.extend(answer)
            self.packed = None
        self.last_tokens = self.prompt_tokens + request.max_output_tokens
        """So many tokens are its end, whatever they are."""
        self.cached_tokens: int | None = None
        """Prompt tokens found in the cache at the first admission; None before it."""
        self.lost_tokens = 0
        """Computed tokens that the last preemption gave up."""
        self.overtaken = 0
        self.deferred_to: Sequence | None = None
        """The sequence whose prefill it once waited for, to share it."""
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.line_entry = 0
        """Which entry of the waiting line is its own; 0 when it has none."""
        self.starts: tuple[tuple[Scope, int, int], ...] = ()
        """How it begins, as `company` knows it."""

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """What its grant calls valid: no second count that could differ (L5)."""
        state = self.state
        return 0 if isinstance(state, Waiting | Ended) else state.grant.table.valid_tokens

    @property
    def room_tokens(self) -> int:
        """Positions below this have a page."""
        state = self.state
        return 0 if isinstance(state, Waiting | Ended) else state.grant.room_tokens

    @property
    def pending_tokens(self) -> int:
        return len(self.tokens) - self.computed_tokens

    @property
    def ended(self) -> bool:
        return type(self.state) is Ended

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.output_tokens, self.cached_tokens or 0)

    @property
    def grant(self) -> Grant:
        state = self.state
        if isinstance(state, Waiting | Ended):
            raise LawBroken(Law.L11, f"request {self.request_id} holds no pages while {type(state).__name__}")
        return state.grant

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Asked for, and not complete: then every prompt position has to be computed."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) != self.prompt_tokens

    def collect_prompt_logprobs(self, start: int, found: Several[TokenLogprobs | None]) -> None:
        """Of a chunk that begins at `start`."""
        if self.needs_prompt_logprobs:
            if start == 0:
                self.prompt_logprobs = [None]
            self.prompt_logprobs += found

    # --- transitions ---

    def admit(self, grant: Grant) -> None:
        """With new pages, or with those that it has waited with."""
        state = self.state
        if not isinstance(state, Waiting) and not (isinstance(state, Received) and state.grant is grant):
            raise self._undrawn("admit")
        self._hold(Prefilling(grant))

    def receive(self, grant: Grant) -> None:
        """The receipt is complete and committed (L9): so many tokens are valid."""
        if not isinstance(self.state, Waiting):
            raise self._undrawn("receive")
        self._hold(Received(grant))

    def decode(self) -> None:
        state = self.state
        if not isinstance(state, Prefilling):
            raise self._undrawn("decode")
        self.state = Decoding(state.grant)

    def preempt(self) -> Grant:
        """Back to the waiting line. The caller gives the grant up."""
        grant = self.grant
        self.lost_tokens = self.computed_tokens
        self.state = WAITING
        return grant

    def end(self, outcome: Outcome) -> Grant | None:
        """Absorbing. The caller gives the grant up, if there is one."""
        state = self.state
        if isinstance(state, Ended):
            raise LawBroken(Law.L11, f"request {self.request_id} ended twice")
        self.state = Ended(outcome)
        return None if isinstance(state, Waiting) else state.grant

    def _hold(self, state: Holding) -> None:
        self.state = state
        self.packed = self.deferred_to = None

    def _undrawn(self, move: str) -> LawBroken:
        return LawBroken(Law.L11, f"request {self.request_id} cannot {move}: it is {type(self.state).__name__}")
