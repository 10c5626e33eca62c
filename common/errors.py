"""Every exception that Tandem raises on purpose.

TandemError
├── RequestError                the client's fault; carries `param` and `code`
│   ├── InvalidRequest          400
│   │   ├── ContextLengthExceeded
│   │   └── InvalidGrammar
│   ├── AuthenticationFailed    401
│   ├── PermissionDenied        403
│   ├── ModelNotFound           404
│   ├── RouteNotFound           404
│   ├── MethodNotAllowed        405
│   ├── BodyTooLarge            413
│   └── UnsupportedEncoding     415
├── RateLimited                 429: this key's limit; carries `retry_after_s`
├── Unavailable                 503: nobody can serve this now; carries `retry_after_s`
│   ├── Overloaded
│   ├── Draining
│   └── BrokerUnavailable       Redis is away
├── GenerationFailed            the request was accepted and then failed; one error event
│   ├── WorkerLost
│   ├── InvalidLogits
│   ├── GrammarViolated         no token could continue the answer within its grammar
│   ├── DeadlineExceeded
│   ├── RequestCancelled        somebody asked for its end
│   ├── ClientTooSlow           too much of answers waits for clients that do not read them
│   └── DoesNotFit              more tokens than the worker can ever hold
├── PeerError                   a message or page of another process cannot be used
│   ├── MalformedRecord
│   ├── IncompatiblePeer
│   ├── PeerUnreachable
│   ├── StalePage
│   ├── PageCorrupt             --verify-pages found other bytes than were announced
│   └── StalePlacement
└── StartupError                a process refuses to start; its message is one line for a person
    ├── InvalidSetting
    ├── ModelUnusable
    └── InsufficientMemory
"""

from typing import ClassVar


class TandemError(Exception):
    """Root of the tree. `is_retryable`: whether the same request may succeed later without being changed."""

    is_retryable: ClassVar[bool] = False


class RequestError(TandemError):
    """The request cannot be served as sent."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int, max_context: int, *, param: str) -> None:
        super().__init__(
            f"This model's maximum context length is {max_context} tokens, but {num_prompt_tokens + max_tokens} were "
            f"requested ({num_prompt_tokens} in the prompt, {max_tokens} for the completion).",
            param=param,
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_context = max_context


class InvalidGrammar(InvalidRequest):
    """The answer's grammar cannot be compiled, or not within the limits. The message says why, of "it"."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="invalid_grammar")


class AuthenticationFailed(RequestError):
    """No key, or one that is not known."""


class PermissionDenied(RequestError):
    """The key is good, but not for this: another model, a higher priority."""


class ModelNotFound(RequestError):
    """The registry knows no such model."""


class RouteNotFound(RequestError):
    """No handler has this path."""


class MethodNotAllowed(RequestError):
    """The path exists, but not with this method."""


class BodyTooLarge(RequestError):
    """The body exceeds the configured limit."""


class UnsupportedEncoding(RequestError):
    """The body's content type or encoding is not accepted."""


class RateLimited(TandemError):
    """One of the limits of the caller's key is reached; `limit` names it: requests, tokens or concurrency."""

    is_retryable = True

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.limit = limit
        self.retry_after_s = retry_after_s


class Unavailable(TandemError):
    """Nobody can serve the request now."""

    is_retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """Every queue that could hold the request is full. For `lasts_s` seconds, as far as that can be foreseen, another
    request of its tenant, priority and time would be refused as well."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, lasts_s: float = 0.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.lasts_s = lasts_s


class Draining(Unavailable):
    """This process is leaving."""


class BrokerUnavailable(Unavailable):
    """Redis does not answer."""


class GenerationFailed(TandemError):
    """An accepted request ended without its answer."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class WorkerLost(GenerationFailed):
    """The worker that held the request is gone and nobody took over."""

    is_retryable = True


class InvalidLogits(GenerationFailed):
    """The model computed NaN for this sequence."""


class GrammarViolated(GenerationFailed):
    """The answer could not be continued within its grammar."""


class DeadlineExceeded(GenerationFailed):
    """The request's time is over."""


class RequestCancelled(GenerationFailed):
    """Somebody asked for the end of the request by its id."""


class ClientTooSlow(GenerationFailed):
    """More waits for clients than may, and this one is furthest behind."""


class DoesNotFit(GenerationFailed):
    """The sequence has more tokens than this worker can ever hold, so waiting would not help."""

    def __init__(self, num_tokens: int, capacity: int) -> None:
        super().__init__(f"{num_tokens} tokens exceed the {capacity} that the worker's KV cache and context can hold")
        self.num_tokens = num_tokens
        self.capacity = capacity


class PeerError(TandemError):
    """Something that another process sent cannot be used; a result of one request, never the end of a process."""


class MalformedRecord(PeerError):
    """Bytes that are not the record they should be."""

    def __init__(self, expected: str, reason: str) -> None:
        super().__init__(f"malformed {expected}: {reason}")
        self.expected = expected
        self.reason = reason


class IncompatiblePeer(PeerError):
    """The peer's fingerprint or protocol differs."""


class PeerUnreachable(PeerError):
    """The peer does not answer."""

    is_retryable = True


class StalePage(PeerError):
    """A page reference no longer names the content it was made for."""


class PageCorrupt(PeerError):
    """A page's checksum differs from the one that its sender announced."""


class StalePlacement(PeerError):
    """The placement was withdrawn, or a newer one of its request exists."""

    def __init__(self, request: str, placement: int) -> None:
        super().__init__(f"placement {placement} of request {request} is stale")
        self.request = request
        self.placement = placement


class StartupError(TandemError):
    """The process cannot start; `str(error)` is the one line that its user reads."""


class InvalidSetting(StartupError):
    """A setting has a value that cannot work."""

    def __init__(self, name: str, value: object, reason: str) -> None:
        super().__init__(f"{name}={value!r}: {reason}")
        self.name = name
        self.value = value


class ModelUnusable(StartupError):
    """The model's files are missing, damaged or of an unsupported kind."""


class InsufficientMemory(StartupError):
    """What must fit does not."""
