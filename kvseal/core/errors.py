"""Every error of KVSeal, as one drawn tree.

::

    KVSealError
    |- SetupError              the server cannot start as asked; says what would work
    |  |- ConfigError          an option is wrong or two options contradict each other
    |  |- ModelError           the model cannot be served
    |  |  |- ModelNotFound
    |  |  |- ModelCorrupt      truncated, misshapen or missing tensors; names the key
    |  |  `- ModelUnsupported  an architecture or feature that we do not compute; names the key
    |  |- PoolTooSmall         the KV pool cannot hold what was promised (L1); names the size that would do
    |  `- PortInUse
    |- RequestError            the caller's to mend; nothing was reserved (4xx)
    |  |- InvalidRequest       names the parameter
    |  |- ContextLengthExceeded (L1) with the numbers
    |  |- Unauthenticated, Forbidden, NotFound, BodyTooLarge, RateLimited
    |- Unavailable             the server's to mend; trying again may help (5xx)
    |  |- Overloaded           the waiting line is full; has retry_after_s
    |  |- Draining
    |  |- EngineDied
    |  |- DeadlineExceeded
    |  |- SamplingFailed       the model's output is not finite, or no token may be chosen
    |  `- KVTransferFailed     (L9)
    |- BrokenSeal              a read or write that did not match its seal (L3-L7, L10); ends that request alone
    `- LawBroken               our own bug, caught: a double release, an unknown transition (L2, L8, L11)

Errors are values: `RequestError`, `Unavailable` and `BrokenSeal` travel inside `core.outcome`. Failure is never expressed by
editing a request. No text here ever holds prompt or output content.
"""

from __future__ import annotations

from kvseal.core.laws import Law


class KVSealError(Exception):
    """Root of the tree. ``str(error)`` is for people: it names the limit and the remedy."""


# --- the server cannot start -------------------------------------------------------------------------------


class SetupError(KVSealError):
    """The server cannot start as asked."""


class ConfigError(SetupError):
    """An option is unknown, out of range, or contradicts another."""


class ModelError(SetupError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """Neither a file, a directory nor a reachable hub id."""


class ModelCorrupt(ModelError):
    """A truncated file, a missing or misshapen tensor, a header that lies. Names the key or the tensor."""


class ModelUnsupported(ModelError):
    """An architecture, tensor type or feature that KVSeal does not compute. Names the key."""


class PoolTooSmall(SetupError):
    """The pool cannot hold the promised context, or memory cannot hold the pool (L1)."""


class PortInUse(SetupError):
    """Somebody else listens there."""


# --- the caller's to mend ----------------------------------------------------------------------------------


class RequestError(KVSealError):
    """Refused before anything was reserved. `param` names the field at fault; `details` holds numbers only."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, details: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details or {}


class InvalidRequest(RequestError):
    """A field is missing, malformed, of the wrong type or out of range."""

    code = "invalid_value"


class ContextLengthExceeded(RequestError):
    """Prompt and output budget can never fit (L1). The wording is what OpenAI clients recognise."""

    code = "context_length_exceeded"

    @classmethod
    def of(
        cls, *, prompt_tokens: int, max_output_tokens: int, max_servable_tokens: int, pool_tokens: int, where: str = "messages"
    ) -> ContextLengthExceeded:
        total = prompt_tokens + max_output_tokens
        what = "the prompt is too long" if prompt_tokens >= max_servable_tokens else "reduce the prompt or the completion"
        return cls(
            f"This model's maximum context length is {max_servable_tokens} tokens. However, you requested {total} tokens "
            f"({prompt_tokens} in the {where}, {max_output_tokens} in the completion): {what} (context_length_exceeded).",
            param=where,
            details={
                "prompt_tokens": prompt_tokens,
                "max_output_tokens": max_output_tokens,
                "max_servable_tokens": max_servable_tokens,
                "pool_tokens": pool_tokens,
            },
        )


class Unauthenticated(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(RequestError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class ModelNotServed(NotFound):
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class RateLimited(RequestError):
    """A tenant's own quota is used up."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, **kwargs: object) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# --- the server's to mend ----------------------------------------------------------------------------------


class Unavailable(KVSealError):
    """The request was well-formed and was not, or not completely, served."""

    status = 503
    type = "server_error"
    code = "unavailable"
    retry_after_s: float | None = 1.0

    @property
    def message(self) -> str:
        return str(self)


class Overloaded(Unavailable):
    """The waiting line is full."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Unavailable):
    """The server is shutting down and takes nothing new."""

    code = "draining"


class EngineDied(Unavailable):
    """The engine process ended while the request was open."""

    code = "engine_died"


class DeadlineExceeded(Unavailable):
    """The request's deadline passed before it was complete."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    retry_after_s = None


class SamplingFailed(Unavailable):
    """No token can be chosen: the model's output is not finite, or every token is ruled out. Ends that request alone."""

    status = 500
    code = "sampling_failed"
    retry_after_s = None


class KVTransferFailed(Unavailable):
    """A hand-off between nodes did not prove itself (L9)."""

    code = "kv_transfer_failed"


# --- integrity ---------------------------------------------------------------------------------------------


class BrokenSeal(KVSealError):
    """A read or write did not match the seal in the page's memory. Ends that request alone (L12)."""

    status = 500
    type = "server_error"
    code = "kv_integrity_error"

    def __init__(self, law: Law, *, page: int, ordinal: int, layer: int, check: str) -> None:
        super().__init__(
            f"a cache page did not bear the seal that this request needs ({check}; law {law}: {law.statement}). "
            "Nothing was read from it; the request was stopped and the page put out of use. Retrying is safe."
        )
        self.law = law
        self.page = page
        self.ordinal = ordinal
        self.layer = layer
        self.check = check

    @property
    def message(self) -> str:
        return str(self)


class LawBroken(KVSealError):
    """Our own bug, caught before it could do harm. Never raised by anything a caller can do."""

    def __init__(self, law: Law, what: str) -> None:
        super().__init__(f"law {law} ({law.statement}): {what}")
        self.law = law
