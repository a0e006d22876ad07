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

FIRST_CANDIDATES = 256
"""How many of the highest logits are looked at first for `top_p`; eight times as many each time they do not suffice."""


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None


def sample(logits: Float32, params: SamplingParams, *, history: Sequence[int], prompt_tokens: int, output_index: int) -> Sampled:
    """[vocab_size] -> token. `history` is prompt and output so far. Raises SamplingFailed."""
    best = int(logits.argmax())
    if not (math.isfinite(logits[best]) and math.isfinite(logits.min())):
        raise SamplingFailed("the model's output is not finite at this position; the request was stopped before a token was chosen")
    if not _is_plain_greedy(params, output_index):
        values, ids = _adjusted(logits, params, history, prompt_tokens, output_index)
        best = _choose(values, ids, params, output_index)
    return Sampled(best, None if params.logprobs is None else token_logprobs(logits, best, params.logprobs))


def uniform(seed: int, output_index: int) -> float:
    """A number in [0, 1), the same for the same pair on every machine: 53 bits of a keyed hash of the counter."""
    digest = hashlib.blake2b(output_index.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def token_logprobs(logits: Float32, token: int, top: int) -> TokenLogprobs:
    """Natural log-probabilities of `token` and of the `top` likeliest tokens, under the softmax of the raw logits."""
    highest = float(logits.max())
    log_total = highest + math.log(float(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)))
    if not math.isfinite(log_total):
        raise SamplingFailed("the model's output is not finite at this position; the request was stopped before a token was chosen")
    likeliest = _highest(logits, top) if top else ()
    return TokenLogprobs(token, float(logits[token]) - log_total, tuple((int(i), float(logits[i]) - log_total) for i in likeliest))


def _is_plain_greedy(params: SamplingParams, output_index: int) -> bool:
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
) -> tuple[Float64, Indices | None]:
    """Steps 1 to 5: values, and the token ids they belong to (None: all, in order)."""
    values = logits.astype(np.float64)
    if params.logit_bias:
        values[np.fromiter(params.logit_bias.keys(), np.int64)] += np.fromiter(params.logit_bias.values(), np.float64)
    if params.repetition_penalty != 1:
        seen = np.unique(np.fromiter(history, np.int64, len(history)))
        before = values[seen]
        values[seen] = np.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(history) > prompt_tokens:
        seen, counts = np.unique(np.array(history[prompt_tokens:], dtype=np.int64), return_counts=True)
        values[seen] -= params.frequency_penalty * counts + params.presence_penalty
    if output_index < params.min_tokens and params.stop_token_ids:
        values[np.fromiter(params.stop_token_ids, np.int64)] = -np.inf
    if params.allowed_token_ids is None:
        return values, None
    ids = np.unique(np.array(params.allowed_token_ids, dtype=np.int64))
    return values[ids], ids


def _choose(values: Float64, ids: Indices | None, params: SamplingParams, output_index: int) -> int:
    """Steps 6 to 10."""
    best = int(values.argmax())
    highest = values[best]
    if highest == -np.inf:
        raise SamplingFailed("every token is ruled out (allowed_token_ids, stop ids before min_tokens); none can be chosen")
    if params.temperature > 0:
        best = _draw((values - highest) / params.temperature, params, uniform(params.seed, output_index))
    return best if ids is None else int(ids[best])


def _draw(values: Float64, params: SamplingParams, point: float) -> int:
    """Steps 7 to 10. `values` are scaled logits below their maximum, 0."""
    lowest = -np.inf
    if 0 < params.top_k < len(values):
        lowest = float(np.partition(values, -params.top_k)[-params.top_k])
    if params.top_p < 1:
        lowest = max(lowest, _nucleus_floor(values, params.top_p, lowest))
    if params.min_p > 0:
        lowest = max(lowest, math.log(params.min_p))
    kept = np.flatnonzero(values >= lowest) if lowest > -np.inf else None
    cumulative = np.exp(values if kept is None else values[kept]).cumsum()
    place = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
    place = min(place, int(np.searchsorted(cumulative, cumulative[-1], side="left")))  # rounding at the far end
    return place if kept is None else int(kept[place])


def _nucleus_floor(values: Float64, share: float, lowest: float) -> float:
    """The value of the last token of the nucleus: the fewest highest values from `lowest` up that hold `share` of their total weight."""
    weights = np.exp(values)
    target = share * float((weights if lowest == -np.inf else weights[values >= lowest]).sum())
    count = FIRST_CANDIDATES
    while count < len(values):
        floor = float(np.partition(values, -count)[-count])
        among = values[values >= floor]
        if float(np.exp(among).sum()) >= target:
            break
        count *= 8
    else:
        among = values
    ordered = -np.sort(-among)
    cumulative = np.exp(ordered).cumsum()
    last = min(int(np.searchsorted(cumulative, target, side="left")), len(ordered) - 1)
    return float(ordered[last])


def _highest(logits: Float32, count: int) -> Indices:
    """Ids of the `count` highest logits, highest first, the lower id first among equals."""
    count = min(count, len(logits))
    floor = np.partition(logits, -count)[-count]
    ids = np.flatnonzero(logits >= floor)
    return ids[np.argsort(-logits[ids], kind="stable")][:count]
