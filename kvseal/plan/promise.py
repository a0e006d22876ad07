"""Is the promised context true? One comparison per pool, an exit status, and what would be missing.

Owns the decision rule: pool tokens >= promised context, for the prefill and the decode pool separately (L1), and the promise within the
limit of the model and of the running server, beyond which engines refuse. Never rounds in favour of the promise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClaim:
    """One pool as somebody knows it: measured, given, or computed."""

    name: str
    """prefill, decode, or pool."""
    tokens: int
    """The longest request that it holds."""
    source: str
    low_tokens: int | None = None
    high_tokens: int | None = None
    """Bounds when the pool is an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolVerdict:
    claim: PoolClaim
    held: bool
    missing_tokens: int
    missing_bytes: int | None
    """Per rank; None when the model is not known."""
    certain: bool
    """False when the other end of the estimate would say the opposite."""
    warning: str = ""

    @property
    def share(self) -> float:
        """Pool over promise."""
        total = self.claim.tokens + self.missing_tokens
        return 1.0 if self.held or not total else self.claim.tokens / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The longest request that is admitted, whatever the pool holds."""

    tokens: int
    source: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseResult:
    """All pools together. The true context is that of the smallest pool, within the limit."""

    promised_tokens: int
    verdicts: tuple[PoolVerdict, ...]
    limit: Limit | None = None
    """None when no limit is known: then the pools alone decide."""

    @property
    def beyond_limit(self) -> bool:
        return self.limit is not None and self.promised_tokens > self.limit.tokens

    @property
    def held(self) -> bool:
        return not self.beyond_limit and all(verdict.held for verdict in self.verdicts)

    @property
    def largest_true_context(self) -> int:
        pools = min(verdict.claim.tokens for verdict in self.verdicts)
        return pools if self.limit is None else min(pools, self.limit.tokens)

    @property
    def exit_status(self) -> int:
        return 0 if self.held else 1


def judge(
    promised_tokens: int, claims: list[PoolClaim], bytes_per_request: object = None, warning: str = "", limit: Limit | None = None
) -> PromiseResult:
    """`bytes_per_request` is a function from tokens to bytes on one rank, or None."""
    verdicts = []
    for claim in claims:
        held = claim.tokens >= promised_tokens
        missing = max(promised_tokens - claim.tokens, 0)
        size = None
        if callable(bytes_per_request):
            size = max(int(bytes_per_request(promised_tokens)) - int(bytes_per_request(claim.tokens)), 0) if missing else 0
        bound = claim.low_tokens if held else claim.high_tokens
        certain = bound is None or (bound >= promised_tokens) == held
        verdicts.append(
            PoolVerdict(
                claim=claim, held=held, missing_tokens=missing, missing_bytes=size, certain=certain, warning="" if held else warning
            )
        )
    return PromiseResult(promised_tokens=promised_tokens, verdicts=tuple(verdicts), limit=limit)
