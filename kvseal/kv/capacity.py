"""Capacity: one verdict on whether a request fits, the same for admission, start-up report, router and planner (L1).

Owns the arithmetic of limits. Never reserves anything. A request is refused when prompt and output budget exceed the served context or
the pages that could ever be available; the served context is never larger than the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvseal.core.errors import ConfigError, ContextLengthExceeded, PoolTooSmall

MODEL_LIMIT = "the model's own limit"
POOL_LIMIT = "what the pool holds"
FIXED_LIMIT = "--context-tokens"


@dataclass(frozen=True, slots=True)
class Fits:
    """It can start now: so many pages hold its whole budget."""

    pages: int


@dataclass(frozen=True, slots=True)
class Waits:
    """It fits the pool, but not beside what holds pages now."""

    pages: int
    available_pages: int


@dataclass(frozen=True, slots=True)
class NeverFits:
    """No waiting will help. `limit` names what it exceeds: "served context" or "pool"."""

    limit: str
    prompt_tokens: int
    max_output_tokens: int
    max_servable_tokens: int
    pool_tokens: int

    def error(self, where: str = "messages") -> ContextLengthExceeded:
        """What the caller is told; `where` names the field that holds the prompt."""
        return ContextLengthExceeded.of(
            prompt_tokens=self.prompt_tokens,
            max_output_tokens=self.max_output_tokens,
            max_servable_tokens=self.max_servable_tokens,
            pool_tokens=self.pool_tokens,
            where=where,
        )


Verdict = Fits | Waits | NeverFits


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The limits in force. Build it with `derive`, which keeps the served context within the pool."""

    served_context_tokens: int
    context_reason: str
    pool_pages: int
    page_tokens: int

    @classmethod
    def derive(cls, *, model_context_tokens: int, pool_pages: int, page_tokens: int, fixed_context_tokens: int | None = None) -> Capacity:
        """Serves what model and pool both hold, or exactly what the operator fixed.

        Raises `PoolTooSmall` (with the size that would do) when the pool cannot hold the fixed context or has no page at all, and
        `ConfigError` when the fixed context is more than the model promises.
        """
        pool_tokens = pool_pages * page_tokens
        if pool_pages < 1:
            raise PoolTooSmall(f"the KV pool holds no page; it needs at least {page_tokens} tokens (one page): --pool-tokens {page_tokens}")
        if fixed_context_tokens is None:
            if model_context_tokens <= pool_tokens:
                served, reason = model_context_tokens, MODEL_LIMIT
            else:
                served, reason = pool_tokens, POOL_LIMIT
            return cls(served_context_tokens=served, context_reason=reason, pool_pages=pool_pages, page_tokens=page_tokens)
        if fixed_context_tokens > model_context_tokens:
            raise ConfigError(
                f"--context-tokens is {fixed_context_tokens}, but the model promises {model_context_tokens}; give at most that"
            )
        if fixed_context_tokens > pool_tokens:
            would_do = -(-fixed_context_tokens // page_tokens) * page_tokens
            raise PoolTooSmall(
                f"--context-tokens promises {fixed_context_tokens} tokens, but the KV pool holds {pool_tokens}. "
                f"Give the pool at least {would_do} tokens (--pool-tokens {would_do}), or leave --context-tokens out "
                f"to serve what the pool holds."
            )
        return cls(served_context_tokens=fixed_context_tokens, context_reason=FIXED_LIMIT, pool_pages=pool_pages, page_tokens=page_tokens)

    @property
    def pool_tokens(self) -> int:
        return self.pool_pages * self.page_tokens

    @property
    def full_length_requests(self) -> int:
        """How many requests of the served context fit at once."""
        return self.pool_pages // self.pages_for(self.served_context_tokens)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def verdict(
        self, prompt_tokens: int, max_output_tokens: int, *, available_pages: int | None = None, quarantined_pages: int = 0
    ) -> Verdict:
        """Judges prompt plus output budget. Without `available_pages` an empty pool is assumed; quarantined pages never count."""
        budget_tokens = prompt_tokens + max_output_tokens
        pages = self.pages_for(budget_tokens)
        usable_pages = self.pool_pages - quarantined_pages
        servable_tokens = min(self.served_context_tokens, usable_pages * self.page_tokens)
        if budget_tokens > servable_tokens:
            limit = "served context" if budget_tokens > self.served_context_tokens else "pool"
            return NeverFits(limit, prompt_tokens, max_output_tokens, servable_tokens, usable_pages * self.page_tokens)
        if available_pages is not None and pages > available_pages:
            return Waits(pages, available_pages)
        return Fits(pages)
