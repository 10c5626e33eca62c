"""Errors as clients of gRPC see them: the answer of the HTTP API (`gateway.problems`), said in gRPC's terms.

What the HTTP API calls by its own names is called here as in `generate.proto`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from gateway.problems import problem_of
from proto.tandem.v1 import generate_pb2 as pb

CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By the status of the HTTP API."""

ERROR_CODE = "tandem-error-code"
ERROR_PARAM = "tandem-error-param"
RETRY_AFTER = "retry-after"

_RENAMED = {
    "n": "num_choices",
    "logprobs": "num_logprobs",
    "top_logprobs": "num_logprobs",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "messages": "chat.messages",
}
_SAMPLING = frozenset(pb.Sampling.DESCRIPTOR.fields_by_name)
_QUOTED_FIELD = re.compile(r"(?<=`)\w+(?=[`.\[])")
_FIRST_FIELD = re.compile(r"^\w+")


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends that fails."""

    code: grpc.StatusCode
    message: str
    trailing: tuple[tuple[str, str], ...]


def status_of(error: BaseException) -> Status:
    """Return how a call ends that fails with `error`."""
    problem = problem_of(error)
    trailing = {ERROR_CODE: problem.code}
    if problem.detail.param is not None:
        trailing[ERROR_PARAM] = _FIRST_FIELD.sub(_renamed, problem.detail.param)
    if "Retry-After" in problem.headers:
        trailing[RETRY_AFTER] = problem.headers["Retry-After"]
    message = _QUOTED_FIELD.sub(_renamed, problem.detail.message)
    return Status(CODES[problem.status], message, tuple(trailing.items()))


def _renamed(found: re.Match[str]) -> str:
    """Return the path of a field of `GenerateRequest`; other words stay as they are."""
    name = _RENAMED.get(found[0], found[0])
    return f"sampling.{name}" if name in _SAMPLING else name
