"""One request that runs on up to two nodes, and the one stream that its reader sees.

Owns the joining of the legs. Both nodes tell the token after the prompt: the one that computed the prompt first, the other when it has got
it with the pages, or has computed it itself because they did not come. The reader gets whichever comes first (so a hand-off costs nothing
until the second token), and the second copy must be the same token: law L13 makes any difference a fault, and the request fails.
Laws: L11 (one end, nothing behind it), L12.

Never places and never sends: the router does, told by the outcome of `event`.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

from kvseal.core.errors import Draining, EngineDied, KVTransferFailed, Overloaded, RequestError
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Completed, Failed, FinishReason, Outcome, Refused
from kvseal.core.request import Request
from kvseal.node.node_client import NodeClient

DIFFER = "two nodes computed different tokens for the same request, so neither can be trusted (law L13); the request was stopped"


class Next(Enum):
    """What the router must do after an event."""

    NOTHING = auto()
    DONE = auto()
    """The stream has ended: forget the request, cancel what still runs of it."""
    PREFILLED = auto()
    """The prompt is computed: its node owes no more work."""
    NOT_HANDED_OVER = auto()
    """Tell the decode node that the prompt will not come."""
    PLACE_AGAIN = auto()
    """Nothing has been emitted and the node cannot go on: another may."""


class Share(Protocol):
    """A leg, as far as it is used here: `node_client.Leg`."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def ended(self) -> bool: ...

    def cancel(self) -> None: ...

    def finish(self) -> None: ...


class Reader(Protocol):
    """`client.RequestStream`, as far as it is used here."""

    @property
    def ended(self) -> bool: ...

    def put(self, event: Event) -> None: ...

    def end(self, outcome: Outcome) -> None: ...


class SplitRequest:
    """`early`: the first token is emitted before the hand-off has succeeded, which is right when a failure means recomputing."""

    def __init__(self, request: Request, stream: Reader, keys: list[bytes], *, early: bool) -> None:
        self.request = request
        self.stream = stream
        self.keys = keys
        """Of the full pages of its prompt, short."""
        self.attempt = 0
        self.handoff = ""
        self.prefill: Share | None = None
        self.decode: Share | None = None
        self.prefill_node: NodeClient | None = None
        self.decode_node: NodeClient | None = None
        self.prefilling = False
        """The prompt is being computed on `prefill_node`."""
        self.output: list[int] = []
        """Emitted so far."""
        self.differed = False
        self.completed = False
        self.cancelled = False
        self._early = early
        self._seen = 0
        """Tokens that the present decode leg has told."""
        self._first: TokensEvent | None = None
        """What the prefill node said, while it is held back."""
        self._cached_tokens: int | None = None

    @property
    def ended(self) -> bool:
        return self.stream.ended

    @property
    def answering(self) -> bool:
        """The node that answers has told a token: whatever it waited for has arrived, or is not needed."""
        return self._seen > 0

    def begin(self) -> None:
        """A new attempt: both legs are new."""
        self.attempt += 1
        self.prefill = self.decode = None
        self._first, self._seen, self._cached_tokens = None, 0, None

    def end(self, outcome: Outcome) -> Next:
        self.completed = isinstance(outcome, Completed)
        self.stream.end(outcome)
        return Next.DONE

    def event(self, leg: Share, event: Event) -> Next:
        """Something from one of the legs. Legs of earlier attempts have nothing to say."""
        if self.ended:
            return Next.NOTHING
        if leg is self.decode:
            return self._decode_ended(event.outcome) if isinstance(event, EndedEvent) else self._decoded(event)
        if leg is self.prefill:
            return self._prefill_ended(event.outcome) if isinstance(event, EndedEvent) else self._prefilled(event)
        return Next.NOTHING

    # --- the node that computes the prompt ---

    def _prefilled(self, event: TokensEvent) -> Next:
        self._cached_tokens = event.cached_tokens
        if self.decode is None or self._early or event.tokens[0] in self.request.sampling.stop_token_ids:
            if self.output:  # The other node was faster.
                return self._same(event.tokens[0], 0)
            return self._emit(event)
        self._first = event
        return Next.NOTHING

    def _prefill_ended(self, outcome: Outcome) -> Next:
        if self.decode is None:
            return self._ended_alone(outcome)
        match outcome:
            case Completed(reason, _, _) if reason is FinishReason.STOP or self.request.max_output_tokens == 1:
                return self.end(outcome)
            case Completed():
                return Next.PREFILLED
            case Refused(RequestError()):
                return self.end(outcome)
            case Failed(error) if not isinstance(error, EngineDied):
                return self.end(outcome)
            case _:
                return Next.NOT_HANDED_OVER

    # --- the node that answers ---

    def _decoded(self, event: TokensEvent) -> Next:
        first, self._seen = self._seen, self._seen + len(event.tokens)
        for place, token in enumerate(event.tokens):
            at = first + place
            if at < len(self.output):
                if self._same(token, at) is Next.DONE:
                    return Next.DONE
                continue
            if at == 0 and self._first is not None:
                held, self._first = self._first, None
                self._emit(held)
                if self._same(token, 0) is Next.DONE:
                    return Next.DONE
                continue
            rest = event._replace(tokens=event.tokens[place:], logprobs=event.logprobs[place:])
            return self._emit(rest)
        return Next.NOTHING

    def _decode_ended(self, outcome: Outcome) -> Next:
        if isinstance(outcome, Completed) and self._cached_tokens is not None:
            outcome = replace(outcome, usage=replace(outcome.usage, cached_tokens=self._cached_tokens))
        return self._ended_alone(outcome)

    def _ended_alone(self, outcome: Outcome) -> Next:
        """The end of the leg that the answer comes from."""
        again = isinstance(outcome, Failed | Refused) and isinstance(outcome.error, EngineDied | Draining | Overloaded)
        if again and not self.output and not self.cancelled:
            return Next.PLACE_AGAIN
        return self.end(outcome)

    # --- the reader ---

    def _emit(self, event: TokensEvent) -> Next:
        self.output += event.tokens
        cached = event.cached_tokens if self._cached_tokens is None else self._cached_tokens
        self.stream.put(event._replace(request_id=self.request.request_id, cached_tokens=cached))
        return Next.NOTHING

    def _same(self, token: int, place: int) -> Next:
        if self.output[place] == token:
            return Next.NOTHING
        self.differed = True
        return self.end(Failed(KVTransferFailed(DIFFER)))
