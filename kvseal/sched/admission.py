"""Whether a waiting sequence may start now, and with how much room around it.

Owns the questions that are asked of the cache before anything is taken: what is cached already, what everybody will still need, and
whether another's prefill is worth waiting for. Moves no sequence: the scheduler does. Law L1: all or nothing, after looking.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from kvseal.kv.manager import Grant, KVManager
from kvseal.kv.prefix_key import PackedTokens
from kvseal.sched import policy
from kvseal.sched.line import WaitingLine
from kvseal.sched.sequence import Prefilling, Sequence


class Admission:
    def __init__(self, kv: KVManager, page_tokens: int) -> None:
        self.lengths = policy.LengthHistory()
        self._kv = kv
        self._page_tokens = page_tokens

    def next(self, line: WaitingLine, leader: Sequence | None) -> Sequence | None:
        """The head of the line; or, when pages are too few for all who wait, whoever begins most like `leader`, the last one that was
        admitted, so that what is cached is used before it has to give way. Priority and `policy.may_pass` bound who passes the head."""
        head = line.first()
        if head is None or leader is None or line.tokens <= self._kv.free_pages * self._page_tokens:
            return head
        company = line.company.closest(leader)
        if company is None or company.request.priority > head.request.priority or not policy.may_pass(company.key, head.key):
            return head
        return company

    def ask(self, sequence: Sequence, running: Several[Sequence], prefilling: int, left: int) -> Grant | None:
        """Pages for what `left` tokens of budget can compute of it, if enough stays for the growth of all; else None, nothing taken."""
        reuse = self.reuses(sequence)
        new_tokens = len(sequence.tokens) - (self._probe(sequence) if reuse else 0)
        first_tokens = min(new_tokens, left)
        return self._kv.admit(
            sequence.request_id,
            sequence.request.scope,
            self._packed(sequence),
            first_tokens=first_tokens,
            reuse=reuse,
            reserve_pages=self._reserve_pages(sequence, running, prefilling, new_tokens - first_tokens),
        )

    def _packed(self, sequence: Sequence) -> PackedTokens:
        if sequence.packed is None:
            sequence.packed = self._kv.pack(sequence.tokens)
        return sequence.packed

    def _probe(self, sequence: Sequence) -> int:
        return self._kv.probe(sequence.request.scope, self._packed(sequence))

    def _reserve_pages(self, candidate: Sequence, running: Several[Sequence], prefilling: int, later_tokens: int) -> int:
        """Pages to leave for what is known to come (prompts not yet computed, `later_tokens` of the candidate's) and for the forecast
        growth of all. 0 when nobody runs: the first always starts."""
        if not running:
            return 0
        forecasts = [self._forecast(sequence) for sequence in running]
        forecasts.append(self._forecast(candidate))
        known = later_tokens
        if prefilling:
            known += sum(max(0, len(sequence.tokens) - sequence.room_tokens) for sequence in running)
        return -(-(known + policy.peak_growth_tokens(forecasts)) // self._page_tokens)

    def _forecast(self, sequence: Sequence) -> tuple[int, int]:
        produced = sequence.output_tokens
        most = sequence.max_output_tokens - produced
        if sequence.sampling.stop_token_ids:
            most = self.lengths.remaining(produced, most, sequence.arrival)
        return most, len(sequence.tokens) - (sequence.cached_tokens or 0)

    def reuses(self, sequence: Sequence) -> bool:
        """Prompt logprobs need every prompt position computed: until they are complete, nothing is read from the cache."""
        return not sequence.needs_prompt_logprobs

    def shares_prefill(self, sequence: Sequence, running: Several[Sequence]) -> bool:
        """Whether to wait for the prefill of another that begins with the same tokens: of one other, and no second."""
        if sequence.overtaken >= policy.MAX_OVERTAKEN or not self.reuses(sequence):
            return False
        first = sequence.deferred_to
        for other in running if first is None else (first,):
            if type(other.state) is not Prefilling or other.request.scope != sequence.request.scope:
                continue
            shared = policy.shared_tokens(sequence.tokens, other.tokens, self._page_tokens)
            if shared <= other.computed_tokens:
                continue
            if policy.worth_sharing(shared, self._probe(sequence)):
                sequence.deferred_to = other
                return True
        return False
