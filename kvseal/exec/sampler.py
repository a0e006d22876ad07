"""One row of logits becomes one token.

Owns the order of the sampling steps and the random draw. Never keeps state between calls: the token depends on the logits, the
parameters, the row's own history and (seed, output index) alone, whatever else was in the batch (L13). Logits that are not finite end
their request with `SamplingFailed`; they never become a token.

Steps, in this order; neutral parameters skip a step:

1. `allowed_token_ids`: all others are out.
2. `logit_bias`: added.
3. `repetition_penalty`, over prompt and output: positive logits are divided by it, negative ones multiplied (CTRL, arXiv 1909.05858).
4. `frequency_penalty` per occurrence and `presence_penalty` once, over the output: subtracted (as OpenAI documents them).
5. `min_tokens`: stop ids are out until reached.
6. `temperature`: 0 takes the highest logit, the lower id among equals, and ends here; else logits are divided by it.
7. `top_k`: the k highest (and their equals) stay.
8. `top_p`: the fewest most likely ones that hold this share of what step 7 left stay (and the last one's equals).
9. `min_p`: those at least this fraction as likely as the likeliest stay.
10. The draw: a uniform number of (seed, output index) selects from the cumulative distribution in order of token ids.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvseal.core.batch import TokenLogprobs
from kvseal.core.errors import SamplingFailed
from kvseal.core.request import SamplingParams

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

NATS = 8.0
"""How far below the highest value candidates are first looked for; twice as far each time they do not suffice. So nothing ever sorts a
whole vocabulary unless its distribution is nearly flat."""
SMALLEST_TEMPERATURE = 1e-4
"""Below it everything but the highest logit has no weight left in float32."""
NOT_FINITE = "the model's output is not finite at this position; the request was stopped before a token was chosen"
RULED_OUT = "every token is ruled out (allowed_token_ids, stop ids before min_tokens); none can be chosen"
BLOCK = 256
"""Tokens whose weights are summed together in a draw from the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None


def sample(logits: Float32, params: SamplingParams, *, history: Sequence[int], prompt_tokens: int, output_index: int) -> Sampled:
    """[vocab_size] -> token. `history` is prompt and output so far. Raises SamplingFailed."""
    best = int(logits.argmax())
    if not (math.isfinite(logits[best]) and math.isfinite(logits.min())):
        raise SamplingFailed(NOT_FINITE)
    if not is_plain_greedy(params, output_index):
        values, ids = _adjusted(logits, params, history, prompt_tokens, output_index)
        best = _choose(values, ids, params, output_index)
    return Sampled(best, None if params.logprobs is None else token_logprobs(logits, best, params.logprobs))


def uniform(seed: int, output_index: int) -> float:
    """A number in [0, 1), the same for the same pair on every machine: 53 bits of a keyed hash of the counter."""
    digest = hashlib.blake2b(output_index.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def token_logprobs(logits: Float32, token: int, top: int) -> TokenLogprobs:
    """Natural log-probabilities of `token` and of the `top` likeliest tokens, under the softmax of the raw logits."""
    highest = logits.max()
    log_total = float(highest) + math.log(float(np.exp(logits - highest).sum())) if math.isfinite(highest) else math.nan
    if not math.isfinite(log_total):
        raise SamplingFailed(NOT_FINITE)
    likeliest = _highest(logits, min(top, len(logits))) if top else ()
    return TokenLogprobs(token, float(logits[token]) - log_total, tuple((int(i), float(logits[i]) - log_total) for i in likeliest))


def is_plain_greedy(params: SamplingParams, output_index: int) -> bool:
    """Whether the highest of the raw logits is the token."""
    return (
        params.temperature == 0
        and params.repetition_penalty == 1
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and not params.logit_bias
        and params.allowed_token_ids is None
        and output_index >= params.min_tokens
    )


def _adjusted(
    logits: Float32, params: SamplingParams, history: Sequence[int], prompt_tokens: int, output_index: int
) -> tuple[Float32, Indices | None]:
    """Steps 1 to 5: values, and the token ids they belong to (None: all, in order)."""
    values = logits.copy()
    if params.logit_bias:
        values[np.fromiter(params.logit_bias.keys(), np.int64)] += np.fromiter(params.logit_bias.values(), np.float32)
    penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
    if params.repetition_penalty != 1 or penalised:
        seen = np.fromiter(history, np.int64, len(history))
        if params.repetition_penalty != 1:
            before, penalty = values[seen], np.float32(params.repetition_penalty)
            values[seen] = np.where(before > 0, before / penalty, before * penalty)
        if penalised:
            tokens, counts = np.unique(seen[prompt_tokens:], return_counts=True)
            values[tokens] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
    if output_index < params.min_tokens and params.stop_token_ids:
        values[np.fromiter(params.stop_token_ids, np.int64)] = -np.inf
    if params.allowed_token_ids is None:
        return values, None
    ids = np.unique(np.array(params.allowed_token_ids, dtype=np.int64))
    return values[ids], ids


def _choose(values: Float32, ids: Indices | None, params: SamplingParams, output_index: int) -> int:
    """Steps 6 to 10."""
    best = int(values.argmax())
    highest = values[best]
    if highest == -np.inf:
        raise SamplingFailed(RULED_OUT)
    if not math.isfinite(highest):
        raise SamplingFailed(NOT_FINITE)
    if params.temperature > 0:
        scaled = (values - highest) / np.float32(max(params.temperature, SMALLEST_TEMPERATURE))
        best = _draw(scaled, params, uniform(params.seed, output_index))
    return best if ids is None else int(ids[best])


def _draw(values: Float32, params: SamplingParams, point: float) -> int:
    """Steps 7 to 10. `values` are scaled logits below their maximum, 0."""
    if not (0 < params.top_k < len(values) or params.top_p < 1 or params.min_p > 0):
        return _draw_from_all(values, point)
    kept = _filtered(values, params)
    return int(kept[_place(np.exp(values[kept].astype(np.float64)), point)])


def _draw_from_all(values: Float32, point: float) -> int:
    """The same in two steps, block and token within it, so that long sums stay few."""
    weights = np.exp(values)
    edges = np.arange(0, len(weights), BLOCK)
    sums = np.add.reduceat(weights, edges).astype(np.float64)
    block = _place(sums, point)
    before = float(sums[:block].sum())
    inside = weights[edges[block] : edges[block] + BLOCK].astype(np.float64)
    share = (point * float(sums.sum()) - before) / float(sums[block])
    return int(edges[block]) + _place(inside, min(max(share, 0.0), 1.0 - 2.0**-53))


def _place(weights: Float64, point: float) -> int:
    """The first index at which the cumulative weight passes `point` of the whole; never one of weight 0."""
    cumulative = weights.cumsum()
    place = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
    return min(place, int(np.searchsorted(cumulative, cumulative[-1], side="left")))  # rounding at the far end


def _filtered(values: Float32, params: SamplingParams) -> Indices:
    """Steps 7 to 9: ids that stay, in order. Each step starts from a set of highest values that surely holds what it keeps."""
    kept: Indices | None = None
    if 0 < params.top_k < len(values):
        kept = _upper(values, params.top_k)
        chosen = values[kept]
        kept = kept[chosen >= np.partition(chosen, -params.top_k)[-params.top_k]]
    if params.top_p < 1:
        total = None
        if kept is None:
            kept, total = _upper_mass(values, params.top_p)
        kept = _nucleus(kept, values[kept], params.top_p, total)
    if params.min_p > 0:
        floor = np.float32(math.log(params.min_p))
        kept = np.flatnonzero(values >= floor) if kept is None else kept[values[kept] >= floor]
    return np.arange(len(values)) if kept is None else kept


def _nucleus(ids: Indices, values: Float32, share: float, total: float | None) -> Indices:
    """The fewest highest ones that hold `share` of `total` (None: of themselves), and the equals of the last one."""
    ordered = -np.sort(-values)
    cumulative = np.exp(ordered.astype(np.float64)).cumsum()
    target = share * (float(cumulative[-1]) if total is None else total)
    last = min(int(np.searchsorted(cumulative, target, side="left")), len(ordered) - 1)
    nucleus: Indices = ids[values >= ordered[last]]
    return nucleus


def _upper_mass(values: Float32, share: float) -> tuple[Indices, float]:
    """All values above some floor, holding at least `share` of the whole weight; and the whole weight."""
    weights = np.exp(values)
    total, depth = float(weights.sum()), NATS
    while depth < 16 * NATS:
        ids = np.flatnonzero(values >= -depth)
        if float(weights[ids].sum()) >= share * total:
            return ids, total
        depth *= 2
    return np.arange(len(values)), total


def _upper(values: Float32, count: int) -> Indices:
    """All values above some floor, at least `count` of them."""
    highest, depth = values.max(), NATS
    while depth < 16 * NATS:
        ids = np.flatnonzero(values >= highest - np.float32(depth))
        if len(ids) >= count:
            return ids
        depth *= 2
    return np.arange(len(values))


def _highest(logits: Float32, count: int) -> Indices:
    """Ids of the `count` highest logits, highest first, the lower id first among equals."""
    ids = _upper(logits, count)
    chosen = logits[ids]
    ids = ids[chosen >= np.partition(chosen, -count)[-count]]
    ordered: Indices = ids[np.argsort(-logits[ids], kind="stable")][:count]
    return ordered
