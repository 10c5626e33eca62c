"""Every error has an answer."""

import pytest

from common import errors
from common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    InvalidLogits,
    InvalidRequest,
    MalformedRecord,
    ModelNotFound,
    Overloaded,
    RequestError,
    TandemError,
    WorkerLost,
)
from gateway.problems import INTERNAL_MESSAGE, problem_of


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("m", param="p", code="c"), 400, "c"),
        (ContextLengthExceeded(60, 5, 64, param="prompt"), 400, "context_length_exceeded"),
        (errors.AuthenticationFailed("m"), 401, "invalid_api_key"),
        (ModelNotFound("m"), 404, "model_not_found"),
        (errors.RouteNotFound("m"), 404, "not_found"),
        (errors.MethodNotAllowed("m"), 405, "method_not_allowed"),
        (errors.BodyTooLarge("m"), 413, "body_too_large"),
        (errors.UnsupportedEncoding("m"), 415, "unsupported_encoding"),
        (Overloaded("m"), 503, "overloaded"),
        (Draining("m"), 503, "draining"),
        (errors.BrokerUnavailable("m"), 503, "unavailable"),
        (WorkerLost("m"), 503, "worker_lost"),
        (InvalidLogits("m"), 500, "generation_failed"),
        (DeadlineExceeded("m"), 504, "deadline_exceeded"),
    ],
)
def test_status_and_code(error: TandemError, status: int, code: str) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.detail.code) == (status, code)
    assert problem.detail.message == str(error)


def test_param_is_passed_on() -> None:
    assert problem_of(InvalidRequest("m", param="top_p")).detail.param == "top_p"


@pytest.mark.parametrize(("wait_s", "header"), [(0.2, "1"), (1.0, "1"), (2.1, "3")])
def test_unavailable_says_when_to_come_back(wait_s: float, header: str) -> None:
    assert problem_of(Overloaded("m", retry_after_s=wait_s)).headers["Retry-After"] == header


def test_bugs_tell_nothing_about_themselves() -> None:
    for error in (KeyError("secret"), MalformedRecord("secret", "x"), RuntimeError("secret")):
        problem = problem_of(error)
        assert problem.status == 500
        assert problem.detail.message == INTERNAL_MESSAGE


def test_every_request_error_is_a_4xx() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
    plain = [kind for kind in kinds if kind is not ContextLengthExceeded]
    assert len(plain) >= 8
    assert all(400 <= problem_of(kind("m")).status < 500 for kind in plain)
