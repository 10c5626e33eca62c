"""Errors as clients see them: one match from the exception tree to status, OpenAI error object and headers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    ClientTooSlow,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RateLimited,
    RequestCancelled,
    RequestError,
    RouteNotFound,
    Unavailable,
    UnsupportedEncoding,
    WorkerLost,
)
from gateway.schemas.errors import ErrorBody, ErrorDetail

INTERNAL_MESSAGE = "The server made a mistake; it is logged under this request's id."


@dataclass(frozen=True, slots=True)
class Problem:
    """An answer that is not a success."""

    status: int
    detail: ErrorDetail
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """What went wrong, in a word."""
        return self.detail.code or self.detail.type

    @property
    def body(self) -> ErrorBody:
        """The error object."""
        return ErrorBody(self.detail)


def problem_of(error: BaseException) -> Problem:
    """Return the answer to `error`; what is not of our tree is a bug and tells nothing about itself."""
    match error:
        case RequestError():
            return _request_problem(error)
        case RateLimited():
            detail = ErrorDetail(error.message, "rate_limit_error", code="rate_limit_exceeded")
            return Problem(429, detail, _retry_after(error.retry_after_s))
        case Unavailable():
            detail = ErrorDetail(error.message, "service_unavailable", code=_unavailable_code(error))
            return Problem(503, detail, _retry_after(error.retry_after_s))
        case WorkerLost():
            return Problem(503, ErrorDetail(error.message, "server_error", code="worker_lost"), _retry_after(1.0))
        case DeadlineExceeded():
            return Problem(504, ErrorDetail(error.message, "server_error", code="deadline_exceeded"))
        case RequestCancelled():
            return Problem(499, ErrorDetail(error.message, "server_error", code="request_cancelled"))
        case ClientTooSlow():
            return Problem(499, ErrorDetail(error.message, "server_error", code="client_too_slow"))
        case GenerationFailed():
            return Problem(500, ErrorDetail(error.message, "server_error", code="generation_failed"))
        case _:
            return Problem(500, ErrorDetail(INTERNAL_MESSAGE, "server_error", code="internal_error"))


def refusal_of(error: BaseException) -> str | None:
    """Return why a request was not let in, for the metrics; None: it was, or is wrong in itself."""
    match error:
        case RateLimited():
            return error.limit
        case AuthenticationFailed():
            return "key"
        case PermissionDenied():
            return "permission"
        case Unavailable():
            return _unavailable_code(error)
        case _:
            return None


def _request_problem(error: RequestError) -> Problem:
    match error:
        case InvalidRequest():
            status, code = 400, error.code
        case AuthenticationFailed():
            status, code = 401, error.code or "invalid_api_key"
        case PermissionDenied():
            status, code = 403, error.code or "permission_denied"
        case ModelNotFound():
            status, code = 404, error.code or "model_not_found"
        case RouteNotFound():
            status, code = 404, error.code or "not_found"
        case MethodNotAllowed():
            status, code = 405, error.code or "method_not_allowed"
        case BodyTooLarge():
            status, code = 413, error.code or "body_too_large"
        case UnsupportedEncoding():
            status, code = 415, error.code or "unsupported_encoding"
        case _:
            status, code = 400, error.code
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return Problem(status, ErrorDetail(error.message, "invalid_request_error", error.param, code), headers)


def _unavailable_code(error: Unavailable) -> str:
    match error:
        case Overloaded():
            return "overloaded"
        case Draining():
            return "draining"
        case _:
            return "unavailable"


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
