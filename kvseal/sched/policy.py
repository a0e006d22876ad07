"""Who goes first, who gives way, and how much room to keep for growth.

Owns the arithmetic of fairness and of admission. Pure: numbers in, numbers out. Never knows a page's name or a token's value beyond
comparing two prompts for equality.

Order. Each request gets one key for life: its arrival number plus `AGEING_ARRIVALS` for every step of priority. With every arrival all who
wait grow older, so a request of class p can be overtaken by at most (p - q) * AGEING_ARRIVALS later arrivals of a better class q, whatever
the load, and by none of its own class: priorities are clamped to +-MAX_PRIORITY, which bounds the sum. The same key picks the victim when
pages run short: the last in order gives way, so the first in order always progresses, and nobody is preempted by a later one.
The one exception to the order is a request that waits to share another's prefill (see `scheduler`): at most `MAX_OVERTAKEN` may pass it.

Growth. A request's `max_output_tokens` is a promise to the client, not a forecast (it is often thousands and rarely reached). The forecast
is drawn from the lengths that recent requests really had, given what this one has already produced. Admission asks for the peak of all
forecasts together: pages return when the short ones end, before the long ones have grown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

MAX_PRIORITY = 10
AGEING_ARRIVALS = 32
MAX_OVERTAKEN = 8
HISTORY_LENGTHS = 512
_PRIOR_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
_GOLDEN = 0.6180339887498949
_CAUTION = 0.6
"""Lowest quantile of a forecast; 0.6 gave the highest rate over seven windows of ShareGPT lengths in `bench.admission`'s model."""
_SHARE_AT_LEAST_TOKENS = 16
COMPANY_ARRIVALS = 2048
"""Nobody is passed by company that arrived so much later: more than the waiting line usually holds, and yet a bound."""


def order_key(arrival: int, priority: int) -> tuple[int, int]:
    """Lower runs first. Unique, because arrivals are."""
    clamped = max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))
    return arrival + AGEING_ARRIVALS * clamped, arrival


class LengthHistory:
    """Output lengths of the last `HISTORY_LENGTHS` requests that ended, sorted; O(log n) to look up."""

    def __init__(self, prior: Iterable[int] = _PRIOR_LENGTHS) -> None:
        self._recent = deque(prior)
        self._sorted = sorted(self._recent)
        self._prior = len(self._recent)

    def add(self, output_tokens: int) -> None:
        """The prior goes first, one entry for each real length; later the oldest real one."""
        insort(self._sorted, output_tokens)
        self._recent.append(output_tokens)
        if self._prior or len(self._recent) > HISTORY_LENGTHS:
            self._prior = max(0, self._prior - 1)
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def remaining(self, produced_tokens: int, most_tokens: int, arrival: int) -> int:
        """Forecast of the tokens still to come, at most `most_tokens`.

        Each request stands at its own fixed quantile of the lengths that are longer than what it has produced. The quantiles cover the
        range from `_CAUTION` to 1 evenly (a golden-ratio sequence over arrivals, no randomness): on the long side,
        because a preemption costs more than a slot that waits. A request longer than all of them is expected to double.
        """
        longer = bisect_right(self._sorted, produced_tokens)
        left = len(self._sorted) - longer
        if not left:
            return min(most_tokens, max(1, produced_tokens))
        quantile = _CAUTION + (1.0 - _CAUTION) * ((arrival * _GOLDEN) % 1.0)
        index = longer + min(left - 1, int(left * quantile))
        return min(most_tokens, self._sorted[index] - produced_tokens)


def peak_growth_tokens(forecasts: Iterable[tuple[int, int]]) -> int:
    """Most additional token slots that all sequences together will need at any later time.

    `forecasts` holds (remaining, held) for each sequence: it grows by one slot a step for `remaining` steps, then gives back `held` slots
    and all that it grew by. O(n log n). The peak stands right before one of the ends.
    """
    in_order = sorted(forecasts)
    alive = len(in_order)
    given_back = peak = 0
    for remaining, held in in_order:
        peak = max(peak, alive * remaining - given_back)
        alive -= 1
        given_back += held
    return peak


def shared_tokens(one: Sequence[int], other: Sequence[int], page_tokens: int) -> int:
    """Length of the common prefix in whole pages, by exact comparison. O(log(n) slices); O(page) when the first page differs."""
    low, high = 0, min(len(one), len(other)) // page_tokens
    if not high or one[:page_tokens] != other[:page_tokens]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * page_tokens, middle * page_tokens
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low * page_tokens


def may_pass(company: tuple[int, int], head: tuple[int, int]) -> bool:
    """Whether one who begins like what is cached may go before the head of the line; both by their `order_key`."""
    return company[0] - head[0] <= COMPANY_ARRIVALS


def worth_sharing(shared: int, cached: int) -> bool:
    """Whether waiting for another's prefill saves enough to be worth a step."""
    return shared - cached >= _SHARE_AT_LEAST_TOKENS
